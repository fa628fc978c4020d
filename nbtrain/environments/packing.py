"""Packing an environment, so that a class written in a notebook's cell runs in other processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from nbtrain.environments.contract import Contract, name_of, read_contract
from nbtrain.errors import Problem, Refused
from nbtrain.rewards import travel
from nbtrain.rewards.identity import content_identity

__all__ = ["Packed", "pack", "read_packed"]

_FIELD = "environment"


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed environment, read but not yet unpickled."""

    name: str
    contract: Contract | None
    parcel: travel.Parcel


def pack(environment: Any) -> tuple[bytes, dict[str, Any], Contract | None]:
    """The class or factory as bytes, its identity as strict JSON, and its contract.

    Only the identity is stable. The contract is ``None`` for a factory that does not say which
    class it returns. Raises :class:`~nbtrain.errors.Refused` with everything that is wrong.
    """
    contract, problems = read_contract(environment)
    if problems:
        raise Refused(problems)
    name = name_of(environment)
    about = {"name": name, "contract": contract.to_json() if contract else None}
    data = travel.make_parcel(_FIELD, {f"environment {name!r}": environment}, about)
    try:
        identity = {"name": name, **content_identity(environment)}
    except (TypeError, RecursionError) as error:
        message = f"environment {name!r} uses a value that has no stable identity: {error}"
        raise Refused([Problem(_FIELD, message, hint="Make it inside a method")]) from error
    return data, identity, contract


def read_packed(path: str | os.PathLike[str]) -> Packed:
    """Read a packed environment without running anything of it.

    Raises :class:`~nbtrain.errors.Refused` when the file is not one, or belongs to someone else.
    """
    parcel = travel.read_parcel(path, _FIELD)
    try:
        about = parcel.about["contract"]
        contract = None if about is None else Contract.from_json(about)
        return Packed(str(parcel.about["name"]), contract, parcel)
    except (ValueError, KeyError, TypeError) as error:
        raise travel.not_ours(_FIELD, path) from error
