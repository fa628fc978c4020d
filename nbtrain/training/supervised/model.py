"""The model of a supervised run: the base in bf16 or four bits, its adapter in fp32."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.training.adapted import AdaptedModel, attach_adapter
from nbtrain.training.base_weights import DTYPES, load_base

__all__ = ["leaves_lean", "load_model", "only_adapter_dropout"]


def load_model(plan: ResolvedPlan, folder: Path, device: torch.device) -> AdaptedModel:
    """Load the base of ``plan`` from ``folder`` and attach a fresh adapter.

    Raises :class:`StartChecksFailed` when no module matches, or the model cannot be trained.
    """
    precision = plan["precision"]
    base = load_base(
        folder,
        dtype=DTYPES[precision],
        device=device,
        attention=plan["attention_implementation"],
        four_bit=precision == "int4",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's, over names of transformers
        model = attach_adapter(
            base,
            lora_rank=plan["lora_rank"],
            lora_alpha=plan["lora_alpha"],
            target_modules=plan["lora_target_modules"],
            lora_dropout=plan["lora_dropout"],
            seed=plan["seed"],
        )
    only_adapter_dropout(model)
    adapted = AdaptedModel(model, device)
    for parameter in adapted.trainable.values():
        parameter.data = parameter.data.to(torch.float32)
    return adapted


def leaves_lean(plan: ResolvedPlan) -> bool:
    """Whether LoRA layers may run as one operation each (:class:`RowScores`)."""
    return not (
        plan["lora_dropout"] or plan["gradient_checkpointing"] or plan["precision"] == "int4"
    )


def only_adapter_dropout(model: nn.Module) -> None:
    """Nothing but the adapter's own dropout stays random in train mode.

    Some base models were pretrained with dropout of their own, which their configurations keep;
    a run states the adapter's dropout and means that.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            if "lora_dropout" not in name:
                module.p = 0.0
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, float) and attribute.endswith(("dropout", "_pdrop")):
                setattr(module, attribute, 0.0)
