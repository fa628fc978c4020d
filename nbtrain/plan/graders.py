"""Grader strings: what scores an evaluation's answers, and a reinforcement run's by default.

``json-label-match``; ``model:ID``, a registered model as judge; ``http:URL``, an evaluator of
one's own; ``bundle:REF#MODULE[:FUNCTION]``, a Python function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import brief, describe, halved

__all__ = ["DEFAULT_FUNCTION", "DEFAULT_GRADER", "GraderSpec", "parse_grader"]

DEFAULT_GRADER = "json-label-match"
DEFAULT_FUNCTION = "compute_score"
"""Of a bundle's module, where a grader or a reward term names none."""
_FORMS = "json-label-match, model:ID, http:URL or bundle:REF#MODULE[:FUNCTION]"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class GraderSpec:
    """A grader, parsed and not looked up.

    ``ref`` is the model's or the bundle's name or id, or the URL; ``module`` and ``function``
    are a bundle's.
    """

    kind: Literal["json-label-match", "model", "http", "bundle"]
    ref: str | None = None
    module: str | None = None
    function: str | None = None

    def __str__(self) -> str:
        if self.kind == "bundle":
            return f"bundle:{self.ref}#{self.module}:{self.function}"
        return self.kind if self.ref is None else f"{self.kind}:{self.ref}"

    def as_term(self) -> dict[str, Any]:
        """The reward term of weight 1 that scores in the same way."""
        match self.kind:
            case "bundle":
                return {
                    "kind": "rule",
                    "weight": 1.0,
                    "bundle": self.ref,
                    "module": self.module,
                    "function": self.function,
                }
            case "model":
                return {"kind": "judge", "weight": 1.0, "model": self.ref}
            case "http":
                return {"kind": "http", "weight": 1.0, "url": self.ref}
            case _:
                return {"kind": "json-label-match", "weight": 1.0}


def parse_grader(text: object, field: str = "grader") -> GraderSpec:
    """Parse a grader string. Raises :class:`~nbtrain.errors.Refused` for ``field``."""
    if not isinstance(text, str):
        raise _refused(field, text, f"is a {type(text).__name__}")
    if halved(text):
        raise _refused(field, text, "holds half a character")
    if text == "json-label-match":
        return GraderSpec("json-label-match")
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("model", "http", "bundle"):
        hint = f"Did you mean 'http:{text}'?" if kind == "https" else None
        raise _refused(field, text, "is no grader", hint)
    if rest != rest.strip() or not rest:
        raise _refused(field, text, f"names nothing behind '{kind}:'" if not rest else "has blanks")
    if kind == "model":
        return GraderSpec("model", rest)
    if kind == "bundle":
        return _bundle(field, text, rest)
    return _http(field, text, rest)


def _http(field: str, text: str, url: str) -> GraderSpec:
    if url.startswith("//"):
        raise _refused(
            field, text, "has no whole URL behind 'http:'", f"Did you mean 'http:{text}'?"
        )
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises for one that is none
    except ValueError:
        whole = False
    if not whole:
        raise _refused(field, text, "has no http or https URL behind 'http:'")
    return GraderSpec("http", url)


def _bundle(field: str, text: str, rest: str) -> GraderSpec:
    ref, mark, code = rest.partition("#")
    module, colon, function = code.partition(":")
    if not ref:
        raise _refused(field, text, "names no bundle between 'bundle:' and '#'")
    if not mark or not module:
        raise _refused(field, text, "names no module", f"Write 'bundle:{ref}#MODULE'")
    if not _MODULE.fullmatch(module):
        raise _refused(field, text, f"has a module {module!r} that cannot be one's name")
    if colon and not function.isidentifier():
        raise _refused(field, text, f"has a function {function!r} that cannot be one's name")
    return GraderSpec("bundle", ref, module, function or DEFAULT_FUNCTION)


def _refused(field: str, found: object, clause: str, hint: str | None = None) -> Refused:
    told = repr(brief(found)) if isinstance(found, str) else describe(found)
    message = f"{field}: {told} {clause}"
    return Refused([Problem(field, message, found=found, allowed=_FORMS, hint=hint)])
