"""One environment from its construction to its end. Runs in its process, on user code."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import pickle
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from nbtrain.environments.contract import Contract, read_contract
from nbtrain.rewards.scoring import describe

__all__ = ["Episode", "EpisodeError", "plain"]

_STATE_LIMIT = 1 << 20
"""Bytes of one attribute that a reward may read; a larger one is left out, and the log says so."""

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
        return text

    def act(self, reply: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Its messages to a reply, and whether it is done."""
        if self.contract.form == "step":
            said = str(reply.get("content") or "")
            return self._read_step(self._guarded("step", self._environment.step, said))
        calls = reply.get("tool_calls") or []
        return [self._call(call) for call in calls], not calls

    def finish(self) -> dict[str, Any]:
        """Its public plain state, the reward among it."""
        state = self._public_state()
        own = getattr(self._environment, "get_reward", None)
        if callable(own):
            state["reward"] = _plain_or_none(self._guarded("get_reward", own))
        elif "reward" not in state and self._rewards:
            state["reward"] = math.fsum(self._rewards)
        return state

    def close(self) -> None:
        """Let it go; what it raises is only logged."""
        close = getattr(self._environment, "close", None)
        try:
            if callable(close):
                self._guarded("close", close)
        except EpisodeError as error:
            print(error, file=sys.stderr)
        self._environment = None
        with contextlib.suppress(Exception):
            self._runner.close()

    def _guarded(self, what: str, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return self._awaited(function(*arguments, **named))
        except BaseException as error:  # SystemExit too: raising never ends the process
            msg = f"environment {self._name!r} raised in {what}: {describe(error)}"
            raise EpisodeError(msg) from None

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
            return str(self._awaited(method(**arguments)))
        except BaseException as error:  # the model reads it and goes on, as in TRL
            print(f"tool {name!r} raised {describe(error)}", file=sys.stderr)
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
                self._refuse(f"{answer[-1]!r:.60} for done")
            if len(answer) == 3 and answer[1] is not None:
                reward = _plain_or_none(answer[1])
                if not isinstance(reward, (int, float)):
                    self._refuse(f"{answer[1]!r:.60} for the reward")
                self._rewards.append(float(reward))
        messages = self._messages(observation)
        return messages, done or not messages

    def _messages(self, observation: Any) -> list[dict[str, Any]]:
        if observation is None:
            return []
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
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
        ):
            self._refuse(f"the message {message!r:.80}")
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
        state = {}
        for name in dir(self._environment):
            if name.startswith("_"):
                continue
            try:
                value = getattr(self._environment, name)
            except Exception as error:
                print(f"attribute {name!r} raised {describe(error)}", file=sys.stderr)
                continue
            if callable(value):
                continue
            with contextlib.suppress(TypeError, RecursionError):
                read = plain(value)
                if len(pickle.dumps(read)) > _STATE_LIMIT:
                    print(f"attribute {name!r} is too large for rewards", file=sys.stderr)
                else:
                    state[name] = read
        return state


def plain(value: Any) -> Any:
    """Numbers, text, booleans, None, and lists and dicts of them, as Python's own types.

    Tuples become lists, NumPy's scalars numbers. Raises ``TypeError`` for anything else.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item())
    msg = f"a {type(value).__name__} is no plain data"
    raise TypeError(msg)


def _plain_or_none(value: Any) -> Any:
    try:
        return plain(value)
    except (TypeError, RecursionError):
        return None


def _key(key: Any) -> Any:
    found = plain(key)
    if isinstance(found, (dict, list)):
        msg = "a key is no plain value"
        raise TypeError(msg)
    return found


def _told(error: str) -> str:
    """An error as the model reads it."""
    return str({"error": error})
