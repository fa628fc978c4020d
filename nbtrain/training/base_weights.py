"""Loading a base model of any architecture, and which of its modules an adapter is for.

Text models come as causal language models; image-text models whole, as their checkpoints are
laid out, though only the language backbone is ever called and trained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.pytorch_utils import Conv1D

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.rollout.products import computes_wide, widen

__all__ = ["DTYPES", "language_target", "load_base"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}
"""What a base of each precision stands in; of four bits, everything but its linear layers."""
_NO_OUT_PROJ = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Model types for which PEFT refuses ``out_proj``: a fused kernel reads its weight past it."""


def load_base(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = None,
    four_bit: bool = False,
) -> nn.Module:
    """The base model of a local folder, in eval mode.

    ``attention`` names the kernel of its attention layers (``sdpa`` or ``eager``); by default it
    is transformers' own choice: scaled dot-product wherever the architecture has it. ``four_bit``
    quantises the linear layers to nf4 while they are loaded; ``dtype`` is then what they compute
    in, and what everything else stands in.

    Raises
    ------
    StartChecksFailed
        For an encoder-decoder, for a model with neither a causal nor an image-text class, and
        for one that does not have the ``attention`` that is asked for.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    more: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if four_bit:
        computed = torch.float32 if computes_wide(dtype, device) else dtype
        more |= {"quantization_config": _nf4(computed), "device_map": {"": device}}
    loader = _loader(config)
    try:
        model: Any = loader.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, **more
        )
    except ValueError as error:
        if attention is None or "attention implementation" not in str(error):
            raise
        raise StartChecksFailed([_no_kernel(config.model_type, attention)]) from error
    if not four_bit:
        model.to(device)
    widen(model)
    model.config.use_cache = True
    loaded: nn.Module = model.eval()
    return loaded


def language_target(model: nn.Module) -> str:
    """PEFT's ``target_modules`` for every linear layer of the language backbone.

    ``"all-linear"`` where that says it, else a regular expression over whole module paths. Left
    out are the output head; vision tower and projector of image-text models; and the recurrent
    layers' modules whose weights are read without calling them, so that an adapter on them
    would never take part.

    Raises ``ValueError`` when there is no linear layer in the backbone.
    """
    base: Any = model
    inside = _backbone(base)
    head = base.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    chosen = {
        name
        for name in linear
        if name.startswith(inside) and not _bypassed(name, modules, base.config.model_type)
    }
    if not chosen:
        msg = f"{type(model).__name__} has no linear layer in its language backbone"
        raise ValueError(msg)
    return "all-linear" if chosen == linear else _pattern(chosen, set(modules))


def _no_kernel(model_type: str, attention: str) -> Problem:
    return Problem(
        field="attention_implementation",
        message=f"models of type {model_type!r} have no attention_implementation {attention}",
        found=attention,
        allowed="eager",
    )


def _nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _loader(config: Any) -> Any:
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    if not encodes:
        # Some image-text configurations have a causal class too; published checkpoints are laid
        # out for the whole model.
        if (
            hasattr(config, "vision_config")
            and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        ):
            return AutoModelForImageTextToText
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM
    said = "is an encoder-decoder" if encodes else "has no causal and no image-text class"
    raise StartChecksFailed(
        [
            Problem(
                field="base_model_slug",
                message=f"the model of type {config.model_type!r} {said}",
                found=config.model_type,
                allowed="causal language models, and image-text models, which are trained on text",
            )
        ]
    )


def _backbone(model: Any) -> str:
    """What paths of modules in the language backbone begin with; empty where all is language."""
    if not hasattr(model.config, "vision_config"):
        return ""
    decoder = model.get_decoder()
    if decoder is model:
        msg = f"{type(model).__name__} does not tell its language backbone from the rest"
        raise ValueError(msg)
    names = (name for name, module in model.named_modules() if module is decoder)
    return f"{next(names)}."


def _bypassed(name: str, modules: dict[str, nn.Module], model_type: str) -> bool:
    parent, _, own = name.rpartition(".")
    if own == "dt_proj":
        return hasattr(modules[parent], "conv1d")
    return own == "out_proj" and model_type in _NO_OUT_PROJ


def _pattern(chosen: set[str], modules: set[str]) -> str:
    """A regular expression that matches exactly the chosen paths, of whatever layer number."""
    generic = "|".join(sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in chosen}))
    if {name for name in modules if re.fullmatch(generic, name)} == chosen:
        return generic
    return "|".join(re.escape(name) for name in sorted(chosen))
