"""A real IPython shell for the tests, and what its cells published."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config

from nbtrain.notebook.refusals import CellRefused


def interrupting() -> SimpleNamespace:
    """A ``time`` module in whose first pause a person interrupts."""

    def sleep(_: float) -> None:
        signal.raise_signal(signal.SIGINT)

    return SimpleNamespace(monotonic=time.monotonic, sleep=sleep)


class Shell:
    """A shell with the extension loaded, and what its cells published."""

    def __init__(self, ipython_dir: Path) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        self.ip = InteractiveShell(config=config, ipython_dir=str(ipython_dir))
        self.ip.display_pub = CapturingDisplayPublisher(parent=self.ip)
        self.tracebacks: list[list[str]] = []
        self.ip._showtraceback = lambda _type, _value, lines: self.tracebacks.append(lines)
        self.do("%load_ext nbtrain")

    def run(self, cell: str) -> ExecutionResult:
        self.ip.display_pub.outputs.clear()
        self.tracebacks.clear()
        return self.ip.run_cell(cell, store_history=True)

    def do(self, cell: str) -> Any:
        """Run a cell that must succeed and return its value."""
        result = self.run(cell)
        result.raise_error()
        return result.result

    def refuse(self, cell: str) -> str:
        """Run a cell that must be refused and return what it shows."""
        result = self.run(cell)
        assert isinstance(result.error_in_exec, CellRefused), result.error_in_exec
        (lines,) = self.tracebacks
        assert not any("Traceback" in line for line in lines)
        return "\n".join(lines)

    @property
    def bundles(self) -> list[dict[str, Any]]:
        return [output["data"] for output in self.ip.display_pub.outputs]

    @property
    def ns(self) -> dict[str, Any]:
        return self.ip.user_ns
