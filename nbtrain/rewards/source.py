"""What belongs to a function: its source, the values it can see, what of it is the user's own."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "by_content",
    "class_source",
    "function_source",
    "global_names",
    "is_local",
    "module_source",
    "name_of",
    "referenced",
    "shown_source",
]

_PACKAGE = __name__.partition(".")[0]


# --- what is local ---------------------------------------------------------------------------


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {str(Path(folder).resolve()) for folder in found}
    return tuple(folder.rstrip("/") + "/" for folder in sorted(found))


def is_local(module: types.ModuleType | None) -> bool:
    """Whether a module is the user's own: a file outside the installation, and not nbtrain."""
    name = getattr(module, "__name__", None)
    file = getattr(module, "__file__", None)
    if not isinstance(name, str) or not isinstance(file, str) or name == "__main__":
        return False
    return name.partition(".")[0] != _PACKAGE and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    path = file
    for _ in range(2):
        if "/site-packages/" in path or "/dist-packages/" in path:
            return True
        if path.startswith(_installed_folders()):
            return True
        path = str(Path(file).resolve())
    return False


def by_content(thing: Any) -> bool:
    """Whether a function or class counts by its content, not by the name it is imported under."""
    name = getattr(thing, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name == "__main__" or module is None or is_local(module)


# --- what a function can see -----------------------------------------------------------------


def global_names(code: types.CodeType) -> list[str]:
    """Names that code, nested functions included, looks up in its globals."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(global_names(inner))
    return sorted(names)


def referenced(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """``(what, name, value)`` for each default, closed-over variable and global of a function."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    by_position = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    for name, value in [*zip(by_position, defaults, strict=True), *_keyword_defaults(function)]:
        yield "default", name, value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "closed-over variable", name, cell.cell_contents
        except ValueError:
            continue  # not yet bound: it cannot be read by a call either
    for name in global_names(code):
        if name in function.__globals__:
            yield "global variable", name, function.__globals__[name]
    for name, value in sorted(vars(function).items()):
        if name != "__wrapped__":
            yield "attribute", name, value


def _keyword_defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    return sorted((function.__kwdefaults__ or {}).items())


# --- source ----------------------------------------------------------------------------------


def shown_source(function: Any) -> str:
    """The source a reader would call the reward: of the function, or of the object's class."""
    while hasattr(function, "func") and hasattr(function, "keywords"):
        function = function.func
    if inspect.ismethod(function):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return function_source(function) if by_content(function) else "\n".join(name_of(function))
    return class_source(function if isinstance(function, type) else type(function))


def function_source(function: types.FunctionType) -> str:
    """A function's source without comments and layout; its bytecode when there is no source."""
    try:
        text = textwrap.dedent(inspect.getsource(function.__code__))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError, ValueError):
        return _bytecode(function.__code__)
    if function.__name__ == "<lambda>":
        # The statement around a lambda may hold others, and names that are not part of it.
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        return ast.unparse(lambdas[0]) if len(lambdas) == 1 else _bytecode(function.__code__)
    return ast.unparse(tree)


def class_source(cls: type) -> str:
    """A class's source without comments and layout; its name when it is installed."""
    if not by_content(cls):
        return "\n".join(name_of(cls))
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(cls))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return f"class {cls.__qualname__}"


def module_source(module: types.ModuleType) -> str:
    """A module's source without comments and layout."""
    try:
        return ast.unparse(ast.parse(inspect.getsource(module)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return f"module {module.__name__}"


def _bytecode(code: types.CodeType) -> str:
    """What runs, without lines and file names: for functions whose source is nowhere."""
    constants = [
        _bytecode(constant) if isinstance(constant, types.CodeType) else repr(_ordered(constant))
        for constant in code.co_consts
    ]
    parts = [code.co_code.hex(), *constants, *code.co_names, *code.co_varnames, *code.co_freevars]
    return "\x00".join(parts)


def _ordered(constant: Any) -> Any:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def name_of(thing: Any) -> tuple[str, str]:
    """Module and qualified name of a function or class."""
    return str(thing.__module__), thing.__qualname__
