"""What the rules look at, and how it is read from the store at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtrain.plan.phases import Phase
from nbtrain.store import Row, trajectory_ref

if TYPE_CHECKING:
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.store import Store, StoredRun

__all__ = ["RECENT", "Facts", "gather"]

RECENT = 20
"""Steps that count as the last ones."""

_SPREAD = 100  # steps over the whole run that are read with their metrics
_GROUPS = 2_000  # newest groups
_TRAJECTORIES = 2_000  # newest training trajectories
_TEXTS = 128  # texts of the last step
_TRAJECTORY = (
    *("id", "step", "group_id", "reason", "reward", "eligible", "verdict", "output_tokens"),
    "error",
)
_GROUP = ("step", "group_id", "task_id", "task_index", "epoch", "outcome", "size", "reward_mean")


@dataclass(slots=True)
class Facts:
    """A run's figures as plain data.

    ``rewards`` are (step, mean reward) of every step; ``steps`` the rows of at most 120 steps,
    spread over the run, the last 20 among them, each with ``metrics``; ``groups`` and
    ``trajectories`` the newest rows; ``texts`` the completions of the last step's trajectories
    as (group, public id, text). Trajectories carry their public id as ``ref``. Times are seconds
    since 1970; ``waiting_since`` is when the phase began and ``waits_for`` what it said.
    """

    title: str = "run"
    phase: str = "TRAINING"
    options: Mapping[str, Any] = field(default_factory=dict)
    train_tasks: int = 0
    start_step: int = 0
    completed_steps: int = 0
    total_steps: int = 0
    updates_applied: int = 0
    attempted: int = 0
    graded: int = 0
    failure: str | None = None
    ended: str | None = None
    unresponsive: str | None = None
    waiting_since: float | None = None
    waits_for: str | None = None
    now: float = 0.0
    rewards: Sequence[tuple[int, float | None]] = ()
    steps: Sequence[Row] = ()
    rounds: Sequence[Row] = ()
    groups: Sequence[Row] = ()
    trajectories: Sequence[Row] = ()
    texts: Sequence[tuple[int, str, str]] = ()

    @property
    def recent(self) -> list[Row]:
        """The last steps."""
        return list(self.steps[-RECENT:])

    @property
    def waited(self) -> float:
        """Seconds since the phase began."""
        return 0.0 if self.waiting_since is None else max(0.0, self.now - self.waiting_since)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.phase in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)

    def option(self, name: str) -> Any:
        """The value of an option; ``None`` where the plan has none of that name."""
        return self.options.get(name)

    def ends(self) -> tuple[list[Row], list[Row]]:
        """The steps of the first and of the last fifth of the run so far; they never overlap."""
        each = len(self.steps) // 5
        done = self.completed_steps - self.start_step
        fifth = done / 5
        if each < 1:
            return [], []
        first = [s for s in self.steps if s["step"] <= self.start_step + fifth]
        last = [s for s in self.steps if s["step"] > self.completed_steps - fifth]
        return first, last

    def values(self, name: str, steps: Sequence[Row] | None = None) -> list[float]:
        """A figure of these steps (the last ones unless given), where it is a number."""
        found = (figure(step, name) for step in (self.recent if steps is None else steps))
        return [float(value) for value in found if isinstance(value, int | float)]

    def total(self, name: str, steps: Sequence[Row] | None = None) -> float:
        """The sum of a figure over these steps (the last ones unless given)."""
        return sum(self.values(name, steps))


def figure(step: Row, name: str) -> Any:
    """A column or a metric of a step's row."""
    if name in step:
        return step[name]
    return (step.get("metrics") or {}).get(name)


def mean(values: Sequence[float]) -> float | None:
    """The mean; ``None`` of nothing."""
    return sum(values) / len(values) if values else None


def gather(store: Store, row: StoredRun, seen: Liveness | None = None) -> Facts:
    """Read a run's facts. What it reads does not grow with the run, but for the reward history."""
    key, plan = row.key, row.resolved
    rewards = [(r["step"], r["avg_reward"]) for r in store.rewards(key)]
    wanted = _spread([step for step, _ in rewards])
    trajectories = store.trajectories(
        key, split="train", limit=_TRAJECTORIES, newest=True, columns=_TRAJECTORY
    )
    for trajectory in trajectories:
        trajectory["ref"] = trajectory_ref(row.run_id, trajectory)
    phase = (store.phases(key) or [{}])[-1]
    quiet = seen is not None and seen.state == "unresponsive" and not row.ended_for_good
    settings = plan.get("settings") or {}
    return Facts(
        title=f"run {row.name or row.short_id}",
        phase=str(row.phase),
        options={name: setting.get("value") for name, setting in settings.items()},
        train_tasks=(plan.get("workload") or {}).get("train_tasks") or 0,
        start_step=row.start_step,
        completed_steps=row.completed_steps,
        total_steps=row.total_steps,
        updates_applied=row.updates_applied,
        attempted=row.attempted_trajectories,
        graded=row.graded_trajectories,
        failure=row.failure,
        ended=row.ended,
        unresponsive=seen.message if quiet and seen is not None else None,
        waiting_since=phase.get("at"),
        waits_for=phase.get("message"),
        now=time.time(),
        rewards=rewards,
        steps=store.steps_at(key, wanted),
        rounds=store.validation_rounds(key),
        groups=store.groups(key, limit=_GROUPS, newest=True, columns=_GROUP),
        trajectories=trajectories,
        texts=_texts(store, trajectories),
    )


def _spread(steps: Sequence[int]) -> list[int]:
    """The last steps, and about as many as can be read cheaply of those before."""
    older = steps[:-RECENT]
    stride = max(1, -(-len(older) // _SPREAD))
    return [*older[::stride], *steps[-RECENT:]]


def _texts(store: Store, trajectories: Sequence[Row]) -> list[tuple[int, str, str]]:
    if not trajectories:
        return []
    last = trajectories[-1]["step"]
    newest = [t for t in trajectories if t["step"] == last][-_TEXTS:]
    found = store.texts([t["id"] for t in newest])
    told = []
    for trajectory in newest:
        completion = found.get(trajectory["id"], {}).get("completion")
        if completion:
            told.append((trajectory["group_id"], trajectory["ref"], str(completion)))
    return told
