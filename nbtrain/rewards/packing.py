"""Packing rewards, so that a function written in a notebook's cell runs in a worker process.

The packed form is one line of JSON (names, weights and forms of the terms; the notebook's folder
and ``sys.path``; the text of its cells, for tracebacks) and then the functions, by cloudpickle.
Functions of the notebook and of local modules travel by value, so a later edit of a file does not
change a registered reward; what is installed is imported by the worker.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import linecache
import os
import pickle
import platform
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.errors import Problem, Refused
from nbtrain.rewards.contract import RewardTerm, TermInfo
from nbtrain.rewards.forms import Form
from nbtrain.rewards.identity import term_identity
from nbtrain.rewards.source import is_local, referenced

__all__ = ["Packed", "pack", "read_packed", "restore", "unpack"]

_FORMAT = 1
_SIZE_LIMIT = 256 << 20
_SOURCE_LIMIT = 200_000
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rewards, read but not yet unpickled."""

    terms: tuple[TermInfo, ...]
    sys_path: tuple[str, ...]
    cwd: str
    python: str
    sources: dict[str, str]
    functions: bytes


def pack(terms: Sequence[RewardTerm]) -> tuple[bytes, list[dict[str, Any]]]:
    """The terms as bytes for workers, and each term's identity as strict JSON.

    Only the identity is stable: the same rewards may pack to other bytes. Raises
    :class:`~nbtrain.errors.Refused` naming every variable that cannot travel.
    """
    functions = [term.function for term in terms]
    try:
        blob = _dump_by_value(functions)
    except Exception as error:
        raise Refused(_problems(terms, error)) from error
    if len(blob) > _SIZE_LIMIT:
        raise Refused([_too_big(terms, len(blob))])
    header = {
        "format": _FORMAT,
        "terms": [{"name": t.name, "weight": t.weight, "form": str(t.form)} for t in terms],
        "sys_path": [path or str(Path.cwd()) for path in sys.path],
        "cwd": str(Path.cwd()),
        "python": _python(),
        "sources": _sources(functions),
    }
    data = json.dumps(header).encode() + b"\n" + blob
    return data, _identities(terms)


def read_packed(path: str | os.PathLike[str]) -> Packed:
    """Read packed rewards without running anything of theirs.

    Raises :class:`~nbtrain.errors.Refused` when the file is not one, or belongs to someone else.
    """
    file = Path(path)
    if file.stat().st_uid not in (os.geteuid(), 0):
        message = f"the rewards in {file} belong to another user and are not loaded"
        raise Refused([Problem("rewards", message, found=str(file))])
    head, _, functions = file.read_bytes().partition(b"\n")
    try:
        header = json.loads(head)
        if header["format"] != _FORMAT:
            raise KeyError(header["format"])
        terms = [TermInfo(t["name"], t["weight"], Form(t["form"])) for t in header["terms"]]
        packed = Packed(
            tuple(terms),
            tuple(header["sys_path"]),
            header["cwd"],
            header["python"],
            header["sources"],
            functions,
        )
    except (ValueError, KeyError, TypeError) as error:
        message = f"{file} does not hold packed rewards that this version can read"
        raise Refused([Problem("rewards", message, found=str(file))]) from error
    return packed


def restore(packed: Packed) -> None:
    """Give this process the notebook's ``sys.path``, folder and cell texts."""
    # The notebook's order first, so that names mean what they meant there.
    own = [path for path in sys.path if path not in packed.sys_path]
    sys.path[:] = [*packed.sys_path, *own]
    with contextlib.suppress(OSError):  # the folder may be gone; then stay where we are
        os.chdir(packed.cwd)
    for name, text in packed.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def unpack(packed: Packed) -> list[Any]:
    """The terms' functions. Runs user code; only ever called in a worker.

    Raises ``RuntimeError`` when they were packed by another Python version, and whatever the
    import of their modules raises.
    """
    if packed.python != _python():
        msg = (
            f"the rewards were packed by Python {packed.python} and cannot be loaded by "
            f"Python {_python()}; register the workload again"
        )
        raise RuntimeError(msg)
    functions: list[Any] = pickle.loads(packed.functions)
    return functions


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


# --- by value --------------------------------------------------------------------------------


def _dump_by_value(functions: list[Any]) -> bytes:
    """Pickle with local modules by value; by reference only those that cannot be."""
    loaded = [(name, module) for name, module in list(sys.modules.items()) if is_local(module)]
    local = [module for name, module in loaded if module.__name__ == name]
    try:
        with _by_value(local):
            return _dumps(functions)
    except Exception as by_value:
        # A module may hold a lock or a connection of its own. Its file is on the notebook's
        # path, so the worker can import it and gets its own.
        try:
            return _dumps(functions)
        except Exception:
            raise by_value from None


@contextlib.contextmanager
def _by_value(modules: Sequence[types.ModuleType]) -> Iterator[None]:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in modules if module.__name__ not in before]
    try:
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for module in new:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _pickler()(buffer).dump(value)
    return buffer.getvalue()


@functools.cache
def _pickler() -> Any:
    """Our kind of cloudpickle's pickler, made when first needed: the import is not free."""
    import cloudpickle

    # cloudpickle would copy the content of a file that is open for reading, and forget the place
    # of code, which tracebacks need.
    table = cloudpickle.Pickler.dispatch_table
    files = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
    ours: dict[type, Callable[[Any], Any]] = dict.fromkeys(files, _refuse_file)
    ours[types.CodeType] = functools.partial(_code_with_place, table[types.CodeType])
    return type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": ChainMap(ours, table)})


def _code_with_place(reduce: Callable[[Any], Any], code: types.CodeType) -> Any:
    build, arguments = reduce(code)
    return build, tuple(code.co_filename if a == "<dynamic-code>" else a for a in arguments)


def _refuse_file(file: Any) -> Any:
    for name in ("stdout", "stderr", "stdin"):
        if file is getattr(sys, name, None):
            return getattr, (sys, name)
    msg = f"cannot pickle the open file {getattr(file, 'name', '')!r}"
    raise pickle.PicklingError(msg)


def _sources(functions: Sequence[Any]) -> dict[str, str]:
    """Texts that tracebacks show: those of cells exist here alone, those of files may change."""
    found: dict[str, str] = {}
    for function in _functions_within(functions, _DEPTH):
        name = function.__code__.co_filename
        if name not in found:
            text = "".join(linecache.getlines(name))
            if text and len(text) <= _SOURCE_LIMIT:
                found[name] = text
    return found


def _functions_within(values: Sequence[Any], depth: int) -> Iterator[types.FunctionType]:
    for value in values:
        for _, _, inner in _members(value) if depth else ():
            yield from _functions_within([inner], depth - 1)
        if isinstance(value, types.FunctionType) and not _imported(value):
            yield value


def _imported(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and module.__name__ != "__main__" and not is_local(module)


# --- refusals --------------------------------------------------------------------------------


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


def _problems(terms: Sequence[RewardTerm], error: Exception) -> list[Problem]:
    problems = []
    for term in terms:
        failure = _failure(term.function)
        if failure is None:
            continue
        what, value = _offender(term.function, _DEPTH) or ("itself", term.function)
        kind = type(value).__name__
        message = (
            f"reward {term.name!r} uses {what}, a {kind}, which cannot travel to a worker process "
            f"({_first_line(failure)})"
        )
        hint = "Make or open it inside the function, or keep what it is made from: a path, a text"
        problems.append(Problem("rewards", message, found=what, hint=hint))
    if not problems:
        message = f"the rewards cannot travel to a worker process: {_first_line(error)}"
        problems.append(Problem("rewards", message))
    return problems


def _failure(value: Any) -> Exception | None:
    try:
        _dump_by_value([value])
    except Exception as error:
        return error
    return None


def _offender(value: Any, depth: int) -> tuple[str, Any] | None:
    """The innermost thing that keeps ``value`` from being pickled, and where it stands."""
    for what, name, inner in _members(value):
        if _failure(inner) is None:
            continue
        here = f"the {what} {name!r}"
        deeper = _offender(inner, depth - 1) if depth > 1 else None
        return (f"{deeper[0]} of {here}", deeper[1]) if deeper else (here, inner)
    return None


def _members(value: Any) -> Iterator[tuple[str, str, Any]]:
    if hasattr(value, "func") and hasattr(value, "keywords"):
        value = value.func
    if isinstance(value, types.MethodType):
        yield "object", type(value.__self__).__name__, value.__self__
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield from referenced(value) if not _imported(value) else ()
    elif isinstance(value, dict):
        yield from (("entry", str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (("item", str(number), item) for number, item in enumerate(value))
    elif isinstance(value, types.ModuleType):
        if is_local(value):
            yield from (("global variable", key, item) for key, item in vars(value).items())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from (("attribute", key, item) for key, item in vars(value).items())


def _too_big(terms: Sequence[RewardTerm], size: int) -> Problem:
    sizes = {
        f"the {what} {name!r} of {term.name!r}": len(_dump_by_value([value]))
        for term in terms
        for what, name, value in _members(term.function)
    }
    biggest = max(sizes, key=lambda name: sizes[name], default="the functions")
    return Problem(
        "rewards",
        f"the rewards pack to {size >> 20} MiB, most of it {biggest}",
        found=size,
        allowed=f"at most {_SIZE_LIMIT >> 20} MiB",
        hint="Load it inside the function, from a file",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
