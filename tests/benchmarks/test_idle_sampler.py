"""The sampler goes on while rewards and environments are slow, and says so when it cannot.

On a clock of their own, where nothing depends on the machine: 64 workers, rewards of 0 to 3 s and
environments that block for 5 s. Real workers follow with the embedded model and short latencies;
``-m long`` runs SmolLM2 as ``idle_sampler.py`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from idle_sampler import figures, start
from test_collector import tasks
from test_flight import Talk
from test_real_model import smollm2
from virtual_world import Clock, ClockEnvironments, ClockGraders, ClockSampler

from nbtrain.rollout.admission import AdmissionRules
from nbtrain.rollout.collector import Collector, CollectorSettings
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.training.loop import _idleness

UPDATE_SECONDS = 5.0
GROUP, BATCH, STALENESS = 8, 4, 3


class World:
    """A collector over a sampler of 64 slots, with slow rewards or slow environments."""

    def __init__(
        self, *, reward_workers: int, environment_workers: int | None, reward_seconds: float
    ) -> None:
        self.clock = Clock()
        self.graders = ClockGraders(
            self.clock,
            workers=reward_workers,
            latency=lambda rng: rng.uniform(0, reward_seconds),
        )
        with_environments = environment_workers is not None
        environments = (
            ClockEnvironments(self.clock, workers=environment_workers or 1, latency=lambda rng: 5.0)
            if with_environments
            else None
        )
        flight = Flight(
            ClockSampler(
                self.clock,
                seconds=lambda rows: 0.05 + 0.0015 * rows,
                length=lambda rng: rng.randint(5, 64),
            ),
            self.graders,
            lambda ids: "x",
            chat=True,
            environments=environments,
            conversation=Talk() if with_environments else None,
            clock=self.clock,
        )
        at_work = -(-reward_workers // GROUP)
        self.most_ungraded = (STALENESS + 1) * BATCH + at_work
        self.collect = Collector(
            tasks(500),
            flight,
            CollectorSettings(
                BATCH,
                GROUP,
                2 * BATCH * GROUP,
                1e9,
                1,
                AdmissionRules(2),
                Sampling(64, 1000, 10_000, timeout=1e6),
                max_staleness=STALENESS,
                most_ungraded=self.most_ungraded,
            ),
            clock=self.clock,
        )

    def run(self, steps: int) -> tuple[float, list[str]]:
        """The idle share of the steps after the first, and what they say held sampling up."""
        idle = seconds = 0.0
        said = []
        for step in range(1, steps + 1):
            batch = self.collect.collect(step)
            self.clock.now += UPDATE_SECONDS
            self.collect.new_policy(step)
            self.collect.expire(batch)
            assert len(batch.used) == BATCH
            if step > 1:
                idle += batch.spent.idle
                seconds += batch.seconds
                said += [text for text in [_idleness(batch).get("bottleneck")] if text]
        return idle / max(seconds, 1e-9), said


def test_slow_rewards_do_not_hold_the_sampler_up() -> None:
    world = World(reward_workers=64, environment_workers=None, reward_seconds=3.0)
    idle, said = world.run(30)
    assert idle <= 0.05
    assert said == []


def test_slow_environments_do_not_hold_the_sampler_up() -> None:
    world = World(reward_workers=4, environment_workers=64, reward_seconds=0.0)
    idle, _ = world.run(30)
    assert idle <= 0.2


def test_too_few_reward_workers_bound_the_queue_and_are_named() -> None:
    world = World(reward_workers=2, environment_workers=None, reward_seconds=3.0)
    idle, said = world.run(30)
    assert idle > 0.5
    assert "waiting for grades" in said[-1]
    assert "reward_workers" in said[-1]
    # what has started when no further group may; some of these groups are half over
    in_flight = 2 * 2 * BATCH
    assert BATCH < world.graders.most_waiting <= world.most_ungraded + in_flight


def test_too_few_environments_are_named() -> None:
    world = World(reward_workers=4, environment_workers=2, reward_seconds=0.0)
    idle, said = world.run(10)
    assert idle > 0.3
    assert "waiting for environments" in said[-1]
    assert "environment_workers" in said[-1]


# --- real workers --------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_steps": 3,
    "batch_size": 2,
    "group_size": 4,
    "max_output_tokens_per_turn": 12,
}


@pytest.mark.parametrize(
    ("case", "word", "option"),
    [
        ("rewards", "grades", "reward_workers"),
        ("environments", "environments", "environment_workers"),
    ],
)
def test_real_workers_that_are_too_few_are_named(
    home: Path, case: str, word: str, option: str
) -> None:
    run = start(case, base_model="nbtrain/tiny", seconds=0.4, workers=1, **SMALL)
    run.wait(240)
    found = figures(run)
    assert found["idle"] > 0.2
    assert any(f"waiting for {word}" in text and option in text for text in found["bottleneck"])
    queued = (STALENESS + 1) * 2 + 1
    in_flight = 2 * 2
    assert found["in_flight"] <= queued + in_flight + 1


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["rewards", "environments"])
def test_smollm2_keeps_decoding(home: Path, case: str) -> None:
    from nbtrain import Client

    Client().base_models.select(smollm2(), name="smollm2")
    seconds = 5.0 if case == "environments" else 3.0
    run = start(case, base_model="smollm2", seconds=seconds, workers=64)
    run.wait(1800)
    assert figures(run)["idle"] <= 0.2
