"""What a comparison of two checkpoints holds, and how it shows itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtrain.client.records import Checkpoint
from nbtrain.plan.picking import Interval
from nbtrain.report.samples import (
    PairView,
    ReplyView,
    SideBySideView,
    side_by_side_html,
    side_by_side_text,
)
from nbtrain.report.turns import as_turns

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CheckpointComparison", "ComparedReply", "ComparedTask", "RewardSummary"]


@dataclass(frozen=True)
class ComparedReply:
    """One reply of a checkpoint; ``reward`` is the recorded one, ``None`` where there is none."""

    completion: Any
    told: str
    reward: float | None = None


@dataclass(frozen=True)
class ComparedTask:
    """One task: its prompt, the expected answer where that is known, and both sides' replies.

    ``reward_a`` and ``reward_b`` are means over the replies, as a round counts them.
    """

    task_id: str | None
    prompt: Any
    a: list[ComparedReply]
    b: list[ComparedReply]
    reference: str | None = None
    reward_a: float | None = None
    reward_b: float | None = None

    @property
    def difference(self) -> float | None:
        """By how much ``b`` earned more."""
        if self.reward_a is None or self.reward_b is None:
            return None
        return self.reward_b - self.reward_a

    def to_row(self) -> dict[str, Any]:
        """The task as one row of a table; several replies are parted by a line of dashes."""
        return {
            "task_id": self.task_id,
            "prompt": as_turns(self.prompt),
            "reference": self.reference,
            "reply_a": _joined(self.a),
            "reply_b": _joined(self.b),
            "reward_a": self.reward_a,
            "reward_b": self.reward_b,
            "difference": self.difference,
        }


@dataclass(frozen=True)
class RewardSummary:
    """Both rewards over the tasks that both rounds graded; ``interval`` is that of the mean
    paired difference ``b`` minus ``a``, by bootstrap over tasks.
    """

    tasks: int
    reward_a: float
    reward_b: float
    interval: Interval | None

    @property
    def difference(self) -> float:
        """By how much ``b`` earned more."""
        return self.reward_b - self.reward_a


@dataclass(frozen=True, repr=False)
class CheckpointComparison:
    """Two checkpoints on the same tasks.

    ``recorded`` tells that the replies are those of the validation rounds, with their rewards;
    else they were sampled now, without. ``tasks`` are those shown, ``scores`` all that both
    rounds graded: mean rewards of ``a`` and ``b`` by task id.
    """

    a: Checkpoint
    b: Checkpoint
    recorded: bool
    tasks: list[ComparedTask]
    notes: list[str]
    summary: RewardSummary | None = None
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """One row per task shown, with both sides' replies and rewards."""
        from nbtrain.client.frames import frame

        names = ("task_id", "prompt", "reference", "reply_a", "reply_b")
        rewards = ("reward_a", "reward_b", "difference")
        table = frame([task.to_row() for task in self.tasks], (*names, *rewards))
        return table.astype(dict.fromkeys(rewards, "float64"))

    @property
    def rewards(self) -> pd.DataFrame:
        """One row per task that both rounds graded, the most different first."""
        from nbtrain.client.frames import frame

        rows = [
            {"task_id": task, "reward_a": a, "reward_b": b, "difference": b - a}
            for task, (a, b) in self.scores.items()
        ]
        rows.sort(key=lambda row: (-abs(float(str(row["difference"]))), str(row["task_id"])))
        return frame(rows, ("task_id", "reward_a", "reward_b", "difference"))

    def _view(self) -> SideBySideView:
        names = _names(self.a, self.b)
        pairs = [
            PairView(
                task.prompt,
                [ReplyView(reply.completion, reply.told) for reply in task.a],
                [ReplyView(reply.completion, reply.told) for reply in task.b],
                _told_difference(task),
                task.reference,
            )
            for task in self.tasks
        ]
        lines = [] if self.summary is None else [_told_summary(self.summary, names)]
        title = f"{names[0]} beside {names[1]}"
        return SideBySideView(title, names, pairs, lines, self.notes)

    def __repr__(self) -> str:
        return side_by_side_text(self._view())

    def _repr_html_(self) -> str:
        return side_by_side_html(self._view())


# --- words ---------------------------------------------------------------------------------------


def _names(a: Checkpoint, b: Checkpoint) -> tuple[str, str]:
    one, other = (
        f"step {each.step_index} of run {each.run_id[:12]}"
        if a.run_id != b.run_id
        else f"step {each.step_index} ({each.checkpoint_id[:12]})"
        for each in (a, b)
    )
    return one, other


def _told_summary(found: RewardSummary, names: tuple[str, str]) -> str:
    gap = found.difference
    text = (
        f"Mean held-out reward over {found.tasks:,} common tasks: {found.reward_a:.3f} at "
        f"{names[0]}, {found.reward_b:.3f} at {names[1]}; difference {gap:+.3f}"
    )
    if found.interval is None:
        return f"{text}, of one task, which tells nothing about others."
    low, high = found.interval
    text += f", 95 % interval {low:+.3f} to {high:+.3f}, paired by task"
    return f"{text}: it may be none." if low <= 0 <= high else f"{text}."


def _told_difference(task: ComparedTask) -> str:
    gap = task.difference
    if gap is None:
        return ""
    return f"reward {task.reward_a:.3f} and {task.reward_b:.3f}, difference {gap:+.3f}"


def _joined(replies: Sequence[ComparedReply]) -> str:
    return "\n---\n".join(str(as_turns(reply.completion)) for reply in replies)
