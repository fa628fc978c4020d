"""Control commands: a row in the store, which the job looks at, and a nudge to its host."""

from __future__ import annotations

import socket
from pathlib import Path

from nbtrain.errors import StoreError
from nbtrain.jobs.connection import send_code
from nbtrain.store import Store, StoredRun

__all__ = ["request_cancel"]

_ANSWER_SECONDS = 0.3


def request_cancel(store: Store, run: StoredRun) -> bool:
    """Ask ``run`` to stop; its checkpoints stay. False when it has ended already.

    Returns without waiting for the end. The rank stops by itself between trajectories, the host
    stops it after 10 s otherwise. The row alone suffices; the message, which gives up after
    0.3 s, only makes it quicker.
    """
    run = store.run(run.key)
    if run.ended_for_good:
        return False
    attempt = store.attempt(run.key, run.attempt)
    here = attempt["connection_file"] and attempt["hostname"] == socket.gethostname()
    try:
        # Asking twice is one request.
        if not any(row["command"] == "cancel" for row in store.commands(run.key)):
            store.request(run.key, "cancel")
    except StoreError:
        # A full disk takes no row, but the host takes a message.
        if here and send_code(
            Path(attempt["connection_file"]), "host.cancel()", timeout=_ANSWER_SECONDS
        ):
            return True
        raise
    if here:
        send_code(Path(attempt["connection_file"]), "host.wake()", timeout=_ANSWER_SECONDS)
    return True
