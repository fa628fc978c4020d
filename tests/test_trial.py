"""The start check's trial: what environments and rewards do wrong is said before any update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler

from nbtrain.environments import EnvironmentPool, pack
from nbtrain.rewards import RewardPool, as_terms, environment
from nbtrain.rewards import pack as pack_rewards
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import Finish, SampleRequest, TaskView
from nbtrain.training import trial
from nbtrain.training.trial import Trial

SIZE = 4
SAMPLING = Sampling(max_new_tokens=8, max_trajectory_tokens=90, max_context=100, timeout=600.0)
TASK = TaskView("7" * 64, (1, 2), "Go on.", {})


class Raises:
    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        raise LookupError(reply)


class RaisesOnce:
    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        self.reward = 0.5
        if reply == "2":
            raise LookupError(reply)


class Hang:
    reward = 1.0

    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        if reply == "1":
            time.sleep(600)
        time.sleep(0.01)
        return "go on"


class Talkative:
    reward = 1.0

    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        return "word " * 120


class TalkativeOnce:
    reward = 1.0

    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        return "word " * 120 if reply == "3" else None


class NoReward:
    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        return None


class Unfinished:
    def reset(self) -> None: ...

    def step(self, reply: str) -> Any:
        return "go on"


class Talk:
    """A conversation in which a word is a token."""

    def prompt(self, prompt: Any, addition: str | None) -> tuple[int, ...]:
        return (1, 2)

    def reply(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"role": "assistant", "content": str(token_ids[0])}

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [9] * len(str(messages[0]["content"]).split())


Try = Callable[..., tuple[list[str], list[str], list[str]]]


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Try]:
    """Runs a trial of an environment and rewards; its problems, remarks, and what it said."""
    with ExitStack() as stack:

        def run(made: Any, rewards: Any = None, **changes: Any) -> Any:
            (tmp_path / "environment.pkl").write_bytes(pack(made)[0])
            (tmp_path / "rewards.pkl").write_bytes(
                pack_rewards(as_terms(rewards or environment()))[0]
            )
            environments = stack.enter_context(
                EnvironmentPool(
                    tmp_path / "environment.pkl", workers=SIZE, log_path=tmp_path / "e.log"
                )
            )
            graders = stack.enter_context(
                RewardPool(
                    tmp_path / "rewards.pkl",
                    workers=1,
                    timeout_seconds=changes.pop("reward_timeout", 60.0),
                    log_path=tmp_path / "r.log",
                )
            )
            flight = Flight(
                ScriptedSampler(_own_number),
                graders,
                lambda ids: " ".join(map(str, ids)),
                chat=True,
                environments=environments,
                conversation=Talk(),
            )
            said: list[str] = []
            tried = Trial(flight, graders, environments, Talk(), said.append, lambda: None)
            streams = [(0, 2, sample) for sample in range(SIZE)]
            tried.run(TASK, streams, replace(SAMPLING, **changes))
            return list(map(str, tried.problems)), tried.remarks, said

        yield run


def _own_number(request: SampleRequest) -> tuple[list[int], Finish]:
    return [request.stream[2]], Finish.STOP


def test_an_environment_that_always_raises_is_a_problem_with_its_place(attempt: Try) -> None:
    ((problem,), remarks, _) = attempt(Raises)
    assert problem.startswith("environment 'Raises' raised in step: LookupError: ")
    assert "test_trial.py, in step)" in problem
    assert remarks == []  # its rewards are not tried on what failed


def test_one_that_raises_now_and_then_is_a_remark(attempt: Try) -> None:
    problems, (remark,), _ = attempt(RaisesOnce)
    assert problems == []
    assert remark.startswith("in 1 of the trial's 4 trajectories: environment 'RaisesOnce' raised")


def test_one_that_hangs_is_a_problem_after_the_trials_own_limit(
    attempt: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 2.0)
    ((problem,), remarks, said) = attempt(Hang, max_turns=4)
    assert problem == (
        "Hang.step did not answer within 2 s; its process was killed. "
        "The start check waits 2 s at most for one call"
    )
    assert remarks == []
    assert "one group is being sampled (3 of 4 ended), waiting for environments since 1 s" in said


def test_what_leaves_no_room_in_the_context_is_counted_in_tokens(attempt: Try) -> None:
    ((problem,), remarks, _) = attempt(Talkative)
    assert problem.startswith("Talkative.step returned 120 tokens, the context is 100")
    assert remarks == []
    problems, (remark,), _ = attempt(TalkativeOnce)
    assert problems == []
    assert remark == (
        "in 1 of the trial's 4 trajectories: TalkativeOnce.step returned 120 tokens, "
        "the context is 100"
    )


def test_an_environment_without_any_reward_is_a_problem(attempt: Try) -> None:
    ((problem,), remarks, said) = attempt(NoReward)
    assert problem == (
        "NoReward sets neither self.reward nor get_reward(), and its steps return none: every "
        "trajectory would be ungraded"
    )
    assert remarks == []
    assert said[-1] == "the rewards are being tried since 0 s"


def test_one_that_has_not_come_to_its_end_may_still_give_a_reward(attempt: Try) -> None:
    problems, (remark,), _ = attempt(Unfinished, max_turns=3)
    assert problems == []
    assert "reward 'environment' returned None for every completion" in remark


def slow(completion: str) -> float:
    time.sleep(600)
    return 1.0


def test_a_reward_that_training_would_wait_for_is_a_remark(
    attempt: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 1.0)
    problems, (remark,), said = attempt(NoReward, slow)
    assert problems == []
    assert "reward 'slow' of task 777" in remark
    assert remark.endswith("the trial waits no longer; reward_timeout_seconds lets it take 60 s")
    assert "the rewards are being tried since 1 s" in said
    ((problem,), _, _) = attempt(NoReward, slow, reward_timeout=0.5)
    assert "did not answer within 0.5 s" in problem
