"""The laws of the house: floors, torch where it belongs, a cheap import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_package_imports_only_floors_below_it() -> None:
    """The contracts of pyproject.toml hold."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def loaded_after(statement: str) -> tuple[set[str], float]:
    """Modules loaded and CPU seconds spent by a statement in a fresh interpreter."""
    program = (
        "import time, sys, json\n"
        "before = time.process_time()\n"
        f"{statement}\n"
        "spent = time.process_time() - before\n"
        "print(json.dumps([sorted({m.split('.')[0] for m in sys.modules}), spent]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules, spent = json.loads(done.stdout.splitlines()[-1])
    return set(modules), spent


def test_importing_nbtrain_loads_nothing_heavy() -> None:
    modules, _ = loaded_after("import nbtrain")
    heavy = {
        "torch",
        "transformers",
        "jupyterlab",
        "pandas",
        "sqlalchemy",
        "pydantic",
        "matplotlib",
    }
    assert modules & heavy == set()


def test_a_client_needs_no_torch() -> None:
    modules, _ = loaded_after("import nbtrain; nbtrain.Client; nbtrain.rewards; nbtrain.attach")
    assert modules & {"torch", "transformers", "jupyterlab"} == set()


def test_the_ranks_main_module_is_import_light() -> None:
    """Spawned reward workers import it again."""
    modules, _ = loaded_after("import nbtrain.training.main")
    assert modules & {"torch", "transformers", "pandas", "sqlalchemy", "numpy"} == set()


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    used = [line for name, lines in extras.items() if name != "test" for line in lines]
    declared = {re.split(r"[<>=]", line)[0] for line in [*project["dependencies"], *used]}
    declared = {name.lower().replace("_", "-") for name in declared}
    owners = packages_distributions()
    missing = set()
    made_with = ROOT / "nbtrain" / "training" / "embedded"  # once, by developers
    for path in (ROOT / "nbtrain").rglob("*.py"):
        if path.is_relative_to(made_with):
            continue
        for name in _imported(ast.parse(path.read_text("utf-8"))):
            if name in sys.stdlib_module_names or name == "nbtrain":
                continue
            # a package of an extra need not be installed here: it counts by its own name
            found = {owner.lower().replace("_", "-") for owner in owners.get(name, (name,))}
            if not declared & found:
                missing.add(f"{name} ({path.relative_to(ROOT)})")
    assert not missing


def test_no_modules_of_the_notebook_import_each_other() -> None:
    """Not even inside functions: what two of them need belongs below both."""
    root = ROOT / "nbtrain" / "notebook"
    paths = {_module(path): path for path in root.rglob("*.py")}
    needs: dict[str, set[str]] = {}
    for module, path in paths.items():
        needs[module] = {
            found
            for node in ast.walk(_running(ast.parse(path.read_text())))
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for found in (f"{node.module}.{alias.name}", node.module)
            if found in paths and found != module and not module.startswith(f"{found}.")
        }
    assert len(needs) > 20
    while free := [module for module, found in needs.items() if not found & needs.keys()]:
        for module in free:
            del needs[module]
    assert needs == {}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _running(tree: ast.Module) -> ast.Module:
    """The module without what only a type checker reads."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def _imported(tree: ast.Module) -> set[str]:
    """The top-level packages that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
