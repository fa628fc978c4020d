"""The host: a detached Jupyter kernel that supervises one run.

``python -m nbtrain.jobs.host --run RUN_ID -f CONNECTION_FILE``. A console can attach to the
kernel (``jupyter console --existing CONNECTION_FILE``) and finds the supervisor as ``host``.
SIGHUP is ignored: the host outlives the notebook, the terminal and the Jupyter server. SIGTERM
and a kernel shutdown cancel the run. ``--rank-module`` names another module to run as the rank;
the tests of the supervision use it, and nothing but the command line can set it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from nbtrain.jobs.connection import remove_connection
from nbtrain.jobs.supervise import RANK_MODULE, Supervisor
from nbtrain.processes import become_subreaper, process_identity
from nbtrain.store import open_store

log = logging.getLogger("nbtrain.host")

_KERNEL_SECONDS = 20.0
_starting_kernel = threading.Lock()
"""Held while the kernel makes its files, and from when they are removed: a run that ends at once
must not find them made again behind it."""


def main(arguments: list[str] | None = None) -> int:
    """Supervise one run; ends the process when the run has ended."""
    parser = argparse.ArgumentParser(prog="nbtrain.jobs.host", allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run id, 64 hex digits")
    parser.add_argument("-f", "--connection-file", required=True, type=Path)
    parser.add_argument("--rank-module", default=RANK_MODULE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    become_subreaper()
    store = open_store()
    run = store.find_run(options.run)
    if not store.start_attempt(run.key, run.attempt, **_here(options.connection_file)):
        log.error("attempt %d of run %s has a host or has ended", run.attempt, run.short_id)
        return 1
    supervisor = Supervisor(store, run, rank_module=options.rank_module)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.cancel())
    worker = threading.Thread(
        target=_supervise, args=(supervisor, options.connection_file), name="nbtrain-supervisor"
    )
    worker.start()
    # The run goes on without a kernel when one cannot be had.
    try:
        _serve(options.connection_file, supervisor)
    except BaseException:
        log.exception("the kernel ended; the run goes on")
    worker.join()
    return 0


def _here(connection_file: Path) -> dict[str, Any]:
    me = process_identity()
    assert me is not None, "this process runs"
    return {
        "host_pid": me.pid,
        "host_start_time": me.start_time,
        "boot_id": me.boot_id,
        "hostname": socket.gethostname(),
        "connection_file": str(connection_file),
    }


def _supervise(supervisor: Supervisor, connection_file: Path) -> None:
    try:
        supervisor.run()
    except BaseException:
        log.exception("the supervisor failed")
    _starting_kernel.acquire(timeout=_KERNEL_SECONDS)
    remove_connection(connection_file)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    # Not a return: the main thread may be running a console's code, and the kernel's sockets
    # wait for readers that are gone. Everything of the run is committed by now.
    os._exit(0)


def _serve(connection_file: Path, supervisor: Supervisor) -> None:
    """Be a Jupyter kernel, in the main thread, for as long as the process lives."""
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelapp import IPKernelApp

    class HostKernel(IPythonKernel):  # type: ignore[misc]
        """A kernel whose shutdown cancels the run and waits for its end."""

        async def shutdown_request(self, stream: Any, ident: Any, parent: Any) -> None:
            supervisor.cancel()
            content = {"status": "ok", "restart": False}
            self.session.send(stream, "shutdown_reply", content, parent, ident=ident)

    class HostApp(IPKernelApp):  # type: ignore[misc]
        """The kernel's application, without its advice for terminals in the log."""

        log_level: Any

        def log_connection_info(self) -> None:
            level, self.log_level = self.log_level, logging.CRITICAL
            super().log_connection_info()
            self.log_level = level

    app = HostApp.instance(kernel_class=HostKernel, user_ns={"host": supervisor})
    arguments = [
        *("-f", str(connection_file)),
        # What is printed reaches host.log too, even when nobody is attached; once.
        *("--IPKernelApp.quiet=False", "--IPKernelApp.capture_fd_output=False"),
        "--HistoryManager.enabled=False",  # no lock on the user's own history
    ]
    with _starting_kernel:
        app.initialize(arguments)
    app.start()


if __name__ == "__main__":
    sys.exit(main())
