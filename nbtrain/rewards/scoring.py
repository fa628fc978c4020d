"""Calling reward functions and judging what they return. Runs in the workers, on user code.

A *unit* is the smallest piece of work that is called, and retried, alone: one term on one
completion, or one term of TRL's form on the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import numbers
import re
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

from nbtrain.plan.fields import counted
from nbtrain.rewards.builtins import BuiltIn
from nbtrain.rewards.contract import GradeRequest, Outcome, RewardTerm
from nbtrain.rewards.forms import Form, faces

__all__ = ["ERROR_LIMIT", "Unit", "describe", "judge", "message_text", "reply_text", "score_units"]

ERROR_LIMIT = 20_000
"""Most characters of an error that are kept."""

_MESSAGE_SHARE = 4_000

# What calls user code; frames of it at the top of a traceback tell the user nothing.
_OURS = re.compile(
    r"nbtrain\.rewards\.(scoring|worker|bundle_code)$|nbtrain\.environments\.episode$"
    r"|(asyncio|importlib)(\.|$)"
)


class Unit(NamedTuple):
    """Term ``term`` on completion ``sample``; None stands for the whole group."""

    term: int
    sample: int | None


def score_units(
    terms: Sequence[RewardTerm], request: GradeRequest, units: Sequence[Unit], budget: float
) -> tuple[list[tuple[Unit, list[Outcome]]], list[Unit]]:
    """Score units in order; returns the outcomes and the units that were left.

    No unit is begun after ``budget`` seconds, so that many slow calls in one go are not mistaken
    for one that hangs. At least one is done. Samples of one async term run concurrently.
    """
    start = time.monotonic()
    done: list[tuple[Unit, list[Outcome]]] = []
    left = list(units)
    while left and (not done or time.monotonic() - start < budget):
        together = _next_together(terms, left)
        del left[: len(together)]
        done += zip(together, _score(terms[together[0].term], request, together), strict=True)
    return done, left


def _next_together(terms: Sequence[RewardTerm], units: Sequence[Unit]) -> list[Unit]:
    first = units[0]
    if not _is_async(terms[first.term].function):
        return [first]
    count = next((n for n, unit in enumerate(units) if unit.term != first.term), len(units))
    return list(units[:count])


def _is_async(function: Any) -> bool:
    return any(inspect.iscoroutinefunction(face) for face in faces(function))


def _score(term: RewardTerm, request: GradeRequest, units: Sequence[Unit]) -> list[list[Outcome]]:
    count = len(request.completions)
    if term.form is Form.GROUP:
        got = _called(term, [lambda: _call_group(term, request)])[0]
        return [[got] * count if isinstance(got, Outcome) else _judge_group(term, got.value, count)]
    calls = [_call_of_one(term, request, unit.sample or 0) for unit in units]
    answers = zip(_called(term, calls), units, strict=True)
    return [
        [
            got
            if isinstance(got, Outcome)
            else _reasoned(term, request, judge(term.name, got.value, unit.sample))
        ]
        for got, unit in answers
    ]


def _reasoned(term: RewardTerm, request: GradeRequest, outcome: Outcome) -> Outcome:
    """An outcome without a grade with the built-in reward's own reason, where it has one."""
    if outcome.kind != "missing" or not isinstance(term.function, BuiltIn):
        return outcome
    reason = term.function.why_ungraded(request.columns)
    return outcome if reason is None else replace(outcome, error=f"{outcome.error}: {reason}")


# --- calling ---------------------------------------------------------------------------------


class _Returned(NamedTuple):
    value: Any


def _called(term: RewardTerm, calls: Sequence[Callable[[], Any]]) -> list[_Returned | Outcome]:
    """What each call returned; what can be awaited is awaited, all of it together."""
    try:
        answers = [_guarded(term, call) for call in calls]
        if any(_waits(answer) for answer in answers):
            try:
                return asyncio.run(_all(term, answers))
            except BaseException as error:
                return [_raised(term, error)] * len(answers)
        return answers
    finally:
        # An alarm left running would strike in someone else's call.
        signal.setitimer(signal.ITIMER_REAL, 0)


def _guarded(term: RewardTerm, call: Callable[[], Any]) -> _Returned | Outcome:
    try:
        return _Returned(call())
    except BaseException as error:  # SystemExit too: user code never ends the worker by raising
        return _raised(term, error)


def _waits(answer: _Returned | Outcome) -> bool:
    return isinstance(answer, _Returned) and inspect.isawaitable(answer.value)


async def _all(
    term: RewardTerm, answers: Sequence[_Returned | Outcome]
) -> list[_Returned | Outcome]:
    async def one(answer: _Returned | Outcome) -> _Returned | Outcome:
        if isinstance(answer, Outcome) or not _waits(answer):
            return answer
        try:
            return _Returned(await answer.value)
        except Exception as error:
            return _raised(term, error)

    return await asyncio.gather(*map(one, answers))


def _call_group(term: RewardTerm, request: GradeRequest) -> Any:
    count = len(request.completions)
    _need(term, request)
    given: dict[str, Any] = {
        name: [copy.deepcopy(value) for _ in range(count)]
        for name, value in request.columns.items()
    }
    if request.raw:
        given["prompts"] = [message_text(request.prompt)] * count
        given["completions"] = [message_text(c) for c in request.completions]
    else:
        given["prompts"] = [_messages(request.prompt, "user") for _ in range(count)]
        given["completions"] = [_messages(c, "assistant") for c in request.completions]
    if request.environments is not None:
        given["environments"] = [EnvironmentState(state) for state in request.environments]
    if not term.signature.any_name:
        given = {name: value for name, value in given.items() if name in term.signature.names}
    return term.function(**given)


def _call_of_one(term: RewardTerm, request: GradeRequest, sample: int) -> Callable[[], Any]:
    text = reply_text(request.completions[sample])

    def call() -> Any:
        if term.form is Form.VERL:
            return term.function(**_verl_arguments(term, request, text))
        # A copy of its own: what a function changes in it must not reach the next completion.
        given: dict[str, Any] = {"completion": text}
        if "task" in term.signature.names:
            given["task"] = copy.deepcopy({**request.columns, "prompt": request.prompt})
        if "environment" in term.signature.names and request.environments is not None:
            given["environment"] = EnvironmentState(request.environments[sample])
        return term.function(**given)

    return call


def _verl_arguments(term: RewardTerm, request: GradeRequest, text: str) -> dict[str, Any]:
    _need(term, request)
    columns = request.columns
    truth = columns.get("ground_truth")
    if truth is None and isinstance(columns.get("reward_model"), Mapping):
        truth = columns["reward_model"].get("ground_truth")
    given = {
        "data_source": columns.get("data_source", ""),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": columns.get("extra_info", {}),
    }
    names = term.signature.names
    return {name: value for name, value in given.items() if name in names}


def _need(term: RewardTerm, request: GradeRequest) -> None:
    missing = term.signature.missing(request.columns)
    if missing:
        have = ", ".join(sorted(request.columns)) or "none"
        msg = f"the task has no column {', '.join(map(repr, missing))}; its columns: {have}"
        raise LookupError(msg)


def message_text(value: Any) -> str:
    """A completion or prompt as text: messages are joined by their contents."""
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content") or "") for message in value)


def reply_text(completion: Any) -> str:
    """A completion as one text: of several messages, the content of the last reply."""
    if isinstance(completion, str):
        return completion
    replies = [m.get("content") for m in completion if m.get("role") == "assistant"]
    return str(replies[-1] or "") if replies else ""


class EnvironmentState:
    """An environment as a reward sees it: the public plain attributes it ended with."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))

    def __getattr__(self, name: str) -> Any:
        have = ", ".join(sorted(vars(self))) or "none"
        msg = f"the environment ended without a public plain attribute {name!r}; it has: {have}"
        raise AttributeError(msg)


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [dict(message) for message in value]


# --- judging ---------------------------------------------------------------------------------


def _judge_group(term: RewardTerm, value: Any, count: int) -> list[Outcome]:
    name = term.name
    if hasattr(value, "tolist") and getattr(value, "shape", None) != ():
        value = _listed(value)  # NumPy arrays, tensors and Series
    wanted = counted(count, "completion")
    if not isinstance(value, (list, tuple)):
        text = f"reward {name!r} returned {_shown(value)} for {wanted}"
        expected = f"where a list of {counted(count, 'number')} is expected"
        return [Outcome("type", error=f"{text}, {expected}")] * count
    if len(value) != count:
        text = f"reward {name!r} returned {counted(len(value), 'value')} for {wanted}"
        return [Outcome("length", error=text)] * count
    return [judge(name, item, number) for number, item in enumerate(value)]


def _listed(value: Any) -> Any:
    try:
        return value.tolist()
    except Exception:
        return value


def judge(name: str, value: Any, sample: int | None = None) -> Outcome:
    """The outcome for one returned value; NumPy scalars, 0-d arrays and tensors become numbers."""
    place = "" if sample is None else f" for completion {sample + 1}"
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]  # verl's functions may return a dict with details
    if value is None:
        return Outcome("missing", error=f"reward {name!r} returned None{place}")
    number = _number(value)
    if number is None:
        text = f"reward {name!r} returned {_shown(value)}{place}"
        _close(value)
        return Outcome("type", error=f"{text}, where a number or None is expected")
    if not math.isfinite(number):
        text = f"reward {name!r} returned {number}{place}; a reward is a finite number or None"
        return Outcome("nonfinite", error=text)
    return Outcome("ok", number)


def _number(value: Any) -> float | None:
    if not isinstance(value, (numbers.Real, Decimal)):
        try:
            # NumPy scalars and one-element arrays, torch tensors; no text has item().
            value = value.item()
        except Exception:
            return None
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:
        return math.nan  # a signalling NaN


def _shown(value: Any) -> str:
    kind = type(value).__name__
    if inspect.iscoroutine(value):
        return "a coroutine that nothing awaited"
    if isinstance(value, (str, int, float, complex)):
        text = repr(value)
        return f"{kind} {text if len(text) <= 60 else text[:60] + '…'}"
    return f"a value of type {kind}"


def _close(value: Any) -> None:
    if inspect.iscoroutine(value):
        with contextlib.suppress(Exception):
            value.close()


# --- errors ----------------------------------------------------------------------------------


def _raised(term: RewardTerm, error: BaseException) -> Outcome:
    return Outcome("exception", error=f"reward {term.name!r} raised {describe(error)}")


def describe(error: BaseException) -> str:
    """One line with type and message, then the traceback from the user's own code on.

    Text only, at most :data:`ERROR_LIMIT` characters: exceptions of any size and kind survive.
    """
    try:
        told = traceback.TracebackException.from_exception(_without_ours(error))
        message = "".join(told.format_exception_only()).strip()
        text = "".join(told.format())
    except BaseException as trouble:
        message = text = f"{type(error).__name__} (not printable: {type(trouble).__name__})"
    first = (message.splitlines() or [type(error).__name__])[0][:500]
    room = ERROR_LIMIT - len(first) - 200
    if len(text) > room:
        cut = len(text) - room
        end = message[:_MESSAGE_SHARE]
        text = f"{text[: room - len(end)]}\n… {cut} characters left out …\n{end}"
    return f"{first}\n{text}"


def _without_ours(error: BaseException) -> BaseException:
    frame = error.__traceback__
    while frame is not None and _OURS.match(frame.tb_frame.f_globals.get("__name__") or ""):
        frame = frame.tb_next
    return error.with_traceback(frame or error.__traceback__)
