"""The laws of the house: floors, torch where it belongs, a cheap import."""

from __future__ import annotations

import json
import subprocess
import sys
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
