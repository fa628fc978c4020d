"""Where a loop's results go: the store, and checkpoints in the run's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError

from nbtrain.errors import StoreError
from nbtrain.plan.picking import Scores, task_means
from nbtrain.rollout.ledger import Changes
from nbtrain.store import RunWriter, Store
from nbtrain.training import checkpoints
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.checkpoints import Identity
from nbtrain.training.loop import LoopState
from nbtrain.training.partials import clear_partial
from nbtrain.training.retention import Kept, sweep_checkpoints, sweep_training_states

log = logging.getLogger("nbtrain.training")

_T = TypeVar("_T")

_PATIENCE_SECONDS = 60.0
"""How long a store that is locked, or a disk that is full, is waited for."""


class StoreRecorder:
    """Commits steps, validation rounds and checkpoints of one attempt."""

    def __init__(
        self,
        store: Store,
        writer: RunWriter,
        folder: Path,
        policy: AdaptedModel,
        *,
        identity: dict[str, Any],
        keep: int | None = None,
    ) -> None:
        self._store = store
        self._writer = writer
        self._folder = folder / "checkpoints"
        self._policy = policy
        self._identity = identity
        self._held_out: dict[int, tuple[float, Scores]] = {}  # of complete rounds, by step
        self._saved: list[Kept] = []  # what this attempt saved and still has
        self._keep = keep
        clear_partial(self._folder)

    def step(
        self,
        row: dict[str, Any],
        groups: list[dict[str, Any]],
        trajectories: list[dict[str, Any]],
        changes: Changes,
    ) -> None:
        """Commit a step with what it changes of earlier ones, in one transaction."""
        insist(
            lambda: self._writer.commit_step(
                row,
                groups,
                trajectories,
                amend=changes.steps,
                amend_groups=changes.groups,
                amend_trajectories=changes.trajectories,
            )
        )

    def closing(self, step: int, trajectories: list[dict[str, Any]], changes: Changes) -> None:
        """Commit what the run's end left of its last step."""
        insist(
            lambda: self._writer.commit_closing(
                step,
                trajectories,
                amend=changes.steps,
                amend_groups=changes.groups,
                amend_trajectories=changes.trajectories,
            )
        )

    def validation(self, row: dict[str, Any], trajectories: list[dict[str, Any]]) -> None:
        """Commit a validation round with its samples."""
        insist(lambda: self._writer.commit_validation(row, trajectories))
        if row["round_completed"] and row["held_out_reward"] is not None:
            samples = ((t["task_id"], t["reward"], t["reason"]) for t in trajectories)
            self._held_out[row["step"]] = row["held_out_reward"], task_means(samples)

    def checkpoint(self, step: int, reason: str, state: LoopState) -> None:
        """Write a checkpoint, commit it, then let older training state go."""
        identity = Identity(step=step, **self._identity)
        saved = insist(
            lambda: checkpoints.save(
                self._folder,
                identity,
                adapter=state.adapter,
                adapter_config=self._policy.adapter_config(),
                optimizer=state.optimizer,
                state=state.plain,
            )
        )
        row = {
            "checkpoint_id": saved.checkpoint_id,
            "step": step,
            "weights": True,
            "training_state": True,
            "path": str(saved.path),
            "size_bytes": saved.size_bytes,
            "manifest_digest": saved.manifest_digest,
            "base_model_slug": identity.base_model_slug,
            "base_fingerprint": identity.base_fingerprint,
            "workload_id": identity.workload_id,
            "reason": reason,
        }
        insist(lambda: self._writer.commit_checkpoint(row))
        self._saved.append(Kept(saved.checkpoint_id, step, True))
        self._sweep()

    def _sweep(self) -> None:
        """Let go of what is not kept; what is pinned or gone on from meanwhile, the store knows."""
        listed = [self._scored(c) for c in self._saved]
        referenced = self._store.referenced_checkpoints()
        # The store forgets first: what is listed is always there.
        gone = set()
        for checkpoint_id in sweep_checkpoints(listed, referenced=referenced, keep=self._keep):
            path = insist(partial(self._store.drop_checkpoint, checkpoint_id))
            if path is not None:
                checkpoints.drop(Path(path))
                gone.add(checkpoint_id)
        listed = [c for c in listed if c.checkpoint_id not in gone]
        bare = set(sweep_training_states(listed, referenced=referenced))
        for checkpoint_id in bare:
            path = insist(partial(self._store.drop_training_state, checkpoint_id))
            if path is not None:
                checkpoints.drop_training_state(Path(path))
        self._saved = [
            replace(c, training_state=c.training_state and c.checkpoint_id not in bare)
            for c in listed
        ]

    def _scored(self, checkpoint: Kept) -> Kept:
        reward, scores = self._held_out.get(checkpoint.step, (None, {}))
        return replace(checkpoint, held_out_reward=reward, scores=scores)


def insist(action: Callable[[], _T], *, patience: float = _PATIENCE_SECONDS) -> _T:
    """Do ``action`` though the store may be locked, or the disk full, for a while.

    Everything recorded is whole or not at all, so it can be tried again. Raises what the last try
    raised once ``patience`` seconds are over.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return action()
        except (StoreError, OSError) as error:
            passing = isinstance(error, OSError) or isinstance(error.__cause__, OperationalError)
            if not passing or time.monotonic() >= end:
                raise
            log.warning("recording waits: %s", error)
            time.sleep(1.0)
