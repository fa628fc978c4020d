"""The things that listings hold, with the attribute names that the seeds' snippets print."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbtrain.report.checkpoint_table import scored
from nbtrain.report.turns import as_turns, turns_html

if TYPE_CHECKING:
    from nbtrain.store import Store

__all__ = [
    "Checkpoint",
    "HeldOutPoint",
    "Progress",
    "RewardPoint",
    "StepSummary",
    "TrajectoryItem",
    "verdict_told",
]


def verdict_told(row: Mapping[str, Any]) -> str:
    """Why a trajectory may be trained on or may not, and the step that did train on it, if any."""
    verdict, step = row.get("verdict") or "", row.get("consumed_step")
    if step is None:
        return verdict
    trained = f"trained in step {step:,}"
    return f"{verdict}; {trained}" if verdict else trained


class _Row:
    """Records are dataclasses; as a row they are their public fields, ``hidden`` ones left out."""

    hidden: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def columns(cls) -> list[str]:
        """The names of a row's columns."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return [f.name for f in fields if f.name not in cls.hidden]

    def to_row(self) -> dict[str, Any]:
        """The record as one row of a table."""
        return {name: getattr(self, name) for name in self.columns()}


@dataclass(frozen=True)
class Progress(_Row):
    """How far a run is. Steps are global: they count on from a parent's step.

    ``activity`` says what the job does now; ``None`` when the run is over.
    """

    completed_steps: int
    total_steps: int
    attempted_trajectories: int
    graded_trajectories: int
    start_step: int = 0
    updates_applied: int = 0
    saved_step: int | None = None
    output_tokens: int = 0
    activity: str | None = None

    @property
    def observed_step(self) -> int:
        """The last step that was reported; from ``saved_step`` on a restore would repeat it."""
        return self.completed_steps


@dataclass(frozen=True)
class RewardPoint(_Row):
    """The mean recorded reward of a step's graded trajectories, and that of those trained on."""

    step: int
    avg_reward: float | None
    used_reward: float | None = None


@dataclass(frozen=True)
class HeldOutPoint(_Row):
    """One validation round. Compare only rounds with ``round_completed``.

    ``low`` and ``high`` are the 95 % interval of a complete round's ``held_out_reward``, by
    bootstrap over its tasks (:mod:`nbtrain.plan.picking`); ``None`` with fewer than two tasks.
    A supervised run has ``validation_loss``, weighted by trained tokens, and its ``perplexity``
    instead of a held-out reward.
    """

    step: int
    held_out_reward: float | None
    round_completed: bool
    completed_samples: int
    expected_samples: int
    policy_version: int | None = None
    validation_loss: float | None = None
    perplexity: float | None = None
    low: float | None = None
    high: float | None = None
    tasks: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    """Mean counted reward by task id, where it was read."""

    hidden: ClassVar[frozenset[str]] = frozenset(("validation_loss", "perplexity", "tasks"))


@dataclass(frozen=True)
class StepSummary(_Row):
    """The ledger of one step: completed groups are the used, no-signal, filtered, too small,
    discarded and pending ones.
    """

    step: int
    avg_reward: float | None
    used_reward: float | None
    completed_groups: int
    used_groups: int
    no_signal_groups: int
    filtered_groups: int
    too_small_groups: int
    discarded_groups: int
    pending_groups: int
    started_groups: int
    in_flight_groups: int
    cancelled_groups: int
    update_applied: bool
    skip_reason: str | None
    settled: bool


@dataclass(frozen=True)
class Checkpoint(_Row):
    """A committed save of a run. Passes wherever a checkpoint is asked for.

    ``held_out_reward`` (of a supervised run ``validation_loss``) and ``round_completed`` are those
    of the validation round at its step (``None`` and false when there was none).
    """

    checkpoint_id: str
    step_index: int
    base_model_slug: str
    held_out_reward: float | None
    round_completed: bool
    kind: str
    reason: str
    size_bytes: int
    created_at: float
    run_id: str
    path: str
    has_weights: bool = True
    has_training_state: bool = True
    pinned: bool = False
    validation_loss: float | None = None

    held_out_low: float | None = None
    """Lower end of the 95 % interval of ``held_out_reward``, by bootstrap over tasks."""
    held_out_high: float | None = None
    ties_with: int | None = None
    """The step of the checkpoint with the highest reward, when the paired difference to it may
    be nothing; ``None`` for that one itself and for one that is worse."""
    _tied_reward: float | None = field(default=None, repr=False, compare=False)  # at that step
    _store: Store | None = field(default=None, repr=False, compare=False)

    hidden: ClassVar[frozenset[str]] = frozenset(
        ("has_weights", "has_training_state", "path", "_store", "_tied_reward")
    )

    @property
    def training_run_id(self) -> str:
        """The run that saved it."""
        return self.run_id

    def generate(self, prompts: Any, n: int = 1, **settings: Any) -> Any:
        """What the model at this checkpoint answers: ``n`` replies to each prompt.

        They are sampled in a side process that is kept warm. See
        :func:`nbtrain.client.trying.generate` for prompts, settings and what comes back.
        """
        from nbtrain.client.trying import generate

        return generate(self, prompts, n, **settings)

    def export(self, folder: str | Path) -> Path:
        """Copy the adapter into a new folder, as PEFT loads it, and return the folder.

        Raises :class:`~nbtrain.errors.Refused` when the folder holds anything already, or when
        the checkpoint has no weights, :class:`~nbtrain.errors.NotWritten` (an ``OSError``) when
        it cannot be written.
        """
        from nbtrain.client.picking import export_adapter

        return export_adapter(self, folder)

    def __repr__(self) -> str:
        what, value = "held-out", self.held_out_reward
        if self.validation_loss is not None:
            what, value = "validation loss", self.validation_loss
        told = "–" if value is None else scored(value, self.held_out_low, self.held_out_high)
        partial = "" if self.round_completed or value is None else " (not complete)"
        tie = ""
        if self.ties_with is not None and self._tied_reward is not None:
            tie = f", ties with step {self.ties_with} ({self._tied_reward:.3f})"
        return (
            f"<Checkpoint {self.checkpoint_id[:12]} step {self.step_index} of run "
            f"{self.run_id[:12]}, {what} {told}{partial}{tie}, {self.kind}>"
        )


class TrajectoryItem:
    """One attempt at a task. Its texts are read when first asked for, a page at a time."""

    def __init__(self, row: Mapping[str, Any], texts: Callable[[], Mapping[str, Any]]) -> None:
        self._row = dict(row)
        self._texts = texts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_row":
            raise AttributeError(name)
        try:
            return self._row[name]
        except KeyError:
            msg = f"a trajectory has no {name!r}; it has {', '.join(self._row)}"
            raise AttributeError(msg) from None

    @property
    def prompt(self) -> Any:
        """The prompt: chat messages or text."""
        return self._texts().get("prompt")

    @property
    def completion(self) -> Any:
        """What the model wrote; of several turns, the messages after the prompt."""
        return self._texts().get("completion")

    @property
    def transcript(self) -> str:
        """Prompt and completion as one text, each message with its role before it."""
        return str(as_turns(_conversation(self.prompt, self.completion)))

    @property
    def terms(self) -> dict[str, float | None]:
        """Each reward term's unweighted score by name."""
        return dict(self._texts().get("terms") or {})

    @property
    def traceback(self) -> str | None:
        """The whole text of what failed in a reward, its traceback where there is one.

        ``None`` when nothing failed; ``error`` is its first line.
        """
        told = self._texts().get("error")
        return None if told is None else str(told)

    def to_row(self) -> dict[str, Any]:
        """The row without its texts."""
        return dict(self._row)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copied and pickled with its texts, which are then read."""
        return self._row, dict(self._texts())

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self._row, texts = state
        self._texts = lambda: texts

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._row})

    def _repr_html_(self) -> str:
        told = [repr(self), verdict_told(self._row)]
        head = "".join(f"<div>{html.escape(line)}</div>" for line in told if line)
        turns = turns_html(_conversation(self.prompt, self.completion))
        return f'<div class="nbtrain-trajectory">{head}{turns}</div>'

    def __repr__(self) -> str:
        reward = self._row.get("reward")
        told = "ungraded" if reward is None else f"reward {reward:.3f}"
        return (
            f"<Trajectory {self._row.get('trajectory_id')} step {self._row.get('step')} "
            f"{self._row.get('status')}, {told}>"
        )


def _conversation(prompt: Any, completion: Any) -> list[Any]:
    """Both as one list of messages; a bare text stands under the role that it is in."""
    messages: list[Any] = []
    for role, side in (("user", prompt), ("assistant", completion)):
        messages += side if isinstance(side, list) else [{"role": role, "content": side}]
    return messages
