"""A frozen base model with a LoRA adapter in fp32: what every method trains, saves and loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.training import matching
from nbtrain.training.base_weights import language_target

__all__ = ["AdaptedModel", "attach_adapter", "load_tokenizer"]

PATHS_SHOWN = 5
"""Module paths that a refused pattern is answered with."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def attach_adapter(
    base: nn.Module,
    *,
    lora_rank: int,
    lora_alpha: float,
    target_modules: str,
    seed: int,
    lora_dropout: float = 0.0,
) -> PeftModel:
    """``base`` under a fresh adapter, initialised from ``seed``.

    ``target_modules`` is ``"default"``, every linear layer of the language backbone, or a regular
    expression over whole module paths.

    Raises
    ------
    StartChecksFailed
        When it matches no linear module, or is not done matching in reasonable time; some paths
        that there are are shown.
    """
    if target_modules != "default":
        _check_done(base, target_modules)
    torch.manual_seed(seed)
    try:
        config = LoraConfig(
            r=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=language_target(base) if target_modules == "default" else target_modules,
            task_type="CAUSAL_LM",
        )
        return get_peft_model(base, config)
    except ValueError as error:
        said = f"matches no linear module: {error}"
        raise StartChecksFailed([_no_target(base, target_modules, said)]) from error


class AdaptedModel:
    """A PEFT model, the device it is on, and its trainable parameters by name."""

    def __init__(self, model: PeftModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.trainable: dict[str, torch.nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """The model's own top_p and top_k, ``None`` where it declares none."""
        config = self.model.generation_config
        return {"top_p": getattr(config, "top_p", None), "top_k": getattr(config, "top_k", None)}

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter's weights under PEFT's names on disk, detached, on the CPU."""
        return {
            _on_disk(name): p.detach().to("cpu", copy=True).contiguous()
            for name, p in self.trainable.items()
        }

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's ``adapter_config.json`` for this adapter."""
        config = self.model.peft_config["default"].to_dict()
        config["inference_mode"] = True
        return {name: _plain(value) for name, value in config.items()}

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter into a new folder, as PEFT saves it."""
        folder.mkdir(mode=0o700, parents=True)
        save_file(self.adapter_state(), folder / "adapter_model.safetensors")
        text = json.dumps(self.adapter_config(), allow_nan=False)
        (folder / "adapter_config.json").write_text(text, "utf-8")

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Strict: every tensor is used, none is missing, shapes agree. Raises ``ValueError``."""
        wanted = {_on_disk(name): parameter for name, parameter in self.trainable.items()}
        missing = sorted(wanted.keys() - state.keys())
        unknown = sorted(state.keys() - wanted.keys())
        if missing or unknown:
            msg = (
                f"the adapter does not fit: {len(missing)} tensors missing, "
                f"{len(unknown)} unknown, for example {(missing or unknown)[0]}"
            )
            raise ValueError(msg)
        for name, parameter in wanted.items():
            if parameter.shape != state[name].shape:
                found, needed = tuple(state[name].shape), tuple(parameter.shape)
                msg = f"the adapter does not fit: {name} has shape {found}, needed is {needed}"
                raise ValueError(msg)
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(state[name])


def _check_done(base: nn.Module, pattern: str) -> None:
    paths = [name for name, _ in base.named_modules()]
    if not matching.is_done_matching(pattern, [*paths, *EMBEDDING_LAYER_NAMES]):
        said = f"is not matched against the module paths within {matching.SECONDS} s"
        problem = _no_target(base, pattern, said)
        hint = "Repeat no group that repeats something itself, such as (.*)*"
        raise StartChecksFailed([replace(problem, hint=hint)])


def _no_target(base: nn.Module, pattern: str, said: str) -> Problem:
    return Problem(
        field="lora_target_modules",
        message=f"lora_target_modules {pattern!r} {said}",
        found=pattern,
        allowed=f"'default', or a pattern over whole module paths, such as {_paths(base)}",
    )


def _paths(base: nn.Module) -> str:
    linear = (name for name, module in base.named_modules() if isinstance(module, nn.Linear))
    shown: Sequence[str] = list(islice(linear, PATHS_SHOWN))
    return ", ".join(shown)


def _on_disk(name: str) -> str:
    """PEFT writes a parameter without the name of its adapter, so that any name can load it."""
    return name.replace(".default.", ".")


def _plain(value: Any) -> Any:
    """JSON-ready: sets become sorted lists, enumerations their values."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    return value
