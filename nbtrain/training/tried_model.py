"""A base model that stays loaded while replies of one checkpoint after another are tried on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nbtrain.catalog import tokenizer_digest
from nbtrain.errors import NbtrainError
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.decoders import Decoder, decoder
from nbtrain.store import StoredCheckpoint
from nbtrain.training import checkpoints
from nbtrain.training.adapted import AdaptedModel, attach_adapter, load_tokenizer
from nbtrain.training.base_files import loading
from nbtrain.training.base_weights import DTYPES, load_base
from nbtrain.training.environment import emulated, kv_budget

__all__ = ["SLOTS", "TriedModel", "device_of"]

SLOTS = 64
"""Replies that are decoded at a time."""


class TriedModel:
    """A loaded base model with its tokenizer, and what stands on it.

    ``folder`` is the model's; ``device`` is where it computes. Raises
    :class:`~nbtrain.errors.StartChecksFailed` when it cannot be loaded.
    """

    def __init__(self, folder: Path, plan: ResolvedPlan, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self._serves = _serving(plan)
        with loading(plan, "the tokenizer"):
            self.tokenizer: Any = load_tokenizer(folder)
        with loading(plan, "the model"):
            self._base: Any = load_base(
                folder,
                dtype=DTYPES[plan["precision"]],
                device=device,
                attention=_attention(plan),
                four_bit=plan["precision"] == "int4",
            )
        self._tokenizer_fingerprint = tokenizer_digest(folder)
        self._adapted: AdaptedModel | None = None
        self._shape: tuple[Any, ...] = ()
        self._sampler: Decoder | None = None
        self._sampler_key: tuple[tuple[int, ...], bool, int] | None = None
        self.checkpoint_id: str | None = None
        """The checkpoint whose adapter it carries."""

    def serves(self, plan: ResolvedPlan, device: torch.device) -> bool:
        """Whether runs of this plan go on from the same base, loaded in the same way."""
        return self._serves == _serving(plan) and self.device == device

    @property
    def adapted(self) -> AdaptedModel:
        """The base with the adapter that was put on."""
        assert self._adapted is not None
        return self._adapted

    def put_on(self, row: StoredCheckpoint, plan: ResolvedPlan) -> None:
        """Carry the checkpoint's adapter, in fp32 and unmerged as it was trained.

        Raises :class:`~nbtrain.training.checkpoints.CheckpointError` when it is damaged or of
        another model.
        """
        loaded = checkpoints.load(
            Path(row.path),
            checkpoint_id=row.checkpoint_id,
            base_fingerprint=plan.base_model.fingerprint,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            training_state=False,
        )
        self.checkpoint_id = None
        self._shape_for(plan)
        try:
            self.adapted.load_adapter_state(loaded.adapter)
        except ValueError as error:
            msg = f"the checkpoint {row.short_id} does not fit its run's plan: {error}"
            raise checkpoints.CheckpointError(msg) from error
        self.checkpoint_id = row.checkpoint_id

    def _shape_for(self, plan: ResolvedPlan) -> None:
        """Have an adapter of the plan's rank, scale and modules."""
        shape = (plan["lora_rank"], plan["lora_alpha"], plan["lora_target_modules"])
        if self._adapted is not None and self._shape == shape:
            return
        if self._adapted is not None:
            self._sampler = self._sampler_key = None
            self._base = self._adapted.model.unload()
            self._adapted = None
        rank, alpha, targets = shape
        model = attach_adapter(
            self._base, lora_rank=rank, lora_alpha=alpha, target_modules=targets, seed=0
        )
        model.eval()
        self._adapted, self._shape = AdaptedModel(model, self.device), shape
        for parameter in self._adapted.trainable.values():
            parameter.data = parameter.data.to(torch.float32)

    def sampler(self, plan: ResolvedPlan, ends: tuple[int, ...], context: int) -> Decoder:
        """The engine's own decoder, the plain one where the model's cache demands it.

        ``ends`` are the ids that end a reply, ``context`` bounds prompt and reply together.
        Raises :class:`~nbtrain.errors.NbtrainError` for a model that cannot be sampled.
        """
        plain = plan.options.get("sampler") == "generate"
        key = (ends, plain, context)
        if self._sampler is None or self._sampler_key != key:
            self._sampler = self._sampler_key = None
            try:
                self._sampler = decoder(
                    self.adapted.model,
                    kind="generate" if plain else "any",
                    slots=SLOTS,
                    eos_ids=ends,
                    pad_id=self.tokenizer.pad_token_id,
                    max_context=context,
                    kv_budget_bytes=kv_budget(self.device),
                )
            except ValueError as error:
                msg = f"the model cannot be sampled: {error}"
                raise NbtrainError(msg) from error
            self._sampler_key = key
        return self._sampler


def _serving(plan: ResolvedPlan) -> tuple[str, str, str | None]:
    return plan.base_model.fingerprint, plan["precision"], _attention(plan)


def _attention(plan: ResolvedPlan) -> str | None:
    stated: str | None = plan.options.get("attention_implementation")
    # scaled dot-product is the default wherever a model has it
    return None if stated == "sdpa" else stated


def device_of(row: StoredCheckpoint, plan: ResolvedPlan) -> tuple[torch.device, list[str]]:
    """The kind of device that the run trained on where this machine has it, and what is to be
    said of it. Of a checkpoint without training state that is not known.
    """
    try:
        state = json.loads((Path(row.path) / checkpoints.STATE).read_text("utf-8"))
        used = str(state["environment"]["device"])
    except (OSError, ValueError, LookupError, TypeError):
        used = None
    there = torch.cuda.is_available()
    device = torch.device("cuda" if there and used != "cpu" else "cpu")
    remarks = []
    if used is not None and used != device.type:
        remarks.append(f"the run trained on {used}, which this machine has not")
    slow = emulated("bf16", device) if plan["precision"] != "fp32" else None
    if slow is not None:
        remarks.append(slow.split(":")[0])
    return device, remarks
