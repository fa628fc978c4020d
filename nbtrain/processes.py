"""Processes: who is alive, dying with one's parent, and stopping a whole tree.

Imported by everything that starts or is started, before anything heavy: only the standard
library, and psutil where there is no ``/proc``.

Three things keep a killed job from leaving anything behind:

- :func:`die_with_parent`, called first by ranks and reward workers: the kernel kills the process
  when its parent is gone, even while it hangs in C code that holds the GIL;
- :func:`become_subreaper` and :func:`stop_tree`, with which the host finds and stops every
  descendant, also one that moved to a session of its own;
- :data:`MARK`, an environment variable that all processes of a job inherit, by which
  :func:`marked` finds what has neither parent nor group in common with the job any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = [
    "MARK",
    "Identity",
    "become_subreaper",
    "boot_id",
    "descendants",
    "die_with_parent",
    "is_alive",
    "mark_of",
    "marked",
    "process_identity",
    "reap_orphans",
    "stop_tree",
]

MARK = "NBTRAIN_JOB"
"""Environment variable carried by every process of a job; its value is ``<run id>/<attempt>``."""

_PROC = Path("/proc")
_HAS_PROC = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_SECONDS = 0.5
_DEAD_STATES = "ZXx"


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, never confused with a later one that got the same pid.

    ``start_time`` is in seconds since the machine's boot on Linux (immune to clock changes), in
    seconds since 1970 elsewhere; it only ever compares with another of the same ``boot_id``.
    """

    pid: int
    start_time: float
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    parent: int
    state: str
    start_time: float


# --- who is alive ---------------------------------------------------------------------------


@cache
def boot_id() -> str:
    """The boot of this machine, and the pid namespace that its pids are counted in.

    Two containers on one machine share a boot but not their pids, hence the namespace.
    """
    if not _HAS_PROC:
        import psutil

        return f"boot-{psutil.boot_time():.0f}"
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    try:
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    except OSError:
        return boot
    return f"{boot}/{namespace}"


@cache
def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> _Stat | None:
    """Parent, state letter and start time of ``pid``; None when there is no such process."""
    if not _HAS_PROC:
        return _stat_by_psutil(pid)
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(pid, int(fields[1]), fields[0].decode(), int(fields[19]) / _ticks())


def _stat_by_psutil(pid: int) -> _Stat | None:
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "S"
            return _Stat(pid, process.ppid(), state, process.create_time())
    except psutil.Error:
        return None


def _pids() -> list[int]:
    if _HAS_PROC:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    import psutil

    return list(psutil.pids())


def process_identity(pid: int | None = None) -> Identity | None:
    """The identity of ``pid`` (default: this process); None when it is gone or a zombie."""
    stat = _stat(os.getpid() if pid is None else pid)
    if stat is None or stat.state in _DEAD_STATES:
        return None
    return Identity(stat.pid, stat.start_time, boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether that very process runs on this machine.

    A later process with the same pid is not it, nor is one of another boot. A zombie is dead: an
    orphan may stay one for ever where pid 1 does not reap.
    """
    if identity.boot_id != boot_id():
        return False
    stat = _stat(identity.pid)
    return (
        stat is not None
        and stat.state not in _DEAD_STATES
        # Stored as a float in databases of several kinds; a clock tick is 0.01 s.
        and abs(stat.start_time - identity.start_time) < 0.005
    )


# --- dying with the parent ------------------------------------------------------------------

_watching: tuple[int, int] | None = None


def _die() -> None:
    # Not sys.exit: nothing of a process without its parent may run on, no handler, no save.
    os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> bool:
    """``prctl(option, value)``; False where the call is missing or refused."""
    if sys.platform != "linux":
        return False
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def die_with_parent(
    expected_parent_pid: int | None = None,
    *,
    signum: signal.Signals = signal.SIGKILL,
    watch: bool = True,
) -> None:
    """From now on this process is killed (SIGKILL) when its parent is gone. Call it first of all.

    ``expected_parent_pid`` (default: the parent now) is the pid that the parent handed over; when
    it is not this process's direct parent any more, the parent died before the call, and this
    process ends at once.

    Linux's parent-death signal does it within milliseconds, whatever this process is doing, but
    fires when the *thread* that started it ends: start such processes from a thread that outlives
    them. A daemon thread that looks at the parent every 0.5 s stands behind it, and alone where
    there is no such signal; it cannot run while other code holds the GIL. A process that forks
    others, and must have no threads, leaves it out with ``watch`` false where the signal works.
    One that has to end others first gets ``signum`` instead of SIGKILL.
    """
    global _watching
    parent = os.getppid() if expected_parent_pid is None else expected_parent_pid
    signalled = _prctl(_PR_SET_PDEATHSIG, signum)
    # The parent may have died just before the signal was asked for.
    identity = process_identity(parent)
    if os.getppid() != parent or identity is None:
        _die()
        return
    if _watching == (os.getpid(), parent) or (signalled and not watch):
        return
    _watching = (os.getpid(), parent)
    threading.Thread(
        target=_watch, args=(identity, _die), name="nbtrain-parent-watch", daemon=True
    ).start()


def _watch(parent: Identity, then: Callable[[], None]) -> None:
    while os.getppid() == parent.pid and is_alive(parent):
        time.sleep(_WATCH_SECONDS)
    then()


# --- trees ----------------------------------------------------------------------------------


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process. False where the system cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int | None = None) -> list[Identity]:
    """Live descendants of ``pid`` (default: this process), parents before their children."""
    return _below([os.getpid() if pid is None else pid])


def _below(roots: Iterable[int]) -> list[Identity]:
    children: dict[int, list[_Stat]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(stat)
    found: list[Identity] = []
    queue = deque(roots)
    while queue:
        for stat in children.pop(queue.popleft(), []):
            queue.append(stat.pid)
            if stat.state not in _DEAD_STATES:
                found.append(Identity(stat.pid, stat.start_time, boot_id()))
    return found


def reap_orphans(spare: Collection[int] = ()) -> None:
    """Reap dead processes that this subreaper inherited; children in ``spare`` belong to others.

    Named one by one: waiting for any child would take away the exit codes of our own.
    """
    for pid in _pids():
        stat = _stat(pid)
        mine = stat is not None and stat.parent == os.getpid() and stat.state in _DEAD_STATES
        if mine and pid not in spare:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def mark_of(run_id: str, attempt: int) -> str:
    """The mark of one attempt's processes."""
    return f"{run_id}/{attempt}"


def marked(mark: str) -> list[Identity]:
    """Live processes of this user whose environment holds ``NBTRAIN_JOB=<mark>``, but this one.

    ``mark`` may end in ``/`` to find every attempt of a run.
    """
    found = []
    for pid in _pids():
        value = _mark_of(pid) if pid != os.getpid() else None
        if value is None or not (value == mark or (mark.endswith("/") and value.startswith(mark))):
            continue
        identity = process_identity(pid)
        if identity is not None:
            found.append(identity)
    return found


def _mark_of(pid: int) -> str | None:
    if not _HAS_PROC:
        import psutil

        try:
            value: str | None = psutil.Process(pid).environ().get(MARK)
        except (psutil.Error, OSError):
            return None
        return value
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    start = f"{MARK}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(start):
            return entry[len(start) :].decode(errors="replace")
    return None


def stop_tree(
    roots: Iterable[Identity],
    *,
    grace: float,
    mark: str | None = None,
    spare: Collection[int] = (),
    on_poll: Callable[[], None] | None = None,
    sweep_seconds: float = 3.0,
) -> list[Identity]:
    """Stop ``roots`` and all their descendants: SIGTERM, ``grace`` seconds, then SIGKILL.

    The killing is repeated until nothing is left, for at most ``sweep_seconds``; returns what is
    still alive then: normally nothing. With ``mark``, processes that carry it belong to the tree
    too; pids in ``spare`` do not, nor does this process, which may be a root: a subreaper finds
    everything below it. ``on_poll`` runs every 0.05 s; a caller reaps its children there.
    """
    tree = _Tree(roots, mark, spare)
    _signal_all(tree.look(), signal.SIGTERM)
    if tree.wait(grace, on_poll):
        return []
    end = time.monotonic() + sweep_seconds
    while time.monotonic() < end:
        # Again and again: a process may have been born between the look and the kill.
        _signal_all(tree.look(), signal.SIGKILL)
        if tree.wait(0.2, on_poll):
            return []
    return tree.look()


class _Tree:
    """The members of a tree, remembered: an orphan no longer shows whose descendant it was."""

    def __init__(self, roots: Iterable[Identity], mark: str | None, spare: Collection[int]) -> None:
        self._known = dict.fromkeys(roots)
        self._mark = mark
        self._spare = {*spare, os.getpid()}

    def look(self) -> list[Identity]:
        """Live members, new ones included: one walk over all processes."""
        # A dead member's pid may belong to someone else by now.
        self._known.update(dict.fromkeys(_below(one.pid for one in self._known if is_alive(one))))
        if self._mark is not None:
            self._known.update(dict.fromkeys(marked(self._mark)))
        return self._alive()

    def _alive(self) -> list[Identity]:
        return [one for one in self._known if one.pid not in self._spare and is_alive(one)]

    def wait(self, seconds: float, on_poll: Callable[[], None] | None) -> bool:
        """Whether nothing was left of the tree within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            if on_poll is not None:
                on_poll()
            if not self._alive() and not self.look():
                if on_poll is not None:
                    on_poll()  # reap the last ones
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)


def _signal_all(members: Iterable[Identity], signum: signal.Signals) -> None:
    for one in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if is_alive(one):
                os.kill(one.pid, signum)
