"""Packing rewards, so that a function written in a notebook's cell runs in a worker process.

The parcel (:mod:`nbtrain.rewards.travel`) says names, weights and forms of the terms, and holds
their functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.errors import Problem, Refused
from nbtrain.rewards import travel
from nbtrain.rewards.contract import RewardTerm, TermInfo
from nbtrain.rewards.forms import Form
from nbtrain.rewards.identity import term_identity

__all__ = ["Packed", "pack", "read_packed"]

_FIELD = "rewards"


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rewards, read but not yet unpickled."""

    terms: tuple[TermInfo, ...]
    parcel: travel.Parcel


def pack(terms: Sequence[RewardTerm]) -> tuple[bytes, list[dict[str, Any]]]:
    """The terms as bytes for workers, and each term's identity as strict JSON.

    Only the identity is stable: the same rewards may pack to other bytes. Raises
    :class:`~nbtrain.errors.Refused` naming every variable that cannot travel.
    """
    about = [{"name": t.name, "weight": t.weight, "form": str(t.form)} for t in terms]
    functions = {f"reward {term.name!r}": term.function for term in terms}
    return travel.make_parcel(_FIELD, functions, {"terms": about}), _identities(terms)


def read_packed(path: str | os.PathLike[str]) -> Packed:
    """Read packed rewards without running anything of theirs.

    Raises :class:`~nbtrain.errors.Refused` when the file is not one, or belongs to someone else.
    """
    parcel = travel.read_parcel(path, _FIELD)
    try:
        terms = [TermInfo(t["name"], t["weight"], Form(t["form"])) for t in parcel.about["terms"]]
    except (ValueError, KeyError, TypeError) as error:
        raise travel.not_ours(_FIELD, path) from error
    return Packed(tuple(terms), parcel)


def _identities(terms: Sequence[RewardTerm]) -> list[dict[str, Any]]:
    identities, problems = [], []
    for term in terms:
        try:
            identities.append(term_identity(term))
        except (TypeError, RecursionError) as error:
            message = f"reward {term.name!r} uses a value that has no stable identity: {error}"
            problems.append(Problem("rewards", message, hint="Make it inside the function"))
    if problems:
        raise Refused(problems)
    return identities
