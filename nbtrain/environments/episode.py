"""One environment from its construction to its end. Runs in its process, on user code."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from nbtrain.environments.contract import Contract, read_contract
from nbtrain.environments.halves import half_in
from nbtrain.environments.plain import NotPlainError, TooLargeError, exact_text, measured, plain
from nbtrain.rewards.scoring import describe

__all__ = ["Episode", "EpisodeError", "log"]

_Answer = TypeVar("_Answer")

_STATE_LIMIT = 1 << 20
"""Bytes of all that rewards may read; the largest attributes go first, and the log says so."""

_STEP_RETURNS = "an observation, (observation, done) or (observation, reward, done)"


class EpisodeError(Exception):
    """The environment failed; the text is a sentence, then the traceback of the user's code."""


class Episode:
    """An environment made by ``factory``. Raises :class:`EpisodeError` when it cannot be made.

    ``contract`` is what is known of it already.
    """

    def __init__(self, name: str, factory: Any, contract: Contract | None = None) -> None:
        self._name = name
        self._known = contract
        self._runner = asyncio.Runner()
        self._rewards: list[float] = []
        self._environment = self._guarded("its construction", factory)

    @cached_property
    def contract(self) -> Contract:
        """The contract of what was made. Raises :class:`EpisodeError` for what is none."""
        if self._known is not None:
            return self._known
        contract, problems = read_contract(type(self._environment))
        wrong = [p for p in problems if "without arguments" not in p.message]  # it was made
        if wrong or contract is None:
            raise EpisodeError("; ".join(map(str, wrong)))
        return contract

    def reset(self, columns: Mapping[str, Any]) -> str | None:
        """Reset it with the columns that it names; the text to append to the prompt."""
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            msg = f"environment {self._name!r} has no method reset"
            raise EpisodeError(msg)
        parameters = inspect.signature(reset).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            names = {p.name for p in parameters}
            columns = {name: value for name, value in columns.items() if name in names}
        text = self._guarded("reset", reset, **columns)
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            msg = f"environment {self._name!r}: reset returned a {kind}; allowed: text or None"
            raise EpisodeError(msg)
        return None if text is None else self._whole("reset", exact_text(text))

    def act(self, reply: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Its messages to a reply, and whether it is done."""
        if self.contract.form == "step":
            said = str(reply.get("content") or "")
            return self._read_step(self._guarded("step", self._environment.step, said))
        calls = reply.get("tool_calls") or []
        return [self._call(call) for call in calls], not calls

    def finish(self) -> dict[str, Any]:
        """Its public plain state, the reward among it: None where it can be no number."""
        state = self._public_state()
        own = getattr(self._environment, "get_reward", None)
        if callable(own):
            state["reward"] = _plain_or_none(self._guarded("get_reward", own))
        elif "reward" not in state and self._rewards:
            state["reward"] = _total(self._rewards)
        return state

    def close(self) -> None:
        """Let it go; what it raises is only logged."""
        close = getattr(self._environment, "close", None)
        try:
            if callable(close):
                self._guarded("close", close)
        except EpisodeError as error:
            log(str(error))
        self._environment = None
        with contextlib.suppress(BaseException):
            self._runner.close()

    def _guarded(self, what: str, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return self._awaited(function(*arguments, **named))
        except BaseException as error:  # SystemExit too: raising never ends the process
            msg = f"environment {self._name!r} raised in {what}: {describe(error)}"
            raise EpisodeError(msg) from None

    def _whole(self, what: str, answer: _Answer) -> _Answer:
        """The answer, unless a text of it holds what no tokenizer takes."""
        if half := half_in(answer):
            msg = (
                f"environment {self._name!r}: {what} returned text with half a character, {half}; "
                "allowed: valid Unicode, such as text.encode('utf-8', 'replace').decode()"
            )
            raise EpisodeError(msg)
        return answer

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        return self._runner.run(wait())

    # --- tools

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or {}
        name = str(function.get("name") or "")
        return {"role": "tool", "name": name, "content": self._answer(call, name, function)}

    def _answer(self, call: Mapping[str, Any], name: str, function: Mapping[str, Any]) -> str:
        if call.get("error"):
            return _told(str(call["error"]))
        tools = [] if name.startswith("_") else [t.name for t in self.contract.tools]
        if name not in tools:
            return _told(f"there is no tool {name!r}; there are: {', '.join(tools)}")
        method, arguments = getattr(self._environment, name), function.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            return _told(f"{name}: the arguments are no object: {arguments!r:.80}")
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            return _told(f"{name}: {error}")
        try:
            return self._whole(name, exact_text(str(self._awaited(method(**arguments)))))
        except BaseException as error:  # the model reads it and goes on, as in TRL
            log(f"tool {name!r} raised {describe(error)}")
            return _told(f"{type(error).__name__}: {error}")

    # --- step

    def _read_step(self, answer: Any) -> tuple[list[dict[str, Any]], bool]:
        done: Any = False
        observation = answer
        if isinstance(answer, tuple):
            if len(answer) not in (2, 3):
                self._refuse(f"a tuple of {len(answer)}")
            observation, done = answer[0], answer[-1]
            done = _plain_or_none(done)
            if not isinstance(done, bool):
                self._refuse(f"{_shown(answer[-1])} for done")
            if len(answer) == 3 and answer[1] is not None:
                reward = _number(answer[1])
                if reward is None:
                    self._refuse(f"{_shown(answer[1])} for the reward")
                self._rewards.append(reward)
        messages = self._whole("step", self._messages(observation))
        return messages, done or not messages

    def _messages(self, observation: Any) -> list[dict[str, Any]]:
        if observation is None:
            return []
        if isinstance(observation, str):
            return [{"role": "user", "content": exact_text(observation)}]
        if isinstance(observation, Mapping):
            observation = [observation]
        if not isinstance(observation, Sequence):
            self._refuse(f"a {type(observation).__name__}")
        return [self._message(message) for message in observation]

    def _message(self, message: Any) -> dict[str, Any]:
        read = _plain_or_none(message)
        if (
            not isinstance(read, dict)
            or not isinstance(read.get("content"), str)
            or not isinstance(read.get("role"), str)
            or read["role"] == "assistant"
            or not all(isinstance(name, str) for name in read)
        ):
            self._refuse(f"the message {_shown(message)}")
        return read

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"environment {self._name!r}: step returned {what}; allowed: {_STEP_RETURNS}, where an "
            "observation is a text, a message with role (not assistant) and content, a list of "
            "messages, or None"
        )
        raise EpisodeError(msg)

    # --- state

    def _public_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for found in self._guarded("its attributes", dir, self._environment):
            name = exact_text(found) if isinstance(found, str) else "_"
            if name.startswith("_"):
                continue
            try:
                value = getattr(self._environment, name)
                if not callable(value):
                    state[name], sizes[name] = measured(value, _STATE_LIMIT)
                continue
            except NotPlainError:
                pass  # a lock, a client, a module: nothing that a reward should read
            except TooLargeError:
                log(f"attribute {name!r} is too large for rewards: over {_STATE_LIMIT} bytes")
            except BaseException as error:
                log(f"attribute {name!r} is left out; it raised {describe(error)}")
            if name == "reward":
                state[name], sizes[name] = None, 0
        self._cut(state, sizes)
        return state

    def _cut(self, state: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """Leave out the largest attributes until the others are within the limit together."""
        total = sum(sizes.values())
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if total <= _STATE_LIMIT:
                return
            log(
                f"attribute {name!r} of about {sizes[name]} bytes is left out: rewards may read "
                f"{_STATE_LIMIT} bytes of an environment in all, and it has {total}"
            )
            total -= sizes[name]
            del state[name]


def log(text: str) -> None:
    """Into the log, where user code has left a stream to it."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr)


def _plain_or_none(value: Any) -> Any:
    try:
        return plain(value)
    except BaseException as error:  # a hostile value raises wherever it is looked at
        log(f"a value cannot be used: {describe(error)}")
        return None


def _number(value: Any) -> float | None:
    """The reward of a step; NaN, which makes the trajectory ungraded, for one beyond floats."""
    found = _plain_or_none(value)
    if isinstance(found, (int, float)):
        return float(found)
    return math.nan if isinstance(value, numbers.Real) else None


def _total(rewards: Sequence[float]) -> float:
    try:
        return math.fsum(rewards)
    except (ValueError, OverflowError):  # infinities of both signs; a sum beyond floats
        return math.nan


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except BaseException:
        return f"a {type(value).__name__} that cannot be shown"


def _told(error: str) -> str:
    """An error as the model reads it."""
    return str({"error": error})
