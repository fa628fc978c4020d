"""Where a loop's results go: the store, and checkpoints in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtrain.store import RunWriter, Store
from nbtrain.training import checkpoints
from nbtrain.training.checkpoints import Identity
from nbtrain.training.loop import LoopState
from nbtrain.training.policy import Policy
from nbtrain.training.retention import Kept, sweep_training_states


class StoreRecorder:
    """Commits steps, validation rounds and checkpoints of one attempt."""

    def __init__(
        self,
        store: Store,
        writer: RunWriter,
        folder: Path,
        policy: Policy,
        *,
        run_key: int,
        identity: dict[str, Any],
    ) -> None:
        self._store = store
        self._writer = writer
        self._folder = folder / "checkpoints"
        self._policy = policy
        self._run_key = run_key
        self._identity = identity
        checkpoints.clear_partial(self._folder)

    def step(
        self, row: dict[str, Any], groups: list[dict[str, Any]], trajectories: list[dict[str, Any]]
    ) -> None:
        """Commit a step with its groups and trajectories, in one transaction."""
        self._writer.commit_step(row, groups, trajectories)

    def validation(self, row: dict[str, Any], trajectories: list[dict[str, Any]]) -> None:
        """Commit a validation round with its samples."""
        self._writer.commit_validation(row, trajectories)

    def checkpoint(self, step: int, reason: str, state: LoopState) -> None:
        """Write a checkpoint, commit it, then let older training state go."""
        identity = Identity(step=step, **self._identity)
        saved = checkpoints.save(
            self._folder,
            identity,
            adapter=state.adapter,
            adapter_config=self._policy.adapter_config(),
            optimizer=state.optimizer,
            state=state.plain,
        )
        self._writer.commit_checkpoint(
            {
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
        )
        self._sweep()

    def _sweep(self) -> None:
        rows = self._store.checkpoints(self._run_key)
        held_out = {
            row["step"]: row["held_out_reward"]
            for row in self._store.validation_rounds(self._run_key)
            if row["round_completed"]
        }
        listed = [
            Kept(
                row.checkpoint_id, row.step, row.training_state, row.pinned, held_out.get(row.step)
            )
            for row in rows
        ]
        referenced = self._store.referenced_checkpoints()
        for checkpoint_id in sweep_training_states(listed, referenced=referenced):
            # The store forgets it first: a listed training state is always there.
            path = self._store.drop_training_state(checkpoint_id)
            if path is not None:
                checkpoints.drop_training_state(Path(path))
