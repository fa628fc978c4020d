"""Reward terms from the plan: ``{"kind", "weight", "name", …}`` become functions for the workers.

The kinds are ``rule`` (a function of a bundle), ``json-label-match`` and the built-ins, each with
the parameters of the function of its name; ``column`` is the answer's column unless stated.
Nothing of a bundle is run here.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbtrain.errors import NotFound, Problem, Refused, StoreError
from nbtrain.plan.descriptor.misnamed import snake
from nbtrain.plan.graders import DEFAULT_FUNCTION
from nbtrain.rewards import builtins
from nbtrain.rewards.bundle_code import (
    BundleFunction,
    NoFunction,
    stated_signature,
)
from nbtrain.rewards.bundles import Bundle, BundleRegistry
from nbtrain.rewards.contract import RewardTerm, with_unique_names
from nbtrain.rewards.forms import Signature, read_signature
from nbtrain.rewards.labels import json_label_match
from nbtrain.rewards.packing import pack
from nbtrain.store import Store

__all__ = ["KINDS", "build_terms", "pack_terms", "parameters_of"]

_BUILT_INS: dict[str, Callable[..., Any]] = {
    "json-label-match": json_label_match,
    "exact": builtins.exact,
    "numeric": builtins.numeric,
    "regex": builtins.regex,
    "length": builtins.length,
    "format": builtins.format,
}
KINDS = ("rule", *_BUILT_INS)
"""The kinds of terms that can be built."""
_LATER = ("judge", "http")
_COMMON = ("kind", "weight", "name")
_RULE = {"bundle": True, "module": True, "function": False}
_ANSWER = "answer"
_NAME_LIMIT = 64


def parameters_of(kind: str) -> dict[str, bool]:
    """The parameters of a kind of term, in snake_case, and whether each has to be stated.

    Raises ``KeyError`` for a kind that is none of :data:`KINDS`.
    """
    if kind == "rule":
        return dict(_RULE)
    known = inspect.signature(_BUILT_INS[kind]).parameters.values()
    return {p.name: p.default is p.empty and p.name != "column" for p in known}


def build_terms(
    terms: Sequence[Mapping[str, Any]],
    bundles: Callable[[str], Bundle],
    field: str = "reward.terms",
) -> list[RewardTerm]:
    """The terms of a resolved plan's ``reward``, with the functions that workers will call.

    ``bundles`` returns the bundle of a reference, as :meth:`BundleRegistry.get` does. Parameters
    may be written in snake_case or camelCase, and null is left out. A term without a name is
    named by its kind; a rule by its module, and its function where that is another than
    ``compute_score``. Raises :class:`~nbtrain.errors.Refused` with everything that is wrong,
    each problem under ``reward.terms[0].bundle`` and the like.
    """
    problems: list[Problem] = []
    built = [
        _built(term, f"{field}[{number}]", bundles, problems) for number, term in enumerate(terms)
    ]
    if not terms:
        message = f"{field} is empty"
        problems.append(Problem(field, message, found=[], allowed="at least one term"))
    made = [term for term in built if term is not None]
    if not problems and all(term.weight == 0 for term in made):
        message = f"{field}: every weight is 0, so nothing could be learned"
        problems.append(Problem(field, message, allowed="at least one weight other than 0"))
    if problems:
        raise Refused(problems)
    return with_unique_names(made)


def pack_terms(terms: Sequence[Mapping[str, Any]], store: Store) -> bytes:
    """The terms packed for :class:`~nbtrain.rewards.RewardPool`; bundles come from the store.

    To be packed where they are used: paths of this home are in it. Raises as
    :func:`build_terms` does.
    """
    return pack(build_terms(terms, BundleRegistry(store).get))[0]


def _built(
    term: object, where: str, bundles: Callable[[str], Bundle], problems: list[Problem]
) -> RewardTerm | None:
    if not isinstance(term, Mapping):
        message = f"{where} is a {type(term).__name__}"
        problems.append(Problem(where, message, found=term, allowed="a mapping with a kind"))
        return None
    given = {snake(str(key)): value for key, value in term.items() if value is not None}
    before = len(problems)
    kind = _kind(given.get("kind"), where, problems)
    weight = _weight(given.get("weight", 1.0), where, problems)
    name = _name(given.get("name"), where, problems)
    if kind is None:
        return None
    parameters = {key: value for key, value in given.items() if key not in _COMMON}
    problems += _parameter_problems(kind, parameters, where)
    if len(problems) > before:
        return None
    if kind == "rule":
        found = _rule(parameters, where, bundles, problems)
    else:
        found = _built_in(kind, parameters, where, problems)
    if found is None:
        return None
    function, signature = found
    default = kind
    if isinstance(function, BundleFunction):
        default = function.module
        if function.function != DEFAULT_FUNCTION:
            default += f":{function.function}"
    return RewardTerm((name or default)[:_NAME_LIMIT], weight, function, signature)


def _kind(kind: object, where: str, problems: list[Problem]) -> str | None:
    if isinstance(kind, str) and kind in KINDS:
        return kind
    message = f"{where}.kind is {kind!r}" if kind is not None else f"{where} has no kind"
    hint = None
    if kind in _LATER:
        message = f"{where}.kind: {kind} terms are not built yet"
    elif isinstance(kind, str) and (near := difflib.get_close_matches(kind, KINDS, n=1)):
        hint = f"Did you mean {near[0]!r}?"
    allowed = ", ".join(KINDS)
    problems.append(Problem(f"{where}.kind", message, found=kind, allowed=allowed, hint=hint))
    return None


def _weight(weight: object, where: str, problems: list[Problem]) -> float:
    if (
        isinstance(weight, (int, float))
        and not isinstance(weight, bool)
        and abs(weight) < 1e100
        and math.isfinite(weight)
    ):
        return float(weight)
    message = f"{where}.weight is {weight!r}"
    problems.append(Problem(f"{where}.weight", message, found=weight, allowed="a finite number"))
    return 0.0


def _name(name: object, where: str, problems: list[Problem]) -> str | None:
    if name is None or (isinstance(name, str) and 0 < len(name) <= _NAME_LIMIT and name.strip()):
        return name
    message = f"{where}.name is {name!r}"
    allowed = f"text of 1 to {_NAME_LIMIT} characters"
    problems.append(Problem(f"{where}.name", message, found=name, allowed=allowed))
    return None


def _parameter_problems(kind: str, given: Mapping[str, Any], where: str) -> list[Problem]:
    known = parameters_of(kind)
    allowed = ", ".join([*_COMMON, *known])
    problems = []
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            message = f"{where}: a {kind} term has no {name!r}"
            hint = f"Did you mean {near[0]!r}?" if near else None
            problems.append(
                Problem(f"{where}.{name}", message, found=value, allowed=allowed, hint=hint)
            )
    return problems + [
        Problem(f"{where}.{name}", f"{where}: a {kind} term needs its {name!r}", allowed=allowed)
        for name, needed in known.items()
        if needed and name not in given
    ]


def _built_in(
    kind: str, parameters: Mapping[str, Any], where: str, problems: list[Problem]
) -> tuple[Any, Signature] | None:
    columns = {"column": _ANSWER} if "column" in parameters_of(kind) else {}
    try:
        function = _BUILT_INS[kind](**{**columns, **parameters})
    except Refused as refused:
        for problem in refused.problems:
            name = problem.field.rpartition(".")[2]
            message = f"{where}.{name} is {problem.found!r}"
            problems.append(
                Problem(f"{where}.{name}", message, problem.found, allowed=problem.allowed)
            )
        return None
    signature = read_signature(function)
    assert isinstance(signature, Signature), signature
    return function, signature


def _rule(
    parameters: Mapping[str, Any],
    where: str,
    bundles: Callable[[str], Bundle],
    problems: list[Problem],
) -> tuple[BundleFunction, Signature] | None:
    module, function = parameters["module"], parameters.get("function", DEFAULT_FUNCTION)
    for name, value in (("module", module), ("function", function)):
        if not isinstance(value, str):
            message = f"{where}.{name} is {value!r}"
            problems.append(Problem(f"{where}.{name}", message, found=value, allowed="a name"))
            return None
    try:
        bundle = bundles(parameters["bundle"])
        folder = bundle.unpacked()
    except (NotFound, StoreError) as error:
        ref = parameters["bundle"]
        problems.append(Problem(f"{where}.bundle", f"{where}.bundle: {error}", found=ref))
        return None
    if module not in bundle.modules:
        message = f"{where}.module: bundle {bundle.name or bundle.bundle_id[:12]} has no {module!r}"
        allowed = ", ".join(bundle.modules)
        problems.append(Problem(f"{where}.module", message, found=module, allowed=allowed))
        return None
    try:
        signature = stated_signature(folder, module, function)
    except NoFunction as error:
        message = f"{where}.function: bundle {bundle.name or bundle.bundle_id[:12]} {error}"
        problems.append(Problem(f"{where}.function", message, function, error.allowed))
        return None
    packed = BundleFunction(str(folder), bundle.bundle_id, module, function, signature.form)
    return packed, signature
