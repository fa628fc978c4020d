"""Real kernels for the tests, and what their cells put out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

TIMEOUT = 180.0


class CellFailed(Exception):
    """A cell ended in an error; the text is what it showed."""

    def __init__(self, ename: str, shown: str) -> None:
        super().__init__(f"{ename}: {shown}")
        self.ename = ename
        self.shown = shown


class Kernel:
    """One kernel and every message that its cells published."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.messages: list[dict[str, Any]] = []

    def run(self, code: str, timeout: float = TIMEOUT) -> str:
        """Execute a cell and return the text of its result or of what it printed."""
        self.client.timeout = timeout
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(
            code, output_hook=messages.append, timeout=timeout, store_history=True
        )
        self.messages += messages
        if reply["content"]["status"] != "ok":
            content = reply["content"]
            raise CellFailed(content["ename"], "\n".join(content["traceback"]))
        printed = [m["content"]["text"] for m in messages if m["msg_type"] == "stream"]
        results = [
            m["content"]["data"]["text/plain"]
            for m in messages
            if m["msg_type"] == "execute_result"
        ]
        return "".join(printed + results)


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A fresh kernel with the extension loaded; killed at the end, whatever it does."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        started = Kernel(manager, client)
        started.run("%load_ext nbtrain\nimport nbtrain, os, time")
        yield started
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
