"""The words of a rollout: sampling requests, trajectories, groups and how they end.

Plain data: no torch here, so that admission, the ledger and their tests stay pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from nbtrain.environments.events import EnvironmentEvent as EnvironmentEvent
from nbtrain.environments.events import EnvironmentEventKind as EnvironmentEventKind


class TerminationReason(StrEnum):
    """Why a trajectory ended."""

    ENV_DONE = "ENV_DONE"
    """Finished by itself: graded, or gradable."""
    TRUNCATION = "TRUNCATION"
    """The last reply hit its per-turn token limit, or the context is full."""
    LIMIT_REACHED = "LIMIT_REACHED"
    """The trajectory's own token limit."""
    MAX_TURNS = "MAX_TURNS"
    """The turn limit."""
    TIMEOUT = "TIMEOUT"
    """The trajectory's time limit. (A grade has a limit of its own, ``reward_timeout_seconds``.)"""
    ERROR = "ERROR"
    """Execution, environment or grading failed, or no grade came."""
    STALE = "STALE"
    """Cancelled or discarded because its policy was too old."""
    CANCELLED = "CANCELLED"
    """Stopped with its run."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One reply to sample.

    Requests with equal ``prompt_ids`` submitted together share one prefill. ``stream`` keys the
    reply's own random stream: one uniform per token, so in exact arithmetic the sampled ids depend
    on the stream and the policy alone; below float64 what else is decoded can tip a uniform that
    lies within rounding of the edge between two tokens. ``temperature`` 0 is greedy;
    ``top_p`` 1 and ``top_k`` -1 cut nothing.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stream: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


class Finish(StrEnum):
    """Why sampling of a reply stopped."""

    STOP = "stop"
    """An end id was sampled; it is the last of ``token_ids``."""
    LENGTH = "length"
    """``max_new_tokens`` were sampled without an end id."""
    CANCELLED = "cancelled"
    """Cancelled; ``token_ids`` holds what there was."""


@dataclass(slots=True)
class Sample:
    """A sampled reply.

    ``token_ids``, ``logprobs`` and ``versions`` are equally long. A log-prob is that of the
    sampled id under the full softmax at the request's temperature (at 1 for greedy), before any
    top-p or top-k cut, in fp32. A version is the policy version that sampled the token.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish


class Sampler(Protocol):
    """Turns requests into replies. Knows token ids only: no tasks, rewards or groups."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; they are admitted as slots and memory allow."""
        ...

    def step(self) -> list[Sample]:
        """Decode one token for every admitted request and return those that finished."""
        ...

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        """Stop these requests, queued or running, and return what they had sampled."""
        ...

    def admitted(self) -> list[int]:
        """Requests that have come out of the queue since the last call."""
        ...

    def new_policy(self, version: int) -> None:
        """The weights have changed: tokens from now on carry ``version``."""
        ...

    @property
    def pending(self) -> int:
        """Requests queued or running."""
        ...


@dataclass(slots=True)
class Trajectory:
    """One attempt at a task, of one or more turns.

    ``token_ids`` is everything behind the prompt, sampled ids verbatim; ``observed`` are the
    half-open spans of it that the environment put there, which no loss ever scores. There,
    ``logprobs`` is 0 and ``versions`` is -1. ``turns`` counts agent and environment turns.

    ``reward`` is the recorded reward and never changes after grading; ``None`` means ungraded.
    ``terms`` holds each reward term's unweighted score by name. ``messages`` are those behind the
    prompt where there is an environment, else ``None``; ``completion`` is the last reply's text.
    """

    trajectory_id: int
    group_id: int
    sample: int
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    reason: TerminationReason
    completion: str = ""
    reward: float | None = None
    terms: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    observed: list[tuple[int, int]] = field(default_factory=list)
    turns: int = 1
    messages: list[dict[str, Any]] | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that were sampled, all turns together."""
        return len(self.token_ids) - sum(stop - start for start, stop in self.observed)

    @property
    def started_version(self) -> int | None:
        """The policy version of its first sampled token: what its staleness counts from."""
        return next((version for version in self.versions if version >= 0), None)


@dataclass(slots=True)
class Group:
    """The trajectories sampled for one task under one budget.

    ``budget`` is the largest number of output tokens of its trajectories where tasks are sampled
    under several (density-aware training), else ``None``.
    """

    group_id: int
    task_index: int
    task_id: str
    epoch: int
    trajectories: list[Trajectory] = field(default_factory=list)
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task as the rollout sees it: its id, its prompt as token ids, and what rewards read."""

    task_id: str
    prompt_ids: tuple[int, ...]
    prompt: Any
    columns: dict[str, Any]
    occurrence: int = 0
    """Number among the tasks of equal content, so that equal rows sample different replies."""

    @property
    def key(self) -> int:
        """The integer that keys this task's random streams."""
        return int(self.task_id, 16) + (self.occurrence << 64)


class Environments(Protocol):
    """Environments of many trajectories at a time, each in a process of its own."""

    def open(self, key: int, columns: Mapping[str, Any]) -> None:
        """Queue the construction and reset of trajectory ``key``'s environment."""
        ...

    def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
        """Hand an assistant message to it; it is killed when it takes over ``limit`` seconds.

        ``reply`` has ``content`` and, where the reply calls tools, ``tool_calls``.
        """
        ...

    def close(self, key: int) -> None:
        """Ask for its state, then let it go."""
        ...

    def drop(self, keys: Iterable[int]) -> None:
        """Let these go at once, whatever they are doing; no event comes any more."""
        ...

    def events(self, block: float = 0.0) -> list[EnvironmentEvent]:
        """Answers since the last call; waits up to ``block`` seconds for the first."""
        ...


class Conversation(Protocol):
    """Between messages and token ids, for trajectories of several turns."""

    def prompt(self, prompt: Any, addition: str | None) -> tuple[int, ...]:
        """Ids of a task's prompt; ``addition`` is appended to its last user message."""
        ...

    def reply(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The assistant message of sampled ids: ``role``, ``content``, maybe ``tool_calls``."""
        ...

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids from behind a reply's end token to where the next reply begins."""
        ...
