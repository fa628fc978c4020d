"""Reinforcement runs on ``sums`` with the embedded model, in this process, for the benchmarks.

The loop, collector, sampler and update are the real ones; grading is a comparison done on the
spot, so that nothing but the algorithm is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nbtrain.catalog.samples import sums_prompt, sums_rows
from nbtrain.rewards import Grade, GradeRequest, GroupGrades
from nbtrain.rollout.admission import AdmissionRules
from nbtrain.rollout.collector import Collector, CollectorSettings
from nbtrain.rollout.draws import VALIDATION_STREAM
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt
from nbtrain.rollout.types import Group, TaskView
from nbtrain.training.history import AdapterHistory
from nbtrain.training.loop import Loop, LoopSettings
from nbtrain.training.policy import Policy, load_tokenizer
from nbtrain.training.update import Updater, UpdateSettings

EMBEDDED = Path(__file__).parents[2] / "nbtrain" / "catalog" / "embedded" / "tiny"
GROUP_SIZE = 8


@dataclass(frozen=True)
class Recipe:
    """What a run trains under."""

    seed: int
    steps: int
    algorithm: str = "gspo"
    learning_rate: float = 5e-4
    staleness: int = 0
    clip: tuple[float, float] = (3e-4, 4e-4)
    batch_size: int = 8
    in_flight: int = 128
    filtered: bool = True
    warmup: int = 5


@dataclass
class Result:
    """A run's curve, step by step, and the rewards of its final policy on the tasks asked."""

    rewards: list[float | None] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    sampled: int = 0
    wasted: int = 0
    held_out: list[float] = field(default_factory=list)


class ExactGrader:
    """One for the answer, else nothing."""

    timeout_seconds = 60.0

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, GradeRequest]] = []

    def submit(self, key: Any, request: GradeRequest, *, limit: float | None = None) -> None:
        self._waiting.append((key, request))

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def finished(self, block: float | None = None) -> list[tuple[Any, GroupGrades]]:
        done, self._waiting = self._waiting, []
        return [(key, GroupGrades(tuple(_grades(request)))) for key, request in done]


def _grades(request: GradeRequest) -> Iterator[Grade]:
    for text in request.completions:
        score = float(str(text) == request.columns["answer"])
        yield Grade(score, {"exact": score})


class Records:
    """Keeps the curve."""

    def __init__(self) -> None:
        self.result = Result()
        self.tasks: set[str] = set()

    def step(self, row: Any, groups: Any, trajectories: Any, changes: Any) -> None:
        self.result.rewards.append(row["avg_reward"])
        self.tasks |= {group["task_id"] for group in groups}
        metrics = row["metrics"]
        self.result.clipped.append(metrics.get("clipped_share") or 0.0)
        self.result.lags.append(metrics.get("lag_mean") or 0.0)
        self.result.sampled += row["completed_groups"] + row["cancelled_groups"]
        self.result.wasted += row["cancelled_groups"]
        self._waste(changes)

    def closing(self, step: int, trajectories: Any, changes: Any) -> None:
        """What the end of a run cuts off is nobody's waste."""

    def _waste(self, changes: Any) -> None:
        outcomes = [group["outcome"] for group in changes.groups.values()]
        self.result.wasted += outcomes.count("discarded")

    def validation(self, row: Any, trajectories: Any) -> None:
        raise AssertionError

    def checkpoint(self, step: int, reason: str, state: Any) -> None:
        """Nothing to keep."""


@cache
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED)


def task_view(number: int, a: int, b: int) -> TaskView:
    """The task ``a + b``, worded as in ``sums``."""
    prompt = [{"role": "user", "content": sums_prompt(a, b)}]
    columns = {"answer": f"<answer>{a + b}</answer>"}
    return TaskView(f"{number:016x}", render_prompt(tokenizer(), prompt), prompt, columns)


@cache
def views() -> tuple[tuple[TaskView, ...], tuple[TaskView, ...]]:
    """Training and held-out tasks."""
    sides = []
    for first, rows in enumerate(sums_rows()):
        sides.append(
            tuple(
                TaskView(
                    f"{first * 10_000 + n:016x}",
                    render_prompt(tokenizer(), row["prompt"]),
                    row["prompt"],
                    {"answer": row["answer"]},
                )
                for n, row in enumerate(rows)
            )
        )
    return sides[0], sides[1]


def load_policy(seed: int) -> Policy:
    return Policy.load(
        EMBEDDED,
        precision="fp32",
        lora_rank=16,
        lora_alpha=32,
        target_modules="default",
        seed=seed,
        device=torch.device("cpu"),
    )


LIMITS = Sampling(max_new_tokens=24, max_trajectory_tokens=24, max_context=96)


def make_flight(policy: Policy, slots: int) -> Flight:
    ends = end_ids(policy.model.generation_config, tokenizer())
    sampler = RaggedSampler(
        policy.model,
        slots=slots,
        eos_ids=ends,
        pad_id=tokenizer().pad_token_id,
        max_context=96,
    )
    return Flight(
        sampler, ExactGrader(), lambda ids: decode_completion(tokenizer(), ids, ends), chat=True
    )


def run(
    recipe: Recipe,
    *,
    held_out: Sequence[TaskView],
    samples: int = 4,
    records: Records | None = None,
) -> Result:
    """Train, then sample ``samples`` replies for each held-out task at temperature 1."""
    policy = load_policy(recipe.seed)
    flight = make_flight(policy, recipe.in_flight)
    train, _ = views()
    admit_all = not recipe.filtered
    rules = AdmissionRules(
        GROUP_SIZE // 2,
        train_on_truncation=admit_all,
        train_on_all_fail=admit_all,
        train_on_all_pass=admit_all,
        train_on_zero_advantage=admit_all,
    )
    collector = Collector(
        train,
        flight,
        CollectorSettings(
            recipe.batch_size,
            GROUP_SIZE,
            recipe.in_flight,
            1e9,
            recipe.seed,
            rules,
            LIMITS,
            max_staleness=recipe.staleness,
        ),
    )
    level = "sequence" if recipe.algorithm == "gspo" else "token"
    history = AdapterHistory(policy.trainable, recipe.staleness + 1) if recipe.staleness else None
    records = records or Records()
    loop = Loop(
        LoopSettings(
            start_step=0,
            total_steps=recipe.steps,
            learning_rate=recipe.learning_rate,
            lr_warmup_steps=recipe.warmup,
            lr_hold_steps=recipe.steps,
            lr_min_ratio=0.1,
            val_enabled=False,
            val_interval=0,
            checkpoint_interval=0,
        ),
        policy=policy,
        updater=Updater(
            policy,
            UpdateSettings(level, *recipe.clip, 0.0, 1.0, 1.0),
            weight_decay=0.01,
            history=history,
        ),
        collector=collector,
        validator=None,
        recorder=records,
        tasks=list(train),
    )
    ending = loop.run()
    if ending.failure is not None:
        raise RuntimeError(ending.failure)
    records.result.held_out = evaluate(policy, held_out, samples=samples, seed=recipe.seed)
    return records.result


def evaluate(
    policy: Policy, held_out: Sequence[TaskView], *, samples: int, seed: int
) -> list[float]:
    """Mean reward of each task."""
    lane = make_flight(policy, 256).lane(max_in_flight=256)
    groups = []
    for number, task in enumerate(held_out):
        group = Group(number, number, task.task_id, 0)
        streams = [(seed, VALIDATION_STREAM, task.key, 0, sample) for sample in range(samples)]
        lane.launch(group, task, streams, LIMITS)
        groups.append(group)
    while lane.open:
        lane._flight.advance()
    return [sum(t.reward or 0.0 for t in g.trajectories) / samples for g in groups]
