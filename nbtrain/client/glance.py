"""A run's summary, kept up to date by reading only what is new."""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtrain.client import lineage, tables
from nbtrain.client.curve import LossCurve
from nbtrain.client.readings import SFT
from nbtrain.client.records import HeldOutPoint
from nbtrain.errors import NotFound
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.report.figures import loss_figure, png, reward_figure
from nbtrain.report.series import first_and_last
from nbtrain.report.static import as_html
from nbtrain.report.summary import (
    CheckpointLine,
    HeldOut,
    RunSummary,
    as_text,
    number,
    progress_line,
)

if TYPE_CHECKING:
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.store import Store, StoredCheckpoint, StoredRun

__all__ = ["Glance", "first_and_last", "number"]

_SHARE = 0.05  # of a core that pictures may take: one that cost 0.1 s is followed by 2 s without
_LONGEST_WITHOUT = 5.0  # seconds; the first picture also pays for loading matplotlib
_DIAGNOSED = 10.0  # seconds between two diagnoses
_FEW_STEPS = 3  # that say nothing yet
_SAID = frozenset(
    (
        *("failed", "unresponsive", "no weight changed", "ungraded", "environment errors"),
        "smoke check",
    )
)
_BUDGETS = ("max_total_", "max_wall_clock_")
_LOOK_BACK = 8  # keys of steps
_NEWEST = 512  # trajectories among which the most frequent error is looked for
_COUNTED = {
    "used_groups": "used",
    "used_without_signal": "of them without signal",
    "no_signal_not_trained": "no signal",
    "filtered_groups": "filtered",
    "too_small_groups": "too small",
    "discarded_groups": "discarded",
    "pending_groups": "pending",
}


_PLACES = (
    *("used_groups", "no_signal_groups", "filtered_groups", "too_small_groups"),
    *("discarded_groups", "pending_groups", "metrics"),
)


def _groups(step: Mapping[str, Any]) -> dict[str, int]:
    """Where the groups of a step went, in words; a tied one that trains is a used one."""
    tied, used = step.get("no_signal_groups") or 0, step.get("used_groups") or 0
    left_out = (step.get("metrics") or {}).get("no_signal_not_trained", tied)
    # Tied groups that wait or were discarded are not told from tied ones that trained
    unsure = step.get("pending_groups") or step.get("discarded_groups")
    places = {
        **step,
        "no_signal_not_trained": left_out,
        "used_without_signal": 0 if unsure else min(used, tied - left_out),
    }
    return {told: places[name] for name, told in _COUNTED.items() if places.get(name)}


class Glance:
    """What one sees of a run without asking further; may be used from several threads.

    ``look`` returns the run's row, and whether its job lives, as they are now.
    """

    def __init__(self, store: Store, look: Callable[[], tuple[StoredRun, Liveness]]) -> None:
        self._store = store
        self._look = look
        self._lock = threading.RLock()
        self._forget()
        self._notes: list[str] | None = None
        self._plan: ResolvedPlan | None = None
        self._picture: bytes | None = None
        self._pictured: object = None
        self._next_picture = 0.0
        self._fixed = False
        self._problem: str | None = None
        self._diagnosed: object = None
        self._next_look = 0.0

    def _forget(self) -> None:
        self._attempt = 0
        self._step_cursor = 0
        self._round_cursor = 0
        self._rewards: dict[int, tuple[int, float | None]] = {}
        self._curve = LossCurve()
        self._rounds: list[HeldOutPoint] = []
        self._held_out: list[HeldOut] = []
        self._groups: dict[str, int] = {}
        self._saved: tuple[int, int | None] | None = None
        self._checkpoints: list[StoredCheckpoint] = []
        self._attempted = 0
        self._cut = 0
        self._cut_cursor = 0
        self._error: str | None = None

    def refresh(self) -> RunSummary:
        """Read what is new and return the whole summary."""
        with self._lock:
            row, seen = self._look()
            # Rows of an ended run are read once more from the start: those of a step that was not
            # settled may have changed, and an attempt that came back hides some
            if row.attempt != self._attempt or (row.ended_for_good and not self._fixed):
                self._forget()
                self._attempt = row.attempt
            self._fixed = row.ended_for_good
            self._read(row)
            return self._summary(row, seen)

    def _read(self, row: StoredRun) -> None:
        if row.method == SFT:
            self._curve.read(self._store, row)
        else:
            self._read_rewards(row)
        rounds = self._store.validation_rounds(row.key, self._round_cursor)
        if rounds:
            points = tables.held_out_points(rounds)
            self._rounds += points
            self._held_out += [
                HeldOut(p.step, p.held_out_reward, p.round_completed) for p in points
            ]
            self._round_cursor = rounds[-1]["id"]

    def _read_rewards(self, row: StoredRun) -> None:
        store = self._store
        if self._step_cursor:
            columns = ("id", "step", "avg_reward", "settled")
            steps = store.steps(row.key, self._step_cursor, columns=columns)
            unsettled = next((step["id"] for step in steps if not step["settled"]), None)
        else:
            # The history comes from an index that does not know what is settled; what is
            # committed between these two questions is read once more next time
            unsettled = store.unsettled(row.key)
            steps = store.rewards(row.key)
            if steps and unsettled is None:
                unsettled = max(1, max(step["id"] for step in steps) - _LOOK_BACK)
        self._rewards |= {step["id"]: (step["step"], step["avg_reward"]) for step in steps}
        if steps:
            newest = max(step["id"] for step in steps)
            self._step_cursor = newest if unsettled is None else unsettled - 1
            (last,) = store.steps(row.key, newest - 1, limit=1, columns=_PLACES) or [{}]
            self._groups = _groups(last)
        if row.graded_trajectories < row.attempted_trajectories != self._attempted:
            self._attempted = row.attempted_trajectories
            key, error = newest_error(store, row)
            self._error = error or self._error
            self._cut += store.cut_count(row.key, self._cut_cursor, key)
            self._cut_cursor = key

    def _summary(self, row: StoredRun, seen: Liveness) -> RunSummary:
        # what a run saved changes with a save; what else changes is read anew when it is over
        saved = (row.attempt, row.saved_step)
        if saved != self._saved:
            self._checkpoints = self._store.checkpoints(row.key)
            self._saved = saved
        found = tables.checkpoint_records(self._checkpoints, self._rounds)
        top = tables.best(found)
        plan = self._planned(row)
        return RunSummary(
            run_id=row.run_id,
            name=row.name,
            status=str(row.status),
            phase=str(row.phase),
            method=row.method,
            workload=row.workload_name or row.workload_id[:12],
            base_model=row.base_model_slug,
            config_name=row.config_name,
            description=row.description,
            start_step=row.start_step,
            completed_steps=row.completed_steps,
            total_steps=row.total_steps,
            updates_applied=row.updates_applied,
            attempted=row.attempted_trajectories,
            graded=row.graded_trajectories,
            cut=self._cut,
            ungraded_error=self._error,
            output_tokens=row.output_tokens,
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            failure=row.failure,
            ended=self._ended(row),
            liveness=None if row.ended_for_good else seen.message,
            activity=None if row.ended_for_good else seen.activity,
            rewards=list(self._rewards.values()),
            held_out=list(self._held_out),
            checkpoints=[
                CheckpointLine(c.checkpoint_id, c.step_index, c.held_out_reward,
                               c.round_completed, best=c == top, kind=c.kind,
                               loss=c.validation_loss)
                for c in found
            ],
            last_groups=dict(self._groups),
            problem=self._found(row, seen),
            notes=self._told(row),
            admission="as graded" if plan.admission == "as_graded" and row.method != SFT else "",
            supervised=self._curve.told(plan, self._rounds),
            checks=row.checks,
            verdict=row.verdict,
            model=registered(self._store, row),
        )  # fmt: skip

    def _planned(self, row: StoredRun) -> ResolvedPlan:
        if self._plan is None:
            self._plan = ResolvedPlan.from_json(row.resolved)
        return self._plan

    def _found(self, row: StoredRun, seen: Liveness) -> str | None:
        """The worst of what a diagnosis finds, but for what the summary says anyway.

        Looked for again when a step came, at most once in :data:`_DIAGNOSED` seconds until the
        run is over.
        """
        state = (row.attempt, row.completed_steps, row.ended_for_good)
        if state != self._diagnosed and (row.ended_for_good or time.monotonic() >= self._next_look):
            from nbtrain.client.diagnosis import diagnose, gather

            few = row.completed_steps - row.start_step < _FEW_STEPS and not row.ended_for_good
            found = [] if few else diagnose(gather(self._store, row, seen)).problems
            worst = [finding.sentence for finding in found if finding.rule not in _SAID]
            self._problem = worst[0] if worst else None
            self._diagnosed = state
            self._next_look = time.monotonic() + _DIAGNOSED
        return self._problem

    def _ended(self, row: StoredRun) -> str | None:
        """Why the run ended early; with a used-up budget also how to go on."""
        if not row.ended or not row.ended.startswith(_BUDGETS) or not self._checkpoints:
            return row.ended
        last = max(self._checkpoints, key=lambda checkpoint: checkpoint.step)
        return f"{row.ended}; go on with: %%train --from {last.short_id}"

    def _told(self, row: StoredRun) -> list[str]:
        if self._notes is None:
            self._notes = run_notes(self._store, self._planned(row))
        return self._notes

    def figure(self) -> Any:
        """The curve as a matplotlib figure."""
        return _figure(self.refresh())

    def text(self) -> str:
        """The summary as text."""
        return as_text(self.refresh())

    def line(self) -> str:
        """How far the run is, in one line for whoever waits: step and last figures."""
        return progress_line(self.refresh())

    @property
    def is_final(self) -> bool:
        """Whether the run was over at the last refresh, so that nothing will change any more."""
        return self._fixed

    def bundle(self, *, hurry: bool = False, notes: tuple[str, ...] = ()) -> dict[str, Any]:
        """The summary as text, static HTML and PNG, by MIME type; ``notes`` are added to its own.

        With ``hurry`` the picture may be an older one, or missing while no step is there: drawing
        is held to a twentieth of one core, until the run is over.
        """
        with self._lock:
            summary = self.refresh()
            summary.notes = [*notes, *summary.notes]
            picture = self._drawn(summary, hurry=hurry)
            bundle = {"text/plain": as_text(summary), "text/html": as_html(summary, picture)}
            if picture:
                bundle["image/png"] = base64.b64encode(picture).decode("ascii")
            return bundle

    def _drawn(self, summary: RunSummary, *, hurry: bool) -> bytes | None:
        losses = summary.supervised.losses if summary.supervised else []
        if not summary.rewards and not summary.held_out and not losses:
            return None
        state = (len(summary.rewards), len(losses), len(summary.held_out), self._attempt)
        late = summary.status in ("succeeded", "failed", "cancelled")
        if state == self._pictured or (
            hurry and not late and time.monotonic() < self._next_picture
        ):
            return self._picture
        begun = time.thread_time()
        self._picture = png(_figure(summary))
        self._pictured = state
        without = min(_LONGEST_WITHOUT, (time.thread_time() - begun) / _SHARE)
        self._next_picture = time.monotonic() + without
        return self._picture


def _figure(summary: RunSummary) -> Any:
    if summary.supervised is not None:
        # A smoke check ends where its rows are known by heart, mostly long before its last step
        ended = summary.status == "succeeded"
        total = summary.completed_steps if ended else summary.total_steps
        return loss_figure(summary.supervised, title=summary.title, total_steps=total)
    return reward_figure(
        summary.rewards, summary.held_out, title=summary.title, total_steps=summary.total_steps
    )


def newest_error(store: Store, row: StoredRun) -> tuple[int, str | None]:
    """The newest trajectory's key, and an error of the kind that is the most frequent among the
    newest ones that ended without a grade.
    """
    from nbtrain.client.diagnosis.errors import alike

    newest = store.trajectories(
        row.key,
        split="train",
        limit=_NEWEST,
        newest=True,
        columns=("id", "status", "reward", "error"),
    )
    errors = [
        t["error"]
        for t in newest
        if t["reward"] is None and t["error"] and t["status"] != "aborted"
    ]
    kinds = Counter(map(alike, errors))
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    last = newest[-1]["id"] if newest else 0
    return last, next((error for error in errors if alike(error) == most), None)


def registered(store: Store, row: StoredRun) -> str | None:
    """The model that the run registered, by name and short id; ``None`` until it has."""
    found = store.models(row.key) if row.ended_for_good else []
    if not found:
        return None
    ident = found[0]["model_id"]
    named = [name for name, target in store.aliases("model").items() if target == ident]
    return f"{named[0]} ({ident[:12]})" if named else str(ident[:12])


def run_notes(store: Store, plan: ResolvedPlan) -> list[str]:
    """What was inherited, the certificate, and the plan's hints."""
    parent = None
    if plan.parent is not None:
        try:
            parent = ResolvedPlan.from_json(store.find_run(plan.parent.run_id).resolved)
        except NotFound:
            parent = None
    return lineage.notes(plan, parent)
