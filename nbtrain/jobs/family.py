"""Everything a host starts, and everything that starts in turn: found, stopped, reaped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nbtrain.jobs.children import Child
from nbtrain.processes import Identity, descendants, process_identity, reap_orphans, stop_tree

__all__ = ["Family"]


class Family:
    """The processes of one attempt below this one, which must be a subreaper.

    ``mark`` is what they carry in their environment. Beside them stands the guardian, which kills
    them should this process be killed.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._children: list[Child] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def watch_over(self) -> None:
        """See to it that there is a guardian."""
        if self._guardian is None or self._guardian.poll() is not None:
            # Its standard input ends when this process does, whatever ends it.
            self._guardian = subprocess.Popen(
                [*_python(), "-m", "nbtrain.jobs.guardian", self._mark],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        beside: Child | None = None,
    ) -> Child:
        """Run a module as a child; the calling thread must outlive it.

        It shares the process group of ``beside``, which must not have been polled yet.
        """
        argv = [*_python(), "-m", module, *arguments]
        group = 0 if beside is None else beside.pid
        child = Child(argv, env=env, cwd=cwd, log=log, group=group)
        self._children.append(child)
        return child

    def left(self) -> list[Identity]:
        """What lives of it."""
        return [one for one in descendants() if one.pid != self._guardian_pid]

    def stop(self, grace: float, on_poll: Callable[[], None]) -> list[Identity]:
        """Stop all of it: SIGTERM, ``grace`` seconds, SIGKILL; what could not be stopped.

        ``on_poll`` runs every 0.05 s meanwhile.
        """

        def poll() -> None:
            self._reap()
            on_poll()

        me = process_identity()
        return stop_tree(
            [] if me is None else [me],
            grace=grace,
            mark=self._mark,
            spare={self._guardian_pid},
            on_poll=poll,
        )

    def _reap(self) -> None:
        for child in self._children:
            child.poll()
        reap_orphans({self._guardian_pid, *(child.pid for child in self._children)})

    @property
    def _guardian_pid(self) -> int:
        return self._guardian.pid if self._guardian is not None else -1


def _python() -> list[str]:
    # -P: the run's folder, which is the working folder, must not be searched for modules.
    return [sys.executable, "-X", "utf8", "-P"]
