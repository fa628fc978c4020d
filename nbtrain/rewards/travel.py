"""How what a person wrote in a notebook travels to the processes that run it.

A parcel is one line of JSON (what it says of itself; the notebook's folder and ``sys.path``; the
text of its cells, for tracebacks) and then the things, by cloudpickle. Functions and classes of
the notebook and of local modules travel by value, so a later edit of a file does not change what
was registered; what is installed is imported where it arrives.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.errors import Problem, Refused, first_line
from nbtrain.rewards.source import is_local, referenced

__all__ = ["Parcel", "make_parcel", "open_parcel", "read_parcel", "restore"]

_FORMAT = 1
_SIZE_LIMIT = 256 << 20
_SOURCE_LIMIT = 200_000
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Parcel:
    """A parcel, read but not yet unpickled. ``about`` is what its maker said of it."""

    field: str
    about: dict[str, Any]
    sys_path: tuple[str, ...]
    cwd: str
    python: str
    sources: dict[str, str]
    content: bytes


def make_parcel(field: str, things: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """The values of ``things`` as bytes, with ``about`` (JSON) readable without unpickling.

    The keys name the things in refusals: ``reward 'exact'``. The bytes are not stable: equal
    things may make other bytes. Raises :class:`~nbtrain.errors.Refused` for ``field``, naming
    every variable that cannot travel.
    """
    values = list(things.values())
    try:
        content = _dump_by_value(values)
    except Exception as error:
        raise Refused(_problems(field, things, error)) from error
    if len(content) > _SIZE_LIMIT:
        raise Refused([_too_big(field, things, len(content))])
    header = {
        "format": _FORMAT,
        **about,
        "sys_path": [path or str(Path.cwd()) for path in sys.path],
        "cwd": str(Path.cwd()),
        "python": _python(),
        "sources": _sources(values),
    }
    return json.dumps(header).encode() + b"\n" + content


def read_parcel(path: str | os.PathLike[str], field: str) -> Parcel:
    """Read a parcel without running anything in it.

    Raises :class:`~nbtrain.errors.Refused` when the file is not one, or belongs to someone else.
    """
    file = Path(path)
    if file.stat().st_uid not in (os.geteuid(), 0):
        message = f"{field}: {file} belongs to another user and is not loaded"
        raise Refused([Problem(field, message, found=str(file))])
    head, _, content = file.read_bytes().partition(b"\n")
    try:
        about = json.loads(head)
        if about.pop("format") != _FORMAT:
            raise KeyError(_FORMAT)
        paths, cwd = tuple(about.pop("sys_path")), about.pop("cwd")
        python, sources = about.pop("python"), about.pop("sources")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_ours(field, file) from error
    return Parcel(field, about, paths, cwd, python, sources, content)


def not_ours(field: str, file: object) -> Refused:
    """The refusal of a file that is no parcel of this kind."""
    message = f"{file} does not hold packed {field} that this version can read"
    return Refused([Problem(field, message, found=str(file))])


def restore(parcel: Parcel) -> None:
    """Give this process the notebook's ``sys.path``, folder and cell texts."""
    # The notebook's order first, so that names mean what they meant there.
    own = [path for path in sys.path if path not in parcel.sys_path]
    sys.path[:] = [*parcel.sys_path, *own]
    with contextlib.suppress(OSError):  # the folder may be gone; then stay where we are
        os.chdir(parcel.cwd)
    for name, text in parcel.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def open_parcel(parcel: Parcel) -> list[Any]:
    """The things, in their order. Runs user code; only ever called where that code belongs.

    Raises ``RuntimeError`` when they were packed by another Python version, and whatever the
    import of their modules raises.
    """
    if parcel.python != _python():
        msg = (
            f"{parcel.field}: packed by Python {parcel.python} and not to be loaded by "
            f"Python {_python()}; register the workload again"
        )
        raise RuntimeError(msg)
    things: list[Any] = pickle.loads(parcel.content)
    return things


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


# --- by value --------------------------------------------------------------------------------


def _dump_by_value(things: list[Any]) -> bytes:
    """Pickle with local modules by value; by reference only those that cannot be."""
    loaded = [(name, module) for name, module in list(sys.modules.items()) if is_local(module)]
    local = [module for name, module in loaded if module.__name__ == name]
    try:
        with _by_value(local):
            return _dumps(things)
    except Exception as by_value:
        # A module may hold a lock or a connection of its own. Its file is on the notebook's
        # path, so the worker can import it and gets its own.
        try:
            return _dumps(things)
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


def _sources(things: Sequence[Any]) -> dict[str, str]:
    """Texts that tracebacks show: those of cells exist here alone, those of files may change."""
    found: dict[str, str] = {}
    for function in _functions_within(things, _DEPTH):
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


def _problems(field: str, things: Mapping[str, Any], error: Exception) -> list[Problem]:
    problems = []
    for label, thing in things.items():
        failure = _failure(thing)
        if failure is None:
            continue
        what, value = _offender(thing, _DEPTH) or ("itself", thing)
        kind = type(value).__name__
        message = (
            f"{label} uses {what}, a {kind}, which cannot travel to a worker process "
            f"({first_line(failure)[:300]})"
        )
        hint = "Make or open it inside the function, or keep what it is made from: a path, a text"
        problems.append(Problem(field, message, found=what, hint=hint))
    if not problems:
        message = f"{field}: cannot travel to a worker process: {first_line(error)[:300]}"
        problems.append(Problem(field, message))
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
    elif isinstance(value, type):
        yield from _members_of_class(value)
    elif hasattr(value, "__dict__"):
        yield from (("attribute", key, item) for key, item in vars(value).items())


def _members_of_class(cls: type) -> Iterator[tuple[str, str, Any]]:
    if _imported(cls):
        return
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield "method", name, function
        elif not name.startswith("__"):
            yield "class attribute", name, value


def _too_big(field: str, things: Mapping[str, Any], size: int) -> Problem:
    sizes = {
        f"the {what} {name!r} of {label}": len(_dump_by_value([value]))
        for label, thing in things.items()
        for what, name, value in _members(thing)
    }
    biggest = max(sizes, key=lambda name: sizes[name], default="the code")
    return Problem(
        field,
        f"{field}: {size >> 20} MiB to pack, most of it {biggest}",
        found=size,
        allowed=f"at most {_SIZE_LIMIT >> 20} MiB",
        hint="Load it inside the function, from a file",
    )
