"""The policy: a frozen base model with a LoRA adapter that is never merged into it.

Deltas merged into bf16 weights mostly round away (93 to 98 % of an early update), so sampling,
scoring and training all go through the unmerged adapter. The base's weights stand in the plan's
precision, the adapter in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.rollout.forward import packs
from nbtrain.training.base_weights import language_target, load_base
from nbtrain.training.packing import Part, Unit
from nbtrain.training.prefix import keeps_apart, scored
from nbtrain.training.scoring import Scorer

NO_LIMIT = 1 << 40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


class Policy:
    """Base model, adapter and device. ``model`` is the PEFT model that sampling and loss share.

    ``packs`` tells whether trajectories may share rows and prompts: the configuration allows it
    up to ``max_context`` tokens (default: any number), and a trial shows that this model's scores
    do not change by it. Otherwise every trajectory runs in a plain row of its own.
    """

    def __init__(
        self, model: PeftModel, device: torch.device, *, max_context: int | None = None
    ) -> None:
        self.model = model
        self.device = device
        self.trainable: dict[str, torch.nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._scorer = Scorer(model)
        limit = NO_LIMIT if max_context is None else max_context
        self.packs = packs(model.config, limit) and keeps_apart(self._scorer, device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        precision: str,
        lora_rank: int,
        lora_alpha: float,
        target_modules: str,
        seed: int,
        device: torch.device,
        max_context: int | None = None,
    ) -> Policy:
        """Load the base from ``folder`` and attach a fresh adapter, initialised from ``seed``.

        Raises
        ------
        StartChecksFailed
            When ``target_modules`` matches no linear module of the model, or the model is of no
            kind that can be trained.
        """
        base = load_base(folder, dtype=DTYPES[precision], device=device)
        torch.manual_seed(seed)
        try:
            config = LoraConfig(
                r=lora_rank,
                lora_alpha=lora_alpha,
                lora_dropout=0.0,
                target_modules=(
                    language_target(base) if target_modules == "default" else target_modules
                ),
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(base, config)
        except ValueError as error:
            raise StartChecksFailed([_no_target(target_modules, str(error))]) from error
        model.eval()  # the adapter has no dropout; nothing else may be random either
        return cls(model, device, max_context=max_context)

    @property
    def exact(self) -> bool:
        """Whether every weight has 32 bits or more: sampler and trainer then agree to rounding."""
        return all(parameter.dtype.itemsize >= 4 for parameter in self.model.parameters())

    def scored(
        self, unit: Unit, *, temperature: float, adapter: bool = True
    ) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Each part of ``unit`` with its tokens' log-probs and entropies, both (T,).

        In fp32, or in the model's own precision where that is higher, under the full softmax at
        ``temperature`` (1 for greedy); ``adapter=False`` scores the base. With gradients on, a
        part must be back-propagated before the next is asked for, and the iterator run to its end.
        """
        return scored(self._scorer, unit, temperature=temperature, adapter=adapter)

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

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """The model's own top_p and top_k, ``None`` where it declares none."""
        config = self.model.generation_config
        return {"top_p": getattr(config, "top_p", None), "top_k": getattr(config, "top_k", None)}


def _no_target(pattern: str, said: str) -> Problem:
    return Problem(
        field="lora_target_modules",
        message=f"lora_target_modules {pattern!r} matches no linear module: {said}",
        found=pattern,
        allowed="'default', or a pattern over whole module paths",
    )


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
