"""The terms of a descriptor's reward: their kinds, their parameters, and how they are read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nbtrain.errors import NotFound, Problem, Refused, Where
from nbtrain.plan.defaults import pattern
from nbtrain.plan.descriptor.document import REWARD, Document
from nbtrain.plan.descriptor.misnamed import snake
from nbtrain.plan.fields import Option, brief, check, describe, plain, spelt
from nbtrain.plan.graders import DEFAULT_FUNCTION, DEFAULT_GRADER, GraderSpec, parse_grader
from nbtrain.plan.references import look
from nbtrain.plan.registry import BundleInfo, DatasetInfo, Registry
from nbtrain.plan.source import BROKEN, SourcedList, SourcedMapping
from nbtrain.plan.statements import Statement

__all__ = ["LATER", "STRICT", "TERMS", "Reward", "read_reward", "reward_before"]


def _named(value: str) -> str | None:
    return None if value.strip() and len(value) <= 64 else "is text of 1 to 64 characters"


WEIGHT = Option(
    "weight", "number", "Factor of the term's score in the sum.", "run", 1.0, min=-1e9, max=1e9
)
NAME = Option("name", "text", "What the term is called; by default its kind or module.", "run",
              nullable=True, complaint=_named)  # fmt: skip
_COLUMN = Option("column", "text", "Column of the task that holds the answer.", "run", "answer")


def _regex(text: str) -> Option:
    return Option("pattern", "text", text, "run", complaint=pattern)


TERMS: dict[str, tuple[Option, ...]] = {
    "rule": (
        Option("bundle", "text", "The registered bundle, by name or id.", "run"),
        Option("module", "text", "Module of the bundle.", "run"),
        Option("function", "text", "Function of the module.", "run", DEFAULT_FUNCTION),
    ),
    "json-label-match": (_COLUMN,),
    "exact": (_COLUMN,),
    "numeric": (
        _COLUMN,
        Option("tolerance", "number", "How far the number may be off.", "run", 0.0, min=0),
    ),
    "regex": (_regex("Found anywhere in the completion."),),
    "format": (_regex("Matches the whole stripped completion."),),
    "length": (
        Option("maxChars", "integer", "Characters of the completion at most.", "run", min=0,
               max=10**9),
    ),
}  # fmt: skip
"""Parameters of each kind of term. One with the default ``None`` must be stated."""
LATER = ("judge", "http")
"""Kinds that are refused by name, with whatever else stands in the term."""
STRICT = ("rule", "json-label-match", "exact", "numeric")
"""Kinds that a model which knows nothing yet scores zero on."""
OF_GRADER = "the run's grader"
_ADDED = ("answer", "ground_truth", "data_source")  # columns that every task has


@dataclass(slots=True)
class Reward:
    """The terms as ``config.reward`` hashes them and as the job takes them, and where from."""

    hashed: list[dict[str, Any]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)
    origin: str = "stated"


@dataclass(frozen=True, slots=True)
class _Reader:
    found: Document
    registry: Registry
    dataset: DatasetInfo | None

    def refuse(self, name: str, message: str, found: object = None, allowed: str | None = None,
               where: Where | None = None, hint: str | None = None) -> None:  # fmt: skip
        text = f"{name} {message}"
        self.found.refuse(Problem(name, text, plain(found), allowed, where, hint))

    def term(self, value: object, name: str, where: Where | None) -> dict[str, Any] | None:
        """A term with its parameters as the document spells them, or ``None``."""
        if value is BROKEN:
            self.found.bad.add(name)
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, f"needs a mapping, found {describe(value)}", value, "a mapping",
                        where, "Write {kind: exact, column: answer}")  # fmt: skip
            return None
        kind, kinds = value.get("kind"), " or ".join((*TERMS, *LATER))
        at = _at(value, "kind") or where
        if isinstance(kind, str) and kind in LATER:
            self.refuse(f"{name}.kind", f"{kind} is not built yet", kind, where=at)
            return None
        if not isinstance(kind, str) or kind not in TERMS:
            if kind is not BROKEN:
                what = "is missing" if "kind" not in value else f"has no choice {describe(kind)}"
                near = difflib.get_close_matches(spelt(kind).lower(), TERMS, n=1)
                hint = f"Did you mean {near[0]}?" if near else None
                self.refuse(f"{name}.kind", what, kind, kinds, at, hint)
            return None
        options = (WEIGHT, *TERMS[kind], NAME)
        self.unknown(value, name, kind, options, where)
        read: dict[str, Any] = {}
        for option in options:
            read[option.name] = self.parameter(value, option, name, where, read)
        if self.found.bad & {f"{name}.{option.name}" for option in options}:
            return None
        return {"kind": kind} | read

    def parameter(
        self,
        term: Mapping[str, Any],
        option: Option,
        name: str,
        where: Where | None,
        before: Mapping[str, Any],
    ) -> Any:
        """The value of a parameter; ``before`` are those that the table has before it."""
        called, other = f"{name}.{option.name}", snake(option.name)
        if other != option.name and option.name in term and other in term:
            message = f"is stated twice, as {option.name} and as {other}"
            self.refuse(called, message, where=_key(term, other) or where, hint="State it once")
            return None
        key = option.name if option.name in term else other
        value, at = term.get(key), _at(term, key) or where
        if value is BROKEN:
            self.found.bad.add(called)
            return None
        if value is None and (option.default is not None or option.nullable):
            return option.default
        if value is None:
            if called not in self.found.bad:
                bundle: BundleInfo | None = before.get("bundle")
                allowed = bundle.modules if bundle is not None and option.name == "module" else ()
                text = " or ".join(allowed) or None
                self.refuse(called, "is missing", None, text, where, option.help)
            return None
        if option.name == "bundle":
            return self.bundle(called, Statement(value, at))
        typed, problem = check(replace(option, name=called), value, where=at)
        if problem is not None:
            self.found.refuse(problem)
        elif option.name == "column" and self.dataset is not None:
            self.column(called, typed, at)
        return typed

    def unknown(
        self,
        term: Mapping[str, Any],
        name: str,
        kind: str,
        options: tuple[Option, ...],
        around: Where | None,
    ) -> None:
        names = ["kind", *(option.name for option in options)]
        for key in term:
            if key not in (*names, *map(snake, names)):
                where, shown = _key(term, key) or around, spelt(key)
                near = difflib.get_close_matches(shown, names, n=1)
                message = f"there is no parameter {name}.{shown} of kind {kind}"
                hint = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(names[1:])}"
                self.found.refuse(
                    Problem(f"{name}.{shown}", message, shown, where=where, hint=hint)
                )
                if near:
                    self.found.bad.add(f"{name}.{near[0]}")

    def column(self, called: str, column: str, where: Where | None) -> None:
        known = {*_ADDED, *(self.dataset.columns if self.dataset is not None else ())}
        if column not in known:
            near = difflib.get_close_matches(column, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else None
            message = f"{column} is no column of the dataset"
            self.refuse(called, message, column, " or ".join(sorted(known)), where, hint)

    def bundle(self, called: str, statement: Statement) -> BundleInfo | None:
        found: BundleInfo | None = look(self.found, called, self.registry.bundle, statement)
        return found

    def finish(
        self, term: dict[str, Any], name: str, where: Where | None, function: str
    ) -> dict[str, Any]:
        """The term with a bundle's module and function checked and its id in the bundle's place.

        ``name`` is what refusals call the module, ``function`` what they call the function.
        """
        bundle: BundleInfo | None = term.get("bundle")
        if bundle is None:
            return term
        if term["module"] not in bundle.modules:
            near = difflib.get_close_matches(term["module"], bundle.modules, n=1)
            hint = f"Did you mean {near[0]}?" if near else None
            message = f"{brief(term['module'])} is no module of bundle {_whose(bundle)}"
            allowed = " or ".join(bundle.modules) or None
            self.refuse(name, message, term["module"], allowed, where, hint)
        else:
            self.scores(bundle, term, function, where)
        return term | {"bundle": bundle.bundle_id}

    def scores(
        self, bundle: BundleInfo, term: Mapping[str, Any], name: str, where: Where | None
    ) -> None:
        """Refuse a function that is not there, or that no reward is called like."""
        try:
            lacking = bundle.lacking(term["module"], term["function"])
        except NotFound as error:
            self.refuse(name, f"cannot be read: {error}", term["function"], None, where)
            return
        if lacking is not None:
            clause, allowed = lacking
            message = f"{brief(term['function'])}: bundle {_whose(bundle)} {clause}"
            self.refuse(name, message, term["function"], allowed, where)


def _whose(bundle: BundleInfo) -> str:
    return bundle.name or bundle.bundle_id[:12]


def reward_before(resolved: Mapping[str, Any]) -> Reward | None:
    """The reward of a resolved plan; ``None`` where it has none."""
    reward, config = resolved.get("reward"), resolved.get("config") or {}
    if not reward or not config.get("reward"):
        return None
    return Reward(config["reward"]["terms"], reward["terms"], reward.get("origin", "stated"))


def read_reward(
    found: Document,
    registry: Registry,
    dataset: DatasetInfo | None,
    workload_grader: str | None,
    before: Reward | None = None,
) -> Reward:
    """The reward of a reinforcement run: the stated one, else a grader's, else json-label-match.

    A run that goes on takes over the reward ``before``, unless it states one, or another grader
    where the grader was the reward.
    A grader that only an evaluation could use is refused by name, since it would have to score.
    """
    reader = _Reader(found, registry, dataset)
    stated = found.options.get(REWARD)
    if stated is not None and stated.value is not None:
        return _finished(_terms(reader, stated), "stated")
    if "reward" in found.bad:
        return Reward()
    grader = found.options.get("grader")
    graded = grader is not None and isinstance(grader.value, str)
    if before is not None and not (graded and before.origin == OF_GRADER):
        return _inherited(reader, before)
    if grader is not None and isinstance(grader.value, str):
        return _of_grader(reader, grader, "grader", OF_GRADER)
    if workload_grader is not None:
        return _of_grader(reader, Statement(workload_grader), "reward", "the workload's grader")
    return _finished([parse_grader(DEFAULT_GRADER).as_term()], "default")


def _inherited(reader: _Reader, before: Reward) -> Reward:
    """The reward of a parent, if this dataset and the bundles that there are allow it."""
    for index, term in enumerate(before.hashed):
        name = f"reward.terms[{index}]"
        if "column" in term:
            reader.column(f"{name}.column", term["column"], None)
        if "bundle" in term:
            reader.bundle(f"{name}.bundle", Statement(term["bundle"]))
    return Reward(before.hashed, before.terms, "inherited")


def grader_with_id(
    found: Document, registry: Registry, statement: Statement, name: str
) -> str | None:
    """The grader string as it is recorded, a bundle by its id; ``None`` where it is refused."""
    read = parse_grader(statement.value)
    if read.kind != "bundle":
        return str(read)
    term = _rule(_Reader(found, registry, None), read, name, statement.where)
    return None if term is None else f"bundle:{term['bundle']}#{read.module}:{read.function}"


def _terms(reader: _Reader, stated: Statement) -> list[dict[str, Any]]:
    reward = stated.value
    if not isinstance(reward, Mapping):
        reader.refuse("reward", f"needs a mapping, found {describe(reward)}", reward, "a mapping",
                      stated.where, "Write {terms: [{kind: exact, column: answer}]}")  # fmt: skip
        return []
    for key in reward:
        if key != "terms":
            where, shown = _key(reward, key) or stated.where, spelt(key)
            message = f"there is no field config.reward.{shown}"
            hint = "Did you mean terms?"
            reader.found.refuse(
                Problem(f"config.reward.{shown}", message, shown, None, where, hint)
            )
    terms, where = reward.get("terms"), _at(reward, "terms") or stated.where
    if terms is BROKEN or ("terms" not in reward and len(reward)):
        return []
    if not isinstance(terms, list | tuple) or not terms:
        what = "an empty list" if isinstance(terms, list | tuple) else describe(terms)
        reader.refuse("reward.terms", f"needs a list of terms, found {what}", terms, None, where)
        return []
    read = []
    for index, value in enumerate(terms):
        at = terms.where_item(index) if isinstance(terms, SourcedList) else None
        name = f"reward.terms[{index}]"
        term = reader.term(value, name, at or where)
        if term is not None:
            place = _at(value, "function") or _at(value, "module") or at or where
            read.append(reader.finish(term, f"{name}.module", place, f"{name}.function"))
    if len(read) == len(terms) and all(term["weight"] == 0 for term in read):
        message = "has no weight other than 0: nothing could be learned"
        reader.refuse("reward.terms", message, where=where)
    return read


def _at(mapping: object, key: str) -> Where | None:
    return mapping.where_value(key) if isinstance(mapping, SourcedMapping) else None


def _key(mapping: object, key: str) -> Where | None:
    return mapping.where_key(key) if isinstance(mapping, SourcedMapping) else None


def _of_grader(reader: _Reader, statement: Statement, name: str, whose: str) -> Reward:
    if "grader" in reader.found.bad:  # refused as that already
        return Reward()
    try:
        read = parse_grader(statement.value, name)
    except Refused:  # refused as a grader already
        return Reward()
    if read.kind in ("model", "http"):
        what = "a judge" if read.kind == "model" else "an http endpoint"
        message = f"{statement.value} would be this run's reward, and {what} as one is not built"
        hint = "State config.reward; the grader then only serves evaluations"
        reader.refuse(name, f"{message} yet", statement.value, where=statement.where, hint=hint)
        return Reward()
    if read.kind == "json-label-match":
        return _finished([read.as_term()], whose)
    term = _rule(reader, read, name, statement.where)
    return _finished([term] if term is not None else [], whose)


def _rule(
    reader: _Reader, read: GraderSpec, name: str, where: Where | None
) -> dict[str, Any] | None:
    bundle = reader.bundle(name, Statement(read.ref, where))
    if bundle is None:
        return None
    term = {"kind": "rule", "weight": 1.0, "bundle": bundle, "module": read.module,
            "function": read.function}  # fmt: skip
    return reader.finish(term, name, where, name)


def _finished(terms: list[dict[str, Any]], origin: str) -> Reward:
    terms = [_whole(term) for term in terms]
    names = [term["name"] or _called(term) for term in terms]
    for_job = []
    for index, term in enumerate(terms):
        earlier = names[:index].count(names[index])
        name = f"{names[index]}-{earlier + 1}" if earlier else names[index]
        for_job.append({snake(key): value for key, value in term.items()} | {"name": name})
    # a name changes nothing that is trained
    hashed = [{key: value for key, value in term.items() if key != "name"} for term in terms]
    return Reward(hashed, for_job, origin)


def _whole(term: dict[str, Any]) -> dict[str, Any]:
    """The term with the parameters that a grader leaves unsaid."""
    unsaid = {option.name: option.default for option in (WEIGHT, *TERMS[term["kind"]], NAME)}
    return unsaid | term


def _called(term: Mapping[str, Any]) -> str:
    if term["kind"] != "rule":
        return str(term["kind"])
    usual = term["function"] == DEFAULT_FUNCTION
    return str(term["module"]) if usual else f"{term['module']}:{term['function']}"
