"""A scoring function of a bundle: its parameters told from its text, its code run by workers.

Whoever makes a plan or trains reads the text alone (:func:`stated_signature`). A reward worker
imports it (:meth:`BundleFunction.load`) as part of a package of its own, named by the bundle's
hash, so that modules of the same name from two bundles are two modules.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from nbtrain.rewards.forms import ALLOWED_FORMS, Form, Signature, classify, read_signature

__all__ = ["BundleFunction", "NoFunction", "stated_signature"]

_MOST_REEXPORTS = 8


class NoFunction(Exception):
    """A bundle's text has no such function; the message is a clause that says so."""

    def __init__(self, message: str, allowed: str | None = None) -> None:
        super().__init__(message)
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class BundleFunction:
    """A function in an unpacked bundle. Small, picklable, and imports nothing until loaded."""

    folder: str
    bundle_id: str
    module: str
    function: str
    form: Form

    def identity(self) -> dict[str, Any]:
        """Bundle, module and function, as plain JSON; not where it is unpacked."""
        return {
            "kind": "rule",
            "bundle": self.bundle_id,
            "module": self.module,
            "function": self.function,
        }

    def load(self) -> Any:
        """Import the module and return the function. Only ever called in a reward worker.

        Raises whatever the module's import raises, and ``TypeError`` when the function is not
        called as its text says.
        """
        # Bytecode would be one more file in the bundle, and an outdated one the next time.
        sys.dont_write_bytecode = True
        package = _package(Path(self.folder), self.bundle_id)
        try:
            module = importlib.import_module(f"{package}.{self.module}")
        except ModuleNotFoundError as error:
            if error.name and _file_of(Path(self.folder), error.name):
                error.add_note(f"siblings in a bundle are imported by 'from . import {error.name}'")
            raise
        function = getattr(module, self.function)
        signature = read_signature(function)
        if isinstance(signature, str) or signature.form is not self.form:
            found = signature if isinstance(signature, str) else f"is of the form {signature.form}"
            msg = (
                f"{self.module}.{self.function} {found}, while its definition reads as the form "
                f"{self.form}: does a decorator change its parameters?"
            )
            raise TypeError(msg)
        return function


def _package(folder: Path, bundle_id: str) -> str:
    """The name of the package that a bundle is in this process, made at the first call."""
    name = f"nbtrain_bundle_{bundle_id}"
    if name in sys.modules:
        return name
    start = folder / "__init__.py"
    if not start.is_file():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        return name
    spec = importlib.util.spec_from_file_location(
        name, start, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        msg = f"{start} cannot be imported"
        raise ImportError(msg)
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[name]
        raise
    return name


# --- read, not run ---------------------------------------------------------------------------


def stated_signature(folder: Path, module: str, function: str) -> Signature:
    """The signature that the text of an unpacked bundle states for a function.

    A function that a module takes over from a sibling (``from .scoring import compute_score``)
    is followed there. Raises :class:`NoFunction` with a clause on what is wrong.
    """
    for _ in range(_MOST_REEXPORTS):
        file = _file_of(folder, module)
        if file is None:
            msg = f"has no module {module!r}"
            raise NoFunction(msg)
        found = _definition(_parsed(file, module), module, function)
        if not isinstance(found, ast.ImportFrom):
            return _signature(found, f"{module}.{function}")
        module, function = _source_of(found, file, folder, module, function)
    msg = f"hands {function!r} from module to module without an end"
    raise NoFunction(msg)


def _file_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split(".")) if module else folder
    places = [base / "__init__.py", *([base.with_suffix(".py")] if module else [])]
    return next((place for place in places if place.is_file()), None)


def _parsed(file: Path, module: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=file.name)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        msg = f"has a module {module!r} that is no Python{line}: {text}"
        raise NoFunction(msg) from None


_Found = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ImportFrom


def _definition(tree: ast.Module, module: str, function: str) -> _Found:
    """What binds the name last; functions of the module's other branches count as well."""
    bound: dict[str, ast.stmt] = {}
    for statement in _statements(tree.body):
        bound |= dict.fromkeys(_bound(statement), statement)
    node = bound.get(function)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node
    if isinstance(node, ast.ImportFrom) and node.level:
        return node
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return node.value
    if node is None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        have = ", ".join(name for name, one in bound.items() if isinstance(one, kinds))
        msg = f"has no function {function!r} in its module {module!r}; functions there: "
        raise NoFunction(msg + (have or "none"))
    msg = (
        f"has a {function!r} in {module!r} whose parameters do not show without running it; "
        f"write 'def {function}(…)'"
    )
    raise NoFunction(msg)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, those in branches included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                for inner in getattr(node, part, []):
                    handler = isinstance(inner, ast.ExceptHandler)
                    yield from _statements(inner.body if handler else [inner])


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _source_of(
    node: ast.ImportFrom, file: Path, folder: Path, module: str, function: str
) -> tuple[str, str]:
    """Module and name that ``from …x import y as function`` means, within the bundle."""
    parts = module.split(".") if module else []
    here = parts if file.name == "__init__.py" else parts[:-1]
    up = node.level - 1
    if up > len(here):
        msg = f"has a module {module!r} that imports from above the bundle"
        raise NoFunction(msg)
    base = [*here[: len(here) - up], *(node.module.split(".") if node.module else [])]
    wanted = next(a.name for a in node.names if (a.asname or a.name) == function)
    if _file_of(folder, ".".join([*base, wanted])):
        msg = f"has a module, not a function, by the name {function!r} in {module!r}"
        raise NoFunction(msg)
    return ".".join(base), wanted


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, name: str) -> Signature:
    if not isinstance(node, ast.Lambda) and _yields(node):
        msg = f"has {name}, which is a generator; return the score instead of yielding it"
        raise NoFunction(msg)
    signature = classify(_parameters(node.args))
    if isinstance(signature, str):
        msg = f"has {name}, which {signature}"
        raise NoFunction(msg, ALLOWED_FORMS)
    return signature


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    before = [(a.arg, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    placed = before + [(a.arg, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    without = len(placed) - len(arguments.defaults)
    found = [
        Parameter(name, kind, default=Parameter.empty if number < without else None)
        for number, (name, kind) in enumerate(placed)
    ]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = Parameter.empty if default is None else None
        found.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return found


def _yields(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(inner)
    return False
