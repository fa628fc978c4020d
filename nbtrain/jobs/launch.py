"""Launching a run: its host is started as a detached process and left alone."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nbtrain.errors import StoreError
from nbtrain.jobs.connection import remove_connection, write_connection
from nbtrain.jobs.environment import host_environment
from nbtrain.jobs.liveness import reap
from nbtrain.plan.phases import Phase
from nbtrain.processes import boot_id, process_identity
from nbtrain.store import Store, StoredRun

__all__ = ["launch"]

log = logging.getLogger("nbtrain.jobs")


def launch(store: Store, run: StoredRun, *, host_options: Sequence[str] = ()) -> None:
    """Start the host of ``run``'s current attempt and return at once.

    The host is a fresh interpreter in a session of its own, so it does not care what the caller
    has imported or touched, nor when the caller ends. Where it cannot be started, or ends before
    it could say anything, the run is FAILED with the reason. ``host_options`` are added to the
    host's command line. Raises ``ValueError`` when the attempt has had its host already.
    """
    if store.attempt(run.key, run.attempt)["hostname"] is not None:
        msg = f"attempt {run.attempt} of run {run.short_id} was launched already"
        raise ValueError(msg)
    logs = store.run_folder(run.run_id) / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection: Path | None = None
    try:
        connection = write_connection(run.run_id, run.attempt)
        # First where, then who: a launcher killed in between leaves a run that can be judged.
        store.update_attempt(
            run.key,
            run.attempt,
            hostname=socket.gethostname(),
            boot_id=boot_id(),
            connection_file=str(connection),
        )
        process = _start(store, run, connection, logs / "host.log", host_options)
    except OSError as error:
        if connection is not None:
            remove_connection(connection)
        failure = f"the host process could not be started: {error}"
        store.move_phase(run.key, Phase.FAILED, attempt=run.attempt, failure=failure)
        return
    who = process_identity(process.pid)
    # The host notes itself too; this is for one that dies before it can.
    if who is not None and store.attempt(run.key, run.attempt)["host_pid"] is None:
        store.update_attempt(run.key, run.attempt, host_pid=who.pid, host_start_time=who.start_time)
    threading.Thread(
        target=_wait, args=(store, run, process), name=f"nbtrain-host-{run.short_id}", daemon=True
    ).start()


def _start(
    store: Store, run: StoredRun, connection: Path, log: Path, host_options: Sequence[str]
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-X", "utf8", "-P", "-m", "nbtrain.jobs.host"]
    argv += ["--run", run.run_id, "-f", str(connection), *host_options]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            argv,
            env=host_environment(os.environ, home=store.home, url=_stated_url(store)),
            cwd=store.run_folder(run.run_id),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _stated_url(store: Store) -> str | None:
    """The store's URL, where it is not simply the home's own database."""
    return None if store.database.path == store.home / "nbtrain.db" else store.url


def _wait(store: Store, run: StoredRun, process: subprocess.Popen[bytes]) -> None:
    """Wait in the background: so the host leaves no zombie, and a false start is known at once."""
    code = process.wait()
    # The run's end is normally recorded by the host itself, and then this finds nothing to do.
    try:
        reap(store, run, host_exit=code)
    except StoreError as error:  # a full disk; the next reader that can write records it
        log.warning("the end of run %s could not be recorded: %s", run.run_id[:12], error)
