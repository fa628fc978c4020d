"""One trajectory under way: where it stands, and how each thing that happens moves it on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from nbtrain.rollout.limits import Sampling, full, room
from nbtrain.rollout.types import (
    Conversation,
    Group,
    Sample,
    SampleRequest,
    TaskView,
    TerminationReason,
    Trajectory,
)

__all__ = ["Open", "Rollout", "Stage"]


class Stage(Enum):
    """What a trajectory is waiting for."""

    LANE = auto()
    """Its turn to start: it is not in flight yet."""
    OPENING = auto()
    """Its environment."""
    SAMPLING = auto()
    """The sampler: queued or running."""
    ACTING = auto()
    """The environment's answer."""
    CLOSING = auto()
    """The environment's state after its end."""
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Rollout:
    """A trajectory under way. ``spent`` are its seconds of execution so far, grading apart."""

    key: int
    trajectory: Trajectory
    one: Open
    stream: tuple[int, ...]
    stage: Stage = Stage.LANE
    request: int | None = None
    """Its newest request to the sampler."""
    replies: int = 0
    spent: float = 0.0
    began: float | None = None
    """When the sampler took up the present reply; ``None`` while it is queued."""
    version: int | None = None
    """The policy version its first token is sampled by."""
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> Sampling:
        """Its limits."""
        return self.one.sampling

    @property
    def left(self) -> float:
        """Seconds of execution it has left."""
        return self.sampling.timeout - self.spent

    def begin(self, conversation: Conversation | None, addition: str | None) -> None:
        """Set the prompt, with what the environment's reset adds to it."""
        trajectory = self.trajectory
        trajectory.turns = 0
        if conversation is not None:
            trajectory.messages = []
            if addition:
                trajectory.prompt_ids = conversation.prompt(self.one.task.prompt, addition)

    def next_request(self, request_id: int) -> SampleRequest | None:
        """The request of the next reply; ``None``, with the reason set, when no room is left."""
        trajectory, sampling = self.trajectory, self.sampling
        ids = (*trajectory.prompt_ids, *trajectory.token_ids)
        allowed = room(sampling, held=len(ids), sampled=trajectory.output_tokens)
        if allowed < 1:
            trajectory.reason = full(sampling, sampled=trajectory.output_tokens)
            if trajectory.observed and len(ids) >= sampling.max_context:
                start, stop = trajectory.observed[-1]
                trajectory.error = (
                    f"what the environment said is {stop - start:,} tokens long, "
                    f"the context is {sampling.max_context:,}"
                )
            return None
        return SampleRequest(
            request_id=request_id,
            prompt_ids=ids,
            max_new_tokens=allowed,
            stream=self.stream if self.replies == 0 else (*self.stream, self.replies),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def replied(self, sample: Sample) -> None:
        """Take a reply, whole or cut, into the sequence: sampled ids stay as they are."""
        trajectory = self.trajectory
        trajectory.token_ids += sample.token_ids
        trajectory.logprobs += sample.logprobs
        trajectory.versions += sample.versions
        if sample.token_ids:
            self.replies += 1
            trajectory.turns += 1

    def observed(self, messages: tuple[dict[str, Any], ...], ids: list[int]) -> None:
        """Take what the environment said into the sequence, for no loss to score."""
        trajectory = self.trajectory
        start = len(trajectory.token_ids)
        trajectory.token_ids += ids
        trajectory.logprobs += [0.0] * len(ids)
        trajectory.versions += [-1] * len(ids)
        trajectory.observed.append((start, start + len(ids)))
        trajectory.turns += 1
        assert trajectory.messages is not None, "only trajectories with an environment observe"
        trajectory.messages += messages

    def forget_observation(self) -> None:
        """Drop an observation that nothing was sampled behind: it would be dead weight."""
        trajectory = self.trajectory
        if trajectory.observed and trajectory.observed[-1][1] == len(trajectory.token_ids):
            start, _ = trajectory.observed.pop()
            del trajectory.token_ids[start:], trajectory.logprobs[start:]
            del trajectory.versions[start:]


@dataclass(slots=True, eq=False)
class Open:
    """A group under way. ``running`` counts its trajectories that have not ended."""

    group: Group
    task: TaskView
    sampling: Sampling
    rollouts: list[Rollout] = field(default_factory=list)
    running: int = 0
    grading: bool = False
    limit: float | None = None
    """Seconds its grading may take per call, where a trajectory's own limit is the shorter."""

    def end(self, rollout: Rollout, reason: TerminationReason) -> bool:
        """Mark a trajectory as ended; whether it was the group's last."""
        rollout.trajectory.reason = reason
        rollout.stage = Stage.ENDED
        rollout.trajectory.seconds = rollout.spent
        rollout.forget_observation()
        self.running -= 1
        return self.running == 0
