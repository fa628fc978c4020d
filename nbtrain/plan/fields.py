"""One option: its type, bounds, default and promises, and how a given value is checked."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nbtrain.errors import Problem, Where
from nbtrain.plan.registry import BaseModelInfo

Type = Literal["integer", "number", "boolean", "text"]
Mode = Literal["training", "evaluation"]
Group = Literal[
    "optimization", "filters", "trajectories", "sampling", "validation", "adapter", "run",
    "budgets", "document", "model", "data", "loss", "engine", "execution", "smoke",
]  # fmt: skip
Hashed = Literal["always", "never", "with staleness"]
Compute = Callable[[Mapping[str, Any], "BaseModelInfo | None"], Any]

_NEEDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "text": "text",
}
NO_BOUND = 10**12
"""A bound from here on only keeps numbers within what the store can hold."""
_NO_WORDS = {"no", "off", "n", "false", ""}
_YES_WORDS = {"yes", "on", "y", "true"}


@dataclass(frozen=True, slots=True)
class Option:
    """One run option: everything that forms, completion, validation, listing and hash need.

    ``compute`` gives the default from the options before it in the table and the base model;
    ``computed`` says how in words. An option without ``compute`` has the fixed ``default``.
    ``nullable`` means that null is a value of its own; elsewhere null leaves the option out, where
    there is something to compute or to inherit.
    ``hashed`` says whether the value is part of the config hash: it is where it changes the
    trained weights.
    """

    name: str
    type: Type
    help: str
    group: Group
    default: Any = None
    compute: Compute | None = None
    computed: str = ""
    note: str | None = None
    """Shown in the resolved plan beside every computed value."""
    min: int | float | None = None
    max: int | float | None = None
    above_min: bool = False
    """``min`` itself is refused too."""
    below_max: bool = False
    """``max`` itself is refused too."""
    within_context: bool = False
    """The upper bound is the base model's context, where that is lower than ``max``."""
    choices: tuple[str, ...] | None = None
    choices_of: Callable[[BaseModelInfo], tuple[str, ...]] | None = None
    """Which of the choices a base model has, where that depends on it."""
    later_choices: tuple[str, ...] = ()
    """Choices that are known by name and refused as not built yet."""
    nullable: bool = False
    zero_default: bool = False
    """A stated 0 asks for the default."""
    modes: tuple[Mode, ...] = ("training",)
    evaluation_default: str = ""
    """How an evaluation computes the default, where that differs from training."""
    hashed: Hashed = "always"
    inherited: bool = True
    """Taken over from a parent checkpoint's plan when not stated."""
    origin: Literal["seed", "extension"] = "seed"
    complaint: Callable[[Any], str | None] | None = None
    """A rule beyond type and bounds: returns what is allowed when the value breaks it."""
    hint: str | None = None

    def upper(self, model: BaseModelInfo | None) -> int | float | None:
        """The upper bound for a base model, or the general one for ``None``."""
        if self.within_context and model is not None:
            return model.max_context if self.max is None else min(self.max, model.max_context)
        return self.max

    def offered(self, model: BaseModelInfo | None) -> tuple[str, ...] | None:
        """The choices with a base model, or all for ``None``; ``None`` where any text goes."""
        return self.choices if self.choices_of is None or model is None else self.choices_of(model)

    def allowed(self, model: BaseModelInfo | None = None, *, technical: bool = False) -> str:
        """What may be stated, in words: ``1 to 100,000``, ``gspo or grpo``, ``true or false``.

        An upper bound that is only ``technical`` is left out unless asked for.
        """
        choices = self.offered(model)
        if choices is not None:
            text = " or ".join(choices)
        elif self.min is not None or self.max is not None:
            high = self.upper(model)
            told = technical or self.min is None or high is None or high < NO_BOUND
            high = high if told else None
            text = span(self.min, high, above=self.above_min, below=self.below_max)
        else:
            text = _NEEDS[self.type]
        if self.zero_default and self.default != 0:
            text += " (0 is the default)"
        if not self.nullable and not self.compute:
            return text
        return f"{text}, or null" if text else "null"


def span(low: float | None, high: float | None, *, above: bool = False, below: bool = False) -> str:
    """A range in words; ``above`` leaves ``low`` itself out, ``below`` leaves out ``high``."""
    if below and low is not None:
        return f"{'above' if above else 'at least'} {show(low)}, below {show(high)}"
    if low is None:
        return f"at most {show(high)}"
    if above:
        return f"above {show(low)}" + ("" if high is None else f", at most {show(high)}")
    if high is None:
        return f"at least {show(low)}"
    return f"{show(low)} to {show(high)}"


def show(value: Any) -> str:
    """A value as a person writes it in a plan: ``null``, ``true``, ``1,024``, ``1e-4``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) <= NO_BOUND else "a whole number of many digits"
    if isinstance(value, float):
        return re.sub(r"e([-+])0(\d)", r"e\1\2", repr(value)).replace(".0e", "e")
    return str(value)


def counted(number: float, what: str) -> str:
    """A whole number and its noun, in the plural where it must be: ``1 row``, ``1,024 replies``."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,.0f} {f'{what[:-1]}ies' if what.endswith('y') else f'{what}s'}"


def describe(value: object) -> str:
    """What was found, in a few words that fit a sentence."""
    if value is None:
        return "null"
    value = as_python(value)
    if isinstance(value, bool | int | float):
        return show(value)
    if isinstance(value, str):
        return f'the text "{brief(value)}"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, set | frozenset):
        return "a set"
    return f"an object of type {type(value).__name__}"


def brief(text: str, most: int = 60) -> str:
    """``text`` on one line that can be printed, cut to ``most`` characters."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def spelt(key: object) -> str:
    """The key of a mapping as refusals show it."""
    return brief(key, 80) if isinstance(key, str) else describe(key)


def halved(text: str) -> bool:
    """Whether a text holds half a character, which nothing could store."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def plain(value: object) -> object:
    """``value`` if programs can carry it around in a refusal, else a description of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return describe(value)


def as_python(value: Any) -> Any:
    """A Python scalar for a NumPy or tensor scalar of a notebook; anything else as it is."""
    try:
        scalar = hasattr(value, "item") and hasattr(value, "dtype") and value.ndim == 0
        return value.item() if scalar else value
    except Exception:  # an object that is odd enough is no scalar
        return value


def check(
    option: Option, value: Any, *, model: BaseModelInfo | None = None, where: Where | None = None
) -> tuple[Any, Problem | None]:
    """The value as the plan keeps it, or the problem with it (then the value is ``None``).

    Strict: booleans are booleans, whole numbers are whole (``8.0`` is 8; ``8.5``, ``true`` and
    ``"8"`` are refused), numbers are finite. Null passes where the option takes it.
    """
    value, too_high = as_python(value), False

    def refuse(message: str, hint: str | None) -> tuple[None, Problem]:
        allowed = option.allowed(model, technical=too_high)
        text = f"{option.name} {message}"
        return None, Problem(option.name, text, plain(value), allowed, where, hint)

    if value is None:
        if option.nullable or option.compute:
            return None, None
        out = f"Leave it out for the default, {show(option.default)}"
        hint = option.hint if option.default is None else out
        return refuse(f"needs {_NEEDS[option.type]}, found null", hint)
    typed, fits = _typed(option.type, value)
    if not fits:
        needed = f"needs {_NEEDS[option.type]}, found {describe(value)}"
        return refuse(needed, option.hint or _type_hint(option.type, value))
    if option.type == "text" and halved(typed):
        return refuse("holds half a character", None)
    choices = option.offered(model)
    if choices is not None and typed not in choices:
        if typed in option.later_choices:
            return refuse(f"{typed} is not built yet", None)
        whose = f" with {model.slug}" if model is not None and option.choices_of else ""
        return refuse(f"has no choice {brief(str(typed))!r}{whose}", _choice_hint(typed, choices))
    high = option.upper(model)
    low = option.min is not None and (
        typed <= option.min if option.above_min else typed < option.min
    )
    too_high = high is not None and (typed > high or (option.below_max and typed == high))
    if low or too_high:
        bound = ", more than the base model's context" if high != option.max and not low else ""
        return refuse(f"is out of bounds: found {describe(value)}{bound}", option.hint)
    if option.complaint and (broken := option.complaint(typed)):
        return refuse(f"{broken}, found {describe(value)}", option.hint)
    return float(typed) if option.type == "number" else typed, None


def _typed(kind: Type, value: Any) -> tuple[Any, bool]:
    if kind == "boolean":
        return value, isinstance(value, bool)
    if kind == "text":
        return value, isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None, False
    if isinstance(value, float):
        if not math.isfinite(value):
            return None, False
        if kind == "integer":
            return int(value), value.is_integer()
    # whole numbers stay as they are until the bounds are checked: float() of a huge one overflows
    return value, True


def _type_hint(kind: Type, value: Any) -> str | None:
    if isinstance(value, str):
        word = value.strip()
        if kind == "boolean":
            if word.lower() in _NO_WORDS | _YES_WORDS:
                meant = "true" if word.lower() in _YES_WORDS else "false"
                return f"Write {meant}, without quotes"
            return None
        if kind == "text":
            return None
        try:
            number = float(word.replace("_", ""))
        except ValueError:
            return None
        if not math.isfinite(number):
            return "Write a finite number"
        short = word.replace("_", "")
        return f"Write {short}, without quotes" + (" and underscores" if "_" in word else "")
    if kind == "boolean" and isinstance(value, int | float) and value in (0, 1):
        return f"Write {'true' if value else 'false'}"
    if kind == "text" and isinstance(value, bool | int | float):
        return "Put it in quotes"
    return None


def _choice_hint(word: Any, choices: tuple[str, ...]) -> str | None:
    low = brief(str(word)).strip().lower()
    same = [c for c in choices if c.lower() == low]
    if same:
        return f"Write {same[0]}"
    near = difflib.get_close_matches(low, {c.lower(): c for c in choices}, n=1)
    return f"Did you mean {next(c for c in choices if c.lower() == near[0])}?" if near else None
