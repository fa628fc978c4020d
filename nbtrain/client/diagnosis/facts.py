"""What the rules look at, and how it is read from the store at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nbtrain.client.readings import SFT
from nbtrain.errors import Refused
from nbtrain.plan.fields import counted
from nbtrain.plan.phases import Phase
from nbtrain.store import Row, trajectory_ref

if TYPE_CHECKING:
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.store import Store, StoredRun

__all__ = ["OVER", "RECENT", "Facts", "gather", "the_last"]

OVER = ("CANCELLED", "STALE")
"""Endings of trajectories that were cut off, and say nothing of themselves."""

RECENT = 20
"""Steps that count as the last ones."""

LEARNED = 0.9
"""Mean reward, on a scale from 0 to 1, of a run that has little left to learn."""

_ROSE = 0.05
_SPREAD = 100  # steps over the whole run that are read with their metrics
_GROUPS = 2_000  # newest groups
_TRAJECTORIES = 2_000  # newest training trajectories
_TEXTS = 128  # texts of the last step
_HELD_OUT = 500  # newest held-out trajectories
_ERRORS = 64  # newest failures that are looked at for a traceback
_TRAJECTORY = (
    *("id", "step", "group_id", "reason", "reward", "eligible", "verdict", "output_tokens"),
    *("turns", "error"),
)
_GROUP = (
    *("step", "group_id", "task_id", "task_index", "epoch", "outcome", "reason", "size"),
    "reward_mean",
)


@dataclass(slots=True)
class Facts:
    """A run's figures as plain data.

    ``rewards`` are (step, mean reward) of every step; ``steps`` the rows of at most 120 steps,
    spread over the run, the last 20 among them, each with ``metrics``; ``groups`` and
    ``trajectories`` the newest rows; ``texts`` the completions of the last step's trajectories
    as (group, public id, text); ``held_out`` the trajectories of the last validation round, the
    newest ones. Trajectories carry their public id as ``ref``; ``tracebacks`` are the ids of those
    whose failure came with one. ``tools`` are the names of what an environment lets the model
    call. Times are seconds since 1970; ``waiting_since`` is when the phase began, ``waits_for``
    what it said, and ``activity`` what the job says it does now.

    ``door`` says by what names its options were stated.
    ``warm`` says whether it began from trained weights, an adapter's or a checkpoint's.
    ``losses`` are (step, loss) of every step of a supervised run, which has neither rewards nor
    trajectories; its ``train_tasks`` are rows. ``validates`` says whether it has a validation
    dataset, ``smoke`` whether it is a smoke check, ``verdict`` what that found.
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
    activity: str | None = None
    now: float = 0.0
    rewards: Sequence[tuple[int, float | None]] = ()
    steps: Sequence[Row] = ()
    rounds: Sequence[Row] = ()
    groups: Sequence[Row] = ()
    trajectories: Sequence[Row] = ()
    texts: Sequence[tuple[int, str, str]] = ()
    held_out: Sequence[Row] = ()
    tracebacks: Container[str] = ()
    tools: Sequence[str] = ()
    method: str = "gspo"
    admission: str = "filtered"
    door: str = "options"
    warm: bool = False
    losses: Sequence[tuple[int, float | None]] = ()
    validates: bool = True
    smoke: bool = False
    checks: Sequence[Mapping[str, Any]] = ()
    verdict: Mapping[str, Any] | None = None

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

    @property
    def unit_scale(self) -> bool:
        """Whether every reward seen lies within 0 and 1, so that 1 is all there is to earn."""
        known = [*(t["reward"] for t in self.trajectories), *(r for _, r in self.rewards)]
        return all(0 <= reward <= 1 for reward in known if reward is not None)

    @property
    def is_learned(self) -> bool:
        """Whether the reward is near its maximum, and was not at the beginning."""
        known = [reward for _, reward in self.rewards if reward is not None]
        recent = known[-min(RECENT, max(1, len(known) // 5)) :]
        begun, now = mean(known[: len(recent)]), mean(recent)
        if begun is None or now is None or not self.unit_scale:
            return False
        return now >= LEARNED and now - begun > _ROSE

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


def the_last(number: int, what: str) -> str:
    """``the last step``, ``the last 20 steps``."""
    return f"the last {what if number == 1 else counted(number, what)}"


def mean(values: Sequence[float]) -> float | None:
    """The mean; ``None`` of nothing."""
    return sum(values) / len(values) if values else None


def gather(store: Store, row: StoredRun, seen: Liveness | None = None) -> Facts:
    """Read a run's facts. What it reads does not grow with the run, but for the histories of
    rewards and losses.
    """
    sampled = _losses if row.method == SFT else _samples
    plan = row.resolved
    phase = (store.phases(row.key) or [{}])[-1]
    rounds = store.validation_rounds(row.key)
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
        activity=seen.activity if seen is not None and not row.ended_for_good else None,
        now=time.time(),
        rounds=rounds,
        method=row.method,
        admission=plan.get("admission") or "filtered",
        door="options" if plan.get("flat") else plan.get("door") or "options",
        warm=bool(plan.get("warm_start") or plan.get("parent")),
        validates=bool(plan.get("validation_dataset")),
        smoke=bool(plan.get("smoke")),
        checks=row.checks,
        verdict=row.verdict,
        **sampled(store, row, rounds),
    )


def _losses(store: Store, row: StoredRun, _: Sequence[Row]) -> dict[str, Any]:
    """The steps of a supervised run."""
    losses = [(s["step"], s["loss"]) for s in store.steps(row.key, columns=("id", "step", "loss"))]
    wanted = _spread([step for step, _ in losses])
    return {"losses": losses, "steps": store.steps_at(row.key, wanted)}


def _samples(store: Store, row: StoredRun, rounds: Sequence[Row]) -> dict[str, Any]:
    """The steps of a run that samples, and its newest groups, trajectories and texts."""
    key = row.key
    rewards = [(r["step"], r["avg_reward"]) for r in store.rewards(key)]
    wanted = _spread([step for step, _ in rewards])
    trajectories = store.trajectories(
        key, split="train", limit=_TRAJECTORIES, newest=True, columns=_TRAJECTORY
    )
    for trajectory in trajectories:
        trajectory["ref"] = trajectory_ref(row.run_id, trajectory)
    return {
        "rewards": rewards,
        "steps": store.steps_at(key, wanted),
        "groups": store.groups(key, limit=_GROUPS, newest=True, columns=_GROUP),
        "trajectories": trajectories,
        "texts": _texts(store, trajectories),
        "held_out": _last_round(store, row, rounds),
        "tracebacks": _tracebacks(store, trajectories),
        "tools": _tools(store, row.workload_id),
    }


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


def _last_round(store: Store, row: StoredRun, rounds: Sequence[Row]) -> list[Row]:
    if not rounds:
        return []
    columns = ("id", "step", "reason", "reward")
    newest = store.trajectories(
        row.key, split="held_out", limit=_HELD_OUT, newest=True, columns=columns
    )
    found = [t for t in newest if t["step"] == rounds[-1]["step"]]
    return [t | {"ref": trajectory_ref(row.run_id, t)} for t in found]


def _tracebacks(store: Store, trajectories: Sequence[Row]) -> frozenset[str]:
    """Public ids of the newest failures whose whole error is more than its first line."""
    failed = [t for t in trajectories if t["reward"] is None and t["error"]][-_ERRORS:]
    texts = store.texts([t["id"] for t in failed])
    return frozenset(
        t["ref"] for t in failed if "\n" in (texts.get(t["id"], {}).get("error") or "").strip()
    )


def _tools(store: Store, workload_id: str) -> tuple[str, ...]:
    """Names of the tools of the workload's environment, where it is one of tools."""
    workload = store.workload(workload_id)
    environment = ((workload or {}).get("spec") or {}).get("environment")
    if workload is None or environment is None:
        return ()
    return _packed_tools(str(store.home / workload["path"] / "environment.pkl"))


@lru_cache(maxsize=64)  # what was packed never changes, and a poller asks again and again
def _packed_tools(path: str) -> tuple[str, ...]:
    from nbtrain.environments.packing import read_packed

    try:
        contract = read_packed(path).contract  # nothing of it is run
    except (Refused, OSError):
        return ()
    return () if contract is None else tuple(tool.name for tool in contract.tools)
