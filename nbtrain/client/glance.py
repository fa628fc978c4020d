"""A run's summary, kept up to date by reading only what is new."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from nbtrain.client import lineage, tables
from nbtrain.client.curve import loss_curve
from nbtrain.client.followed import Followed
from nbtrain.client.picking import checkpoint_line
from nbtrain.client.readings import SFT
from nbtrain.client.records import Checkpoint, HeldOutPoint
from nbtrain.errors import NotFound
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.report.figures import loss_figure, png, reward_figure
from nbtrain.report.series import first_and_last
from nbtrain.report.static import as_html
from nbtrain.report.summary import (
    HeldOut,
    RunSummary,
    as_text,
    counts,
    headline,
    movement,
    number,
    progress_line,
)

if TYPE_CHECKING:
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.report.findings import Finding
    from nbtrain.store import Store, StoredRun

__all__ = ["AS_READ", "READ_WITHIN", "Glance", "first_and_last", "glance_of", "number"]

READ_WITHIN = 0.25
"""Seconds for which a reading is new enough for what follows a run by itself."""

AS_READ = float("inf")
"""As of the last reading, however long ago."""

_SHARE = 0.003  # of a core that pictures may take: one that cost 0.1 s is followed by 33 s without
_AFTER_THE_FIRST = 5.0  # seconds: the first picture also pays for loading matplotlib
_LONGEST_WITHOUT = 60.0
_DIAGNOSED = 10.0  # seconds between two diagnoses,
_DIAGNOSED_SHARE = 0.001  # of a core for them,
_DIAGNOSED_LATEST = 60.0  # but at the latest after so long
_FEW_STEPS = 3  # that say nothing yet
_SAID = frozenset(
    (
        *("failed", "unresponsive", "no weight changed", "ungraded", "environment errors"),
        "smoke check",
    )
)
_ALL_ROUNDS = 200  # of more, only those at a checkpoint's step are looked into
_BRIEF = 4  # lines of movement
_BUDGETS = ("max_total_", "max_wall_clock_")
_COUNTED = {
    "used_groups": "used",
    "used_without_signal": "of them without signal",
    "no_signal_not_trained": "no signal",
    "filtered_groups": "filtered",
    "too_small_groups": "too small",
    "discarded_groups": "discarded",
    "pending_groups": "pending",
}


def _groups(step: Mapping[str, Any]) -> dict[str, int]:
    """Where the groups of a step went, in words; a tied one that trains is a used one."""
    tied, used = step.get("no_signal_groups") or 0, step.get("used_groups") or 0
    left_out = step.get("no_signal_not_trained")
    left_out = tied if left_out is None else int(left_out)
    # Tied groups that wait or were discarded are not told from tied ones that trained
    unsure = step.get("pending_groups") or step.get("discarded_groups")
    places = {
        **step,
        "no_signal_not_trained": left_out,
        "used_without_signal": 0 if unsure else min(used, tied - left_out),
    }
    return {told: places[name] for name, told in _COUNTED.items() if places.get(name)}


class Glance:
    """What one sees of a run without asking further; may be used from several threads."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self._store = followed.store
        self._lock = followed.lock
        self._notes: list[str] | None = None
        self._plan: ResolvedPlan | None = None
        self._picture: bytes | None = None
        self._pictured: object = None
        self._next_picture = 0.0
        self._findings: list[Finding] = []
        self._diagnosed: object = None
        self._next_look = 0.0
        self._picked: tuple[list[HeldOutPoint], list[Checkpoint]] = ([], [])
        self._picked_at: object = None
        self._summary: RunSummary | None = None
        self._summed: object = None

    def refresh(self, within: float = 0.0) -> RunSummary:
        """Read what is new and return the whole summary, which is not to be changed.

        What was read in the last ``within`` seconds is new enough.
        """
        with self._lock:
            row, seen = self.followed.refresh(within)
            if self._summary is None or self._summed is not row:
                self._summary = self._made(row, seen)
                self._summed = row
            return self._summary

    def findings(self, within: float = 0.0) -> list[Finding]:
        """What a diagnosis finds, looked for as often as its cost allows."""
        with self._lock:
            self.refresh(within)
            return self._findings

    def picks(self, within: float = 0.0) -> tuple[list[HeldOutPoint], list[Checkpoint]]:
        """The rounds in the order of their keys, and the checkpoints by step; the same objects
        until a round or a save comes.
        """
        with self._lock:
            self.refresh(within)
            return self._picked

    @property
    def plan(self) -> ResolvedPlan:
        """What the run trains under."""
        with self._lock:
            if self._plan is None:
                self._plan = self._planned(self.followed.refresh(AS_READ)[0])
            return self._plan

    def _made(self, row: StoredRun, seen: Liveness) -> RunSummary:
        read = self.followed
        plan = self._planned(row)
        steps = list(read.steps.values())
        rounds, found = self._picked_from()
        best = tables.best(found)
        sampled = row.method != SFT
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
            cut=read.cut,
            ungraded_error=read.error,
            output_tokens=row.output_tokens,
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            failure=row.failure,
            ended=self._ended(row),
            liveness=None if row.ended_for_good else seen.message,
            activity=None if row.ended_for_good else seen.activity,
            rewards=[(step["step"], step["avg_reward"]) for step in steps] if sampled else [],
            held_out=[
                HeldOut(p.step, p.held_out_reward, p.round_completed, p.low, p.high)
                for p in rounds
            ],
            checkpoints=[checkpoint_line(c, best) for c in found],
            last_groups=_groups(steps[-1]) if sampled and steps else {},
            problem=self._found(row, seen),
            notes=self._told(row),
            admission="as graded" if plan.admission == "as_graded" and sampled else "",
            supervised=loss_curve(plan, steps, rounds),
            checks=row.checks,
            verdict=row.verdict,
            model=registered(self._store, row),
        )  # fmt: skip

    def _picked_from(self) -> tuple[list[HeldOutPoint], list[Checkpoint]]:
        """The rounds and the checkpoints; what ties is found once for each of their states."""
        read = self.followed
        state = (read.generation, len(read.rounds), read.checkpoints_read)
        if state != self._picked_at:
            many = len(read.rounds) > _ALL_ROUNDS
            steps = {c.step for c in read.checkpoints} if many else None
            points = tables.held_out_points(read.rounds.values(), self._store, steps)
            found = tables.checkpoint_records(read.checkpoints, points, self._store)
            self._picked = points, found
            self._picked_at = state
        return self._picked

    def _planned(self, row: StoredRun) -> ResolvedPlan:
        if self._plan is None:
            self._plan = ResolvedPlan.from_json(row.resolved)
        return self._plan

    def _found(self, row: StoredRun, seen: Liveness) -> str | None:
        """The worst of what a diagnosis finds, but for what the summary says anyway.

        Looked for again when a step came, at most once in :data:`_DIAGNOSED` seconds and with
        :data:`_DIAGNOSED_SHARE` of a core until the run is over.
        """
        state = (row.attempt, row.completed_steps, row.ended_for_good)
        if state != self._diagnosed and (row.ended_for_good or time.monotonic() >= self._next_look):
            from nbtrain.client.diagnosis import diagnose, gather

            begun = time.thread_time()
            few = row.completed_steps - row.start_step < _FEW_STEPS and not row.ended_for_good
            self._findings = [] if few else list(diagnose(gather(self._store, row, seen)))
            self._diagnosed = state
            pause = (time.thread_time() - begun) / _DIAGNOSED_SHARE
            self._next_look = time.monotonic() + min(_DIAGNOSED_LATEST, max(_DIAGNOSED, pause))
        problems = (f for f in self._findings if f.severity == "problem" and f.rule not in _SAID)
        worst = next(problems, None)
        return None if worst is None else worst.sentence

    def _ended(self, row: StoredRun) -> str | None:
        """Why the run ended early; with a used-up budget also how to go on."""
        saved = self.followed.checkpoints
        if not row.ended or not row.ended.startswith(_BUDGETS) or not saved:
            return row.ended
        last = max(saved, key=lambda checkpoint: checkpoint.step)
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

    def brief(self, within: float = 0.0) -> str:
        """Name, state, counts and movement in a few lines, for where a picture cannot be."""
        summary = self.refresh(within)
        head = f"run {summary.title} · {headline(summary)}"
        return "\n".join([head, counts(summary), *movement(summary)[:_BRIEF]])

    @property
    def is_final(self) -> bool:
        """Whether the run was over at the last refresh, so that nothing will change any more."""
        return self.followed.is_final

    def bundle(
        self, *, hurry: bool = False, redraw: bool = True, notes: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The summary as text, static HTML and PNG, by MIME type; ``notes`` are added to its own.

        With ``hurry`` figures may be a moment old, and the picture an older one, or missing while
        no step is there: drawing is held to :data:`_SHARE` of one core, until the run is over.
        Without ``redraw`` the picture is the one that was drawn last.
        """
        with self._lock:
            summary = self.refresh(READ_WITHIN if hurry else 0.0)
            summary = replace(summary, notes=[*notes, *summary.notes])
            picture = self._drawn(summary, hurry=hurry) if redraw else self._picture
            bundle = {"text/plain": as_text(summary), "text/html": as_html(summary, picture)}
            if picture:
                bundle["image/png"] = base64.b64encode(picture).decode("ascii")
            return bundle

    def _drawn(self, summary: RunSummary, *, hurry: bool) -> bytes | None:
        losses = summary.supervised.losses if summary.supervised else []
        if not summary.rewards and not summary.held_out and not losses:
            return None
        read = self.followed
        state = (read.generation, len(read.step_log), len(read.round_log), read.is_final)
        late = summary.status in ("succeeded", "failed", "cancelled")
        if state == self._pictured or (
            hurry and not late and time.monotonic() < self._next_picture
        ):
            return self._picture
        begun = time.thread_time()
        self._picture = png(_figure(summary))
        self._pictured = state
        longest = _AFTER_THE_FIRST if self._next_picture == 0.0 else _LONGEST_WITHOUT
        without = min(longest, (time.thread_time() - begun) / _SHARE)
        self._next_picture = time.monotonic() + without
        return self._picture


_shared: WeakValueDictionary[tuple[str, int], Glance] = WeakValueDictionary()
_sharing = threading.Lock()


def glance_of(store: Store, run_key: int, look: Callable[[], tuple[StoredRun, Liveness]]) -> Glance:
    """The one summary of a run in this process, so that what watches a run reads it once.

    ``look`` returns the run's row, and whether its job lives, as they are now.
    """
    with _sharing:
        known = _shared.get((store.url, run_key))
        if known is None:
            known = _shared[store.url, run_key] = Glance(Followed(store, run_key, look))
        return known


def _figure(summary: RunSummary) -> Any:
    if summary.supervised is not None:
        # A smoke check ends where its rows are known by heart, mostly long before its last step
        ended = summary.status == "succeeded"
        total = summary.completed_steps if ended else summary.total_steps
        return loss_figure(summary.supervised, title=summary.title, total_steps=total)
    return reward_figure(
        summary.rewards, summary.held_out, title=summary.title, total_steps=summary.total_steps
    )


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
