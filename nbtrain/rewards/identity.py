"""The identity of a reward: equal for the same recipe, whatever cell, kernel or layout it is in.

A function is its normalised source (no comments, no layout) plus the values it can see: defaults,
closed-over variables, and the globals its code names. What is imported from installed packages
counts by its name; local modules and functions count by their content.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import struct
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from nbtrain.rewards.contract import RewardTerm
from nbtrain.rewards.source import (
    by_content,
    class_source,
    function_source,
    is_local,
    module_source,
    name_of,
    referenced,
    shown_source,
)

__all__ = ["content_identity", "term_identity"]

_SELF_TOLD = {f"nbtrain.rewards.{name}" for name in ("builtins", "bundle_code", "labels")}


def term_identity(term: RewardTerm) -> dict[str, Any]:
    """Name, kind and weight of a term, with a built-in's parameters or a function's hashes.

    Strict JSON, equal for equal recipes. Raises ``TypeError`` naming a value that has no stable
    content.
    """
    base = {"name": term.name, "weight": term.weight}
    if type(term.function).__module__ in _SELF_TOLD:
        parameters: dict[str, Any] = term.function.identity()
        return base | parameters
    own = content_identity(term.function)
    return base | {"kind": "function", "form": str(term.form), **own}


def content_identity(thing: Any) -> dict[str, str]:
    """Hashes of a function's, object's or class's ``source`` and of the ``values`` it can see.

    Raises ``TypeError`` naming a value that has no stable content.
    """
    source = hashlib.sha256(shown_source(thing).encode()).hexdigest()
    return {"source": source, "values": _Digest().of(thing).hex()}


class _Digest:
    """A digest of a value's content; the same in every process, cycles included."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []  # so that no id is used twice while we look

    def of(self, value: Any) -> bytes:
        """SHA-256 over type and content."""
        simple = _simple(value)
        if simple is not None:
            return _hash(simple)
        if id(value) in self._known:
            return self._known[id(value)]
        if id(value) in self._open:
            return _hash(b"again", str(self._open[id(value)]).encode())
        self._open[id(value)] = len(self._open)
        self._kept.append(value)
        try:
            self._known[id(value)] = _hash(*self._parts(value))
        finally:
            del self._open[id(value)]
        return self._known[id(value)]

    def _parts(self, value: Any) -> list[bytes]:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return [type(value).__name__.encode(), *map(self.of, value)]
        if type(value) in (set, frozenset):
            return [b"set", *sorted(map(self.of, value))]
        if type(value) in (dict, types.MappingProxyType):
            return [b"dict", *self._pairs(value.items())]
        for kind, parts in self._kinds().items():
            if isinstance(value, kind):
                return parts(value)
        return self._reduced(value)

    def _kinds(self) -> dict[type, Callable[[Any], list[bytes]]]:
        return {
            types.FunctionType: self._function,
            types.MethodType: lambda m: [b"method", self.of(m.__func__), self.of(m.__self__)],
            types.ModuleType: self._module,
            type: self._class,
            functools.partial: lambda p: [b"partial", *map(self.of, (p.func, p.args, p.keywords))],
            staticmethod: lambda f: [b"static", self.of(f.__func__)],
            classmethod: lambda f: [b"class method", self.of(f.__func__)],
            property: lambda p: [b"property", *map(self.of, (p.fget, p.fset, p.fdel))],
        }

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> list[bytes]:
        return sorted(self.of(key) + self.of(item) for key, item in pairs)

    def _function(self, function: types.FunctionType) -> list[bytes]:
        if not by_content(function):
            return _named(function)
        seen = [
            _hash(what.encode(), name.encode(), self.of(value))
            for what, name, value in referenced(function)
        ]
        wrapped = getattr(function, "__wrapped__", None)
        return [b"function", function_source(function).encode(), self.of(wrapped), *seen]

    def _class(self, cls: type) -> list[bytes]:
        if not by_content(cls):
            return _named(cls)
        own = {
            name: value
            for name, value in vars(cls).items()
            if name not in _CLASS_NOISE and not isinstance(value, _DESCRIPTORS)
        }
        bases = map(self.of, cls.__bases__)
        return [b"class", class_source(cls).encode(), *bases, *self._pairs(own.items())]

    def _module(self, module: types.ModuleType) -> list[bytes]:
        if not is_local(module):
            return [b"module", module.__name__.encode()]
        # Its own text, and the local modules it imports; its other values follow from these.
        inner = [
            v for v in vars(module).values() if isinstance(v, types.ModuleType) and is_local(v)
        ]
        names = {getattr(v, "__module__", None) for v in vars(module).values() if callable(v)}
        modules = [sys.modules.get(str(name)) for name in names - {module.__name__}]
        inner += [found for found in modules if found is not None and is_local(found)]
        return [b"local module", module_source(module).encode(), *sorted(map(self.of, inner))]

    def _reduced(self, value: Any) -> list[bytes]:
        """Any other object by what pickle would rebuild it from."""
        reduce = _reducer(type(value))
        try:
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception as error:
            msg = f"a {type(value).__name__} has no stable content: {error}"
            raise TypeError(msg) from error
        if isinstance(reduced, str):
            module = getattr(value, "__module__", None)
            return [b"name", str(module).encode(), reduced.encode()]
        build, arguments, *rest = reduced
        state, items, pairs = (*rest, None, None, None)[:3]
        return [
            b"object",
            self.of(type(value)),
            self.of(build),
            self.of(arguments),
            self.of(state),
            *map(self.of, items or ()),
            *self._pairs(pairs or ()),
        ]


_CLASS_NOISE = {
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__",
    "__static_attributes__", "__annotations__", "__slots__", "_abc_impl", "__abstractmethods__",
    "__parameters__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
}  # fmt: skip
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def _reducer(kind: type) -> Callable[[Any], Any] | None:
    import cloudpickle

    found: Callable[[Any], Any] | None = cloudpickle.Pickler.dispatch_table.get(kind)
    return found


def _named(thing: Any) -> list[bytes]:
    return [b"named", *(part.encode() for part in name_of(thing))]


def _simple(value: object) -> bytes | None:
    if value is None or value is Ellipsis or value is NotImplemented or isinstance(value, bool):
        return repr(value).encode()
    if type(value) is int:
        return b"int" + value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True)
    if type(value) is float:
        return b"float" + struct.pack(">d", value)
    if type(value) is str:
        return b"str" + value.encode("utf-8", "surrogatepass")
    if type(value) in (bytes, bytearray):
        return b"bytes" + bytes(value)  # type: ignore[call-overload, no-any-return]
    if isinstance(value, types.BuiltinFunctionType) and value.__self__ in (None, builtins):
        return b"builtin" + value.__name__.encode()
    return None


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack(">Q", len(part)))
        digest.update(part)
    return digest.digest()
