"""What an environment is: its two forms, its tools, and everything that can be wrong with it.

An environment is a class, or a factory without arguments, in one of two forms:

- **tools**, the shape of TRL's ``environment_factory``: ``reset(**columns) -> str | None``, whose
  text is appended to the last user message of the prompt, and public methods that the model may
  call. Every argument of a tool has a type hint and a line under ``Args:`` in the docstring. What
  a tool returns is told to the model as text; what it raises is told as an error, and the model
  goes on. A reply without a tool call ends the trajectory.
- **step**: ``reset`` as above and ``step(reply: str)``, which gets the text of each reply and
  returns an observation, ``(observation, done)`` or ``(observation, reward, done)``. An
  observation is a text (a user message), a message or a list of messages; ``None`` ends the
  trajectory, as ``done`` does. Rewards of steps add up.

Any method may be ``async``. ``reset`` gets those of the task's columns, and its ``prompt``, that
it names, or all with ``**columns``. Two more methods without arguments may be there and are no
tools: ``get_reward`` and ``close``, called when the trajectory has ended. The environment's reward
is what ``get_reward`` returns, else its attribute ``reward``, else the sum of its steps' rewards.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nbtrain.environments.halves import half_in
from nbtrain.environments.hints import ALLOWED_HINTS, hint_from_json, hint_to_json
from nbtrain.errors import Problem

__all__ = ["Contract", "Tool", "check_columns", "name_of", "read_contract"]

_LIFE = ("reset", "step", "get_reward", "close")
_PARAMETER = inspect.Parameter
_BY_NAME = (_PARAMETER.POSITIONAL_OR_KEYWORD, _PARAMETER.KEYWORD_ONLY)
_DESCRIBED = re.compile(r"^[ \t]*(\w+)(?:[ \t]*\([^()\n]*\))?:", re.MULTILINE)
_ARGUMENTS = re.compile(r"^[ \t]*Args:[ \t]*\n(.*?)(?=^[ \t]*(?:Returns|Raises):|\Z)", re.M | re.S)
_HINT_PRIVATE = "A method that is no tool starts with an underscore"


@dataclass(frozen=True, slots=True)
class Tool:
    """A method that the model may call: what it is called, its docstring and its parameters.

    ``parameters`` are ``(name, type hint as JSON, whether it must be given)``.
    """

    name: str
    doc: str
    parameters: tuple[tuple[str, Any, bool], ...]

    def as_function(self) -> Callable[..., None]:
        """A function that does nothing, with the name, docstring and signature of the tool."""

        def tool(**_: Any) -> None:
            pass

        tool.__name__ = self.name
        tool.__doc__ = self.doc
        hints = {name: hint_from_json(hint) for name, hint, _ in self.parameters}
        tool.__annotations__ = hints
        empty = _PARAMETER.empty
        tool.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                _PARAMETER(
                    name,
                    _PARAMETER.KEYWORD_ONLY,
                    annotation=hints[name],
                    default=empty if required else None,
                )
                for name, _, required in self.parameters
            ]
        )
        return tool


@dataclass(frozen=True, slots=True)
class Contract:
    """How an environment is talked to. ``needs`` are columns that ``reset`` cannot do without."""

    form: Literal["tools", "step"]
    tools: tuple[Tool, ...] = ()
    needs: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON mapping from which :meth:`from_json` makes an equal one."""
        tools = [{"name": t.name, "doc": t.doc, "parameters": t.parameters} for t in self.tools]
        return {"form": self.form, "tools": tools, "needs": self.needs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """The contract that :meth:`to_json` wrote."""
        tools = [
            Tool(t["name"], t["doc"], tuple((n, h, r) for n, h, r in t["parameters"]))
            for t in data["tools"]
        ]
        return cls(data["form"], tuple(tools), tuple(data["needs"]))


def name_of(environment: Any) -> str:
    """The environment's name: of its class or factory."""
    environment = getattr(environment, "func", environment)
    name = getattr(environment, "__name__", None) or type(environment).__name__
    return str(name).strip("<>")[:64]


def read_contract(environment: Any) -> tuple[Contract | None, list[Problem]]:
    """The environment's contract and everything that is wrong with it; it is never constructed.

    Without problems the contract is ``None`` for a factory that does not say which class it
    returns: what it makes shows where it runs.
    """
    name = name_of(environment)
    if not callable(environment):
        message = f"environment is {environment!r:.80}"
        hint = "Pass the class itself, not an object of it"
        return None, [_problem(message, environment, "a class or a factory", hint)]
    problems = _construction_problems(name, environment)
    cls = environment if inspect.isclass(environment) else _returned(environment)
    if cls is None:
        return None, problems
    contract, more = _read_class(name, cls)
    if contract is not None and (half := half_in(contract.to_json())):
        message = f"environment: {name} describes its tools with half a character, {half}"
        return None, [*problems, *more, _problem(message, half, "valid Unicode")]
    return contract, [*problems, *more]


def check_columns(contract: Contract | None, columns: Sequence[str]) -> list[Problem]:
    """Problems between what ``reset`` needs and the tasks' columns."""
    missing = set(contract.needs if contract else ()) - {"prompt", *columns}
    return [
        _problem(
            f"environment: reset needs the column {name!r}, which the tasks do not have",
            name,
            ", ".join(columns) or "the tasks have no columns besides their prompt",
        )
        for name in sorted(missing)
    ]


def _construction_problems(name: str, environment: Any) -> list[Problem]:
    try:
        parameters = inspect.signature(environment).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if not needed:
        return []
    message = f"environment {name!r} cannot be made without arguments: {', '.join(needed)}"
    hint = "Give them defaults, or pass a function that makes it"
    return [_problem(message, needed, "a class or factory without required arguments", hint)]


_VARIADIC = (_PARAMETER.VAR_POSITIONAL, _PARAMETER.VAR_KEYWORD)


def _returned(factory: Any) -> type | None:
    try:
        found = typing.get_type_hints(factory).get("return")
    except Exception:  # a name in a hint may mean nothing here
        return None
    return found if isinstance(found, type) and found is not type(None) else None


def _read_class(name: str, cls: type) -> tuple[Contract | None, list[Problem]]:
    # Functions of the class: a property must not run here.
    methods = dict(inspect.getmembers(cls, inspect.isfunction))
    tools = {n: f for n, f in methods.items() if n not in _LIFE and not n.startswith("_")}
    problems = _life_problems(name, methods)
    if "step" in methods and tools:
        message = f"environment {name!r} has step and other public methods: {', '.join(tools)}"
        allowed = "either step, or methods that are tools"
        problems.append(_problem(message, sorted(tools), allowed, _HINT_PRIVATE))
    elif "step" not in methods and not tools:
        message = f"environment {name!r} has neither step nor a public method that is a tool"
        problems.append(_problem(message, None, "step(reply), or documented methods"))
    elif "step" not in methods:
        for tool, function in tools.items():
            problems += _tool_problems(f"{name}.{tool}", function)
    if problems:
        return None, problems
    needs = tuple(_required(methods["reset"]))
    if "step" in methods:
        return Contract("step", (), needs), []
    return Contract("tools", tuple(_tool(n, f) for n, f in tools.items()), needs), []


def _life_problems(name: str, methods: Mapping[str, Any]) -> list[Problem]:
    problems = []
    if "reset" not in methods:
        message = f"environment {name!r} has no method reset"
        problems.append(_problem(message, None, "reset(self, **columns), returning text or None"))
    elif any(p.kind is p.POSITIONAL_ONLY for p in _parameters(methods["reset"])):
        message = f"environment {name!r}: reset takes arguments by position only"
        problems.append(_problem(message, None, "columns by name"))
    if "step" in methods:
        taken = _parameters(methods["step"])
        needed = _required(methods["step"])
        by_place = (_PARAMETER.POSITIONAL_ONLY, _PARAMETER.POSITIONAL_OR_KEYWORD)
        if not taken or taken[0].kind not in by_place or set(needed) - {taken[0].name}:
            message = f"environment {name!r}: step takes ({', '.join(map(str, taken))})"
            problems.append(_problem(message, needed, "step(self, reply)"))
    for life in ("get_reward", "close"):
        needed = _required(methods[life]) if life in methods else []
        if needed:
            message = f"environment {name!r}: {life} takes ({', '.join(needed)})"
            allowed = f"{life}(self): it is called at the end, and is no tool"
            problems.append(_problem(message, needed, allowed))
    for method, function in methods.items():
        if method in _LIFE and (
            inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        ):
            message = f"environment {name!r}: {method} is a generator"
            problems.append(_problem(message, method, "return instead of yield"))
    return problems


def _tool_problems(name: str, function: Any) -> list[Problem]:
    found = []
    doc = inspect.getdoc(function) or ""
    if not doc.strip():
        found.append(_problem(f"tool {name} has no docstring", None, hint=_HINT_PRIVATE))
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        found.append(_problem(f"tool {name} is a generator", None, "return instead of yield"))
    hints = _hints(function)
    described = _described(doc)
    for parameter in _parameters(function):
        called = f"tool {name}: the argument {parameter.name!r}"
        if parameter.kind not in _BY_NAME:
            message = f"{called} is not given by its name"
            found.append(_problem(message, str(parameter), "arguments named one by one"))
            continue
        if parameter.name not in hints:
            message = f"{called} has no type hint"
            found.append(_problem(message, parameter.name, ALLOWED_HINTS))
        else:
            try:
                hint_to_json(hints[parameter.name])
            except TypeError as error:
                found.append(_problem(f"{called}: {error}", parameter.name, ALLOWED_HINTS))
        if doc.strip() and parameter.name not in described:
            hint = f"Add a line '{parameter.name}: …' under 'Args:'"
            found.append(_problem(f"{called} is not in the docstring", parameter.name, hint=hint))
    return found


def _tool(name: str, function: Any) -> Tool:
    hints = _hints(function)
    parameters = [
        (p.name, hint_to_json(hints[p.name]), p.default is p.empty) for p in _parameters(function)
    ]
    return Tool(name, inspect.getdoc(function) or "", tuple(parameters))


def _described(doc: str) -> set[str]:
    found = _ARGUMENTS.search(doc)
    return set(_DESCRIBED.findall(found.group(1))) if found else set()


def _hints(function: Any) -> dict[str, Any]:
    """Type hints as objects; those written as text that cannot be read are left out."""
    # Names that only hints use do not travel with a function; most of them are typing's.
    names = {**vars(typing), **getattr(function, "__globals__", {})}
    found = {}
    for name, hint in inspect.get_annotations(function).items():
        try:
            found[name] = eval(hint, names) if isinstance(hint, str) else hint
        except Exception:
            continue
    return found


def _parameters(function: Any) -> list[inspect.Parameter]:
    """All parameters but ``self``; a static method has none to leave out."""
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if found and found[0].name == "self" else found


def _required(function: Any) -> list[str]:
    return [p.name for p in _parameters(function) if p.default is p.empty and p.kind in _BY_NAME]


def _problem(
    message: str, found: object = None, allowed: str | None = None, hint: str | None = None
) -> Problem:
    return Problem("environment", message, found=found, allowed=allowed, hint=hint)
