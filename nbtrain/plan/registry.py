"""What resolving needs to know of workloads, base models and checkpoints, as protocols.

The plan is the ground floor: the catalog and the store implement these, never the other way.
A lookup that finds nothing raises :class:`nbtrain.errors.NotFound`, its message naming what there
is; one that finds something unusable raises :class:`nbtrain.errors.Refused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol


class WorkloadInfo(Protocol):
    """A workload as the plan sees it."""

    @property
    def workload_id(self) -> str:
        """Content hash, 64 hex digits."""
        ...

    @property
    def name(self) -> str | None:
        """The alias it was asked for by, if any."""
        ...

    @property
    def base_model(self) -> str | None:
        """Slug used when the plan names no base model."""
        ...

    def split(self, *, validation: bool) -> SplitInfo:
        """How its tasks divide; without validation nothing is split off (stated held-out stays out)."""
        ...


class SplitInfo(Protocol):
    """Sizes of the two sides, a sentence on how they came about, and the train side's digest."""

    @property
    def train(self) -> int: ...
    @property
    def held_out(self) -> int: ...
    @property
    def description(self) -> str: ...
    @property
    def train_digest(self) -> str: ...


class BaseModelInfo(Protocol):
    """A base model as the plan sees it, read from file headers alone."""

    @property
    def slug(self) -> str: ...
    @property
    def kind(self) -> Literal["embedded", "folder", "repository", "gguf"]: ...
    @property
    def location(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def max_context(self) -> int:
        """Largest number of tokens of prompt and reply together."""
        ...

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """Default precision of the frozen weights."""
        ...

    @property
    def parameters(self) -> int | None: ...


class CheckpointInfo(Protocol):
    """A committed checkpoint as the plan sees it."""

    @property
    def checkpoint_id(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def step_index(self) -> int: ...
    @property
    def base_model_slug(self) -> str: ...
    @property
    def base_fingerprint(self) -> str: ...
    @property
    def workload_id(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def has_training_state(self) -> bool: ...
    @property
    def resolved(self) -> Mapping[str, Any]:
        """The parent run's resolved plan, as ``ResolvedPlan.to_json`` wrote it."""
        ...


class Registry(Protocol):
    """Everything a plan can name. References are names, ids, unambiguous id prefixes or objects."""

    def workload(self, ref: object) -> WorkloadInfo: ...
    def base_model(self, ref: object) -> BaseModelInfo: ...
    def checkpoint(self, ref: object) -> CheckpointInfo: ...
    def base_models(self) -> list[BaseModelInfo]:
        """The models offered by ``list_options``: the embedded one and the selected ones."""
        ...
