"""What the jobs of all methods do alike: their plan, control, phases, and start checks kept."""

from __future__ import annotations

from collections.abc import Sequence

from nbtrain.plan.checks import Check
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.ranks import Ranks
from nbtrain.store import RunWriter, Store, StoredRun
from nbtrain.training.control import Cancelled, Control, FollowerControl
from nbtrain.training.ranks import Joined
from nbtrain.training.record import insist

__all__ = ["BaseJob"]


class BaseJob:
    """One rank's part of one attempt; rank 0 alone moves phases and writes."""

    def __init__(self, store: Store, run: StoredRun, attempt: int) -> None:
        self._store, self._run, self._attempt = store, run, attempt
        self._plan = ResolvedPlan.from_json(run.resolved)
        self._folder = store.run_folder(run.run_id)
        self._writer = RunWriter(store, run.key, attempt)

    def _control(self, ranks: Ranks) -> Control | FollowerControl:
        """What stops this rank and beats its heart, while it waits for the others too."""

        def beat(activity: str | None = None) -> None:
            self._store.heartbeat(self._run.key, self._attempt, "rank", activity=activity)

        control: Control | FollowerControl
        if ranks.rank:
            control = FollowerControl(beat)
        else:
            control = Control(self._writer.unhandled_commands, self._writer.handled, beat)
        if isinstance(ranks, Joined):
            ranks.while_waiting = control.waiting
        return control

    def _move(self, ranks: Ranks, phase: Phase, message: str = "") -> None:
        """Enter a phase. An attempt that may not has been stopped or replaced meanwhile."""
        if ranks.rank:
            return
        moved = self._store.move_phase(
            self._run.key, phase, attempt=self._attempt, message=message or None
        )
        if not moved:
            msg = f"the run may not enter {phase}: it has been stopped"
            raise Cancelled(msg)

    def _keep(self, checks: Sequence[Check], ranks: Ranks) -> None:
        """What the start checks measured stands on the run, whether they let it start or not."""
        if not ranks.rank:
            rows = [check.to_json() for check in checks]
            insist(lambda: self._store.put_checks(self._run.key, rows))
