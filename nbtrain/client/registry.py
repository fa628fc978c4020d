"""Everything a plan can name: workloads, base models, checkpoints, datasets, models, bundles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.records import Checkpoint
from nbtrain.errors import AmbiguousReference, NotFound, Problem, Refused
from nbtrain.plan.fields import describe
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    from nbtrain.catalog import BaseModel, Workload
    from nbtrain.client.models import Adapter
    from nbtrain.client.parts import Parts
    from nbtrain.data.datasets import Dataset
    from nbtrain.plan.registry import BaseModelInfo, MachineInfo
    from nbtrain.rewards.bundles import Bundle
    from nbtrain.store import Store, StoredCheckpoint

__all__ = ["ClientRegistry", "ParentCheckpoint"]

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ParentCheckpoint:
    """A committed checkpoint as the plan sees it (``plan.registry.CheckpointInfo``)."""

    checkpoint_id: str
    run_id: str
    step_index: int
    base_model_slug: str
    base_fingerprint: str
    workload_id: str
    path: str
    has_weights: bool
    has_training_state: bool
    resolved: Mapping[str, Any]
    resumable: Sequence[tuple[int, str]] = ()


class ClientRegistry:
    """Implements ``plan.registry.Registry`` over what the parts of a client share."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        self._catalog = parts.catalog

    def workload(self, ref: object) -> Workload:
        """The workload a name, an id, a prefix or a workload object means.

        One asked for by id gets the name that points at it, if there is one.
        """
        found = self._catalog.workload(getattr(ref, "_workload", ref))
        if found.name is None:
            for name, target in self._store.aliases("workload").items():
                if target == found.workload_id:
                    return self._catalog.workload(name)
        return found

    def base_model(self, ref: object) -> BaseModel:
        """The base model a slug, a repository, a folder or a base model object means."""
        return self._catalog.base_model(getattr(ref, "_model", ref))

    def base_models(self) -> list[BaseModelInfo]:
        """The models that ``list_options`` offers."""
        return list(self._catalog.base_models())

    def dataset(self, ref: object) -> Dataset:
        """The dataset that a name, an id, a prefix or a dataset object means.

        Raises :class:`NotFound`, and :class:`Refused` for data that was never registered.
        """
        ref = getattr(ref, "_dataset", ref)
        if not isinstance(ref, str) and not hasattr(ref, "dataset_id"):
            problem = Problem(
                "dataset",
                f"dataset needs the name of a registered dataset, found {describe(ref)}",
                hint='Register it first: client.datasets.register("NAME", data)',
            )
            raise Refused([problem])
        return self._parts.datasets.get(ref)

    def model(self, ref: object) -> Adapter:
        """The registered model that a name, an id, a prefix or a model object means."""
        from nbtrain.client.models import adapter

        return adapter(self._store, ref)

    def bundle(self, ref: object) -> Bundle:
        """The bundle that a name, an id, a prefix or a bundle object means."""
        return self._parts.bundles.get(getattr(ref, "_bundle", ref))

    def machine(self) -> MachineInfo:
        """What this machine has."""
        from nbtrain.client.machine import this_machine

        return this_machine()

    def checkpoint(self, ref: object) -> ParentCheckpoint:
        """The checkpoint that an object, an id or a prefix means.

        Raises :class:`NotFound`, and :class:`Refused` for what cannot be a checkpoint and for one
        whose files are gone.
        """
        if isinstance(ref, Checkpoint):
            ref = ref.checkpoint_id
        if not isinstance(ref, str):
            problem = Problem(
                field="parent_checkpoint_id",
                message=f"parent_checkpoint_id needs a checkpoint, found {describe(ref)}",
                found=repr(ref)[:80],
                allowed="a Checkpoint, its id, or a prefix of its id",
                hint=_hint(ref),
            )
            raise Refused([problem])
        try:
            row = self._store.find_checkpoint(ref)
        except AmbiguousReference:
            raise
        except NotFound:
            self._refuse_a_run(ref)
            raise
        lost = _lost(row, "weights") if row.weights else []
        if lost:
            name, short = "parent_checkpoint_id", row.checkpoint_id[:12]
            message = f"{name}: checkpoint {short} has lost {', '.join(lost)} in {row.path}"
            hint = "Go on from another one: %train checkpoints lists them"
            raise Refused([Problem(name, message, row.checkpoint_id, hint=hint)])
        return parent_of(row, self._store)

    def _refuse_a_run(self, ref: str) -> None:
        """Say so if the words that mean no checkpoint mean a run."""
        try:
            run = self._store.find_run(ref)
        except NotFound:
            return
        msg = (
            f"{ref!r} is a run ({run.run_id[:12]}) and one of its checkpoints is needed: in Python "
            f"{_picks(ResolvedPlan.from_json(run.resolved))}, %train checkpoints lists them"
        )
        raise NotFound(msg)


def _lost(row: StoredCheckpoint, part: str) -> list[str]:
    """Files of ``part`` that the checkpoint's manifest lists and that are gone; or that itself."""
    path = Path(row.path)
    try:
        files = json.loads((path / _MANIFEST).read_bytes())[part]
    except (OSError, ValueError, KeyError, TypeError):
        return [_MANIFEST]
    return [file for file in files if not (path / file).is_file()]


def _hint(ref: object) -> str | None:
    from nbtrain.client.run import Run

    if not isinstance(ref, Run):
        return None
    return f"A run has several checkpoints: {_picks(ref.plan)}"


def _picks(plan: ResolvedPlan) -> str:
    """How a run's checkpoint is picked: only what was validated can be best."""
    if plan.validation_dataset is None and plan.door == "descriptor":
        return "run.checkpoints lists them"
    return "run.best() picks one"


def parent_of(row: StoredCheckpoint, store: Store) -> ParentCheckpoint:
    """The plan's view of a stored checkpoint, with its run's resolved plan."""
    state = row.training_state and not _lost(row, "training_state")
    return ParentCheckpoint(
        checkpoint_id=row.checkpoint_id,
        run_id=row.run_id,
        step_index=row.step,
        base_model_slug=row.base_model_slug or "",
        base_fingerprint=row.base_fingerprint or "",
        workload_id=row.workload_id or "",
        path=row.path,
        has_weights=row.weights,
        has_training_state=state,
        resolved=store.run(row.run).resolved,
        resumable=() if state else _resumable(row, store),
    )


def _resumable(lost: StoredCheckpoint, store: Store) -> tuple[tuple[int, str], ...]:
    found = [row for row in store.checkpoints(lost.run) if row.key != lost.key]
    return tuple((row.step, row.checkpoint_id) for row in found if row.training_state)
