"""Who is alive, dying with the parent, stopping a tree: all with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from nbtrain import processes
from nbtrain.processes import (
    MARK,
    Identity,
    boot_id,
    descendants,
    is_alive,
    marked,
    process_identity,
    stop_tree,
)

HANG_WITH_GIL = "import re; re.match('(a+)+$', 'a' * 64 + 'b')"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return true()


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark no other test uses; what still carries it at the end is killed."""
    value = f"{uuid.uuid4().hex}/1"
    yield value
    for one in marked(value):
        os.kill(one.pid, signal.SIGKILL)


def python(code: str, mark: str, **options: object) -> subprocess.Popen[str]:
    """A process that prints a line when it is ready."""
    return subprocess.Popen(  # type: ignore[no-any-return]
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def identity_of(pid: int) -> Identity:
    found = process_identity(pid)
    assert found is not None
    return found


def test_the_own_process_is_alive() -> None:
    me = identity_of(os.getpid())
    assert me == process_identity()
    assert me.boot_id == boot_id()
    assert is_alive(me)


def test_another_start_time_or_boot_is_another_process() -> None:
    me = identity_of(os.getpid())
    assert not is_alive(replace(me, start_time=me.start_time + 0.01))
    assert not is_alive(replace(me, boot_id="another boot"))


def test_an_identity_survives_a_database_as_floats() -> None:
    me = identity_of(os.getpid())
    assert is_alive(Identity(me.pid, float(repr(me.start_time)), str(me.boot_id)))


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    alive = identity_of(child.pid)
    assert is_alive(alive)
    child.kill()
    # Not reaped: the pid exists still.
    assert until(lambda: not is_alive(alive))
    assert process_identity(child.pid) is None
    os.kill(child.pid, 0)
    child.communicate()


def test_no_process_has_no_identity() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert process_identity(child.pid) is None


def test_a_command_name_with_spaces_and_parentheses_is_read(tmp_path: object) -> None:
    odd = f"{tmp_path}/a ) S 1 ("
    os.symlink("/bin/sleep", odd)
    with subprocess.Popen([odd, "60"]) as child:
        found = identity_of(child.pid)
        assert is_alive(found)
        assert found in descendants()
        child.kill()


def test_without_proc_psutil_says_the_same(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    child = python("print(1, flush=True); input()", mark, stdin=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    monkeypatch.setattr(processes, "_HAS_PROC", False)
    processes.boot_id.cache_clear()
    try:
        found = identity_of(child.pid)
        assert is_alive(found)
        assert found in descendants()
        assert marked(mark) == [found]
        child.kill()
        assert until(lambda: not is_alive(found))
        assert process_identity(child.pid) is None
    finally:
        monkeypatch.undo()
        processes.boot_id.cache_clear()
        child.communicate()


# --- dying with the parent ---------------------------------------------------------------------

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(child.pid, flush=True)
time.sleep(600)
"""

CHILD = """
import os, sys
from nbtrain import processes
{before}
processes.die_with_parent(int(sys.argv[1]))
open({ready!r}, "w").close()
{work}
"""


def parent_of(child_code: str, mark: str) -> tuple[subprocess.Popen[str], Identity]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child_code],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, identity_of(int(parent.stdout.readline()))


@pytest.mark.parametrize(
    ("before", "work"),
    [
        ("", "import time; time.sleep(600)"),
        # A hanging reward: no other thread of the worker gets the GIL, so no watch can run.
        pytest.param("", HANG_WITH_GIL, id="hangs holding the GIL"),
        pytest.param(IGNORE_TERM, "import time; time.sleep(600)", id="ignores SIGTERM"),
        # Where the system has no parent-death signal, the watch does it alone.
        pytest.param(
            "processes._prctl = lambda *a: False",
            "import time; time.sleep(600)",
            id="no prctl",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_child_dies_with_its_killed_parent(
    before: str, work: str, mark: str, tmp_path: object
) -> None:
    ready = f"{tmp_path}/ready"
    parent, child = parent_of(CHILD.format(before=before, work=work, ready=ready), mark)
    assert until(lambda: os.path.exists(ready))
    assert is_alive(child)
    parent.kill()
    parent.communicate()
    assert until(lambda: not is_alive(child), 5.0)


def test_a_child_whose_parent_died_before_it_asked_dies_at_once(mark: str) -> None:
    # Another process's pid as the expected parent: what a child sees that was orphaned early.
    code = "from nbtrain.processes import die_with_parent; die_with_parent(1); print('lived')"
    child = python(code, mark)
    out, _ = child.communicate()
    assert (child.returncode, out) == (-signal.SIGKILL, "")


def test_a_child_of_a_living_parent_lives_and_watches_once(mark: str) -> None:
    code = """
    import threading, os
    from nbtrain.processes import die_with_parent
    for _ in range(3):
        die_with_parent(os.getppid())
    print(sorted(t.name for t in threading.enumerate()))
    """
    child = python(code, mark)
    out, _ = child.communicate()
    assert child.returncode == 0
    assert out.count("nbtrain-parent-watch") == 1


def test_the_signal_is_bound_to_the_thread_that_started_the_child(mark: str) -> None:
    """The rule that the host's supervision is built around; if it changes, so may the host."""
    code = """
    import subprocess, sys, threading
    started = []
    child = "from nbtrain import processes as p; p.die_with_parent(); print(1, flush=True); input()"
    def start():
        p = subprocess.Popen([sys.executable, "-c", child], stdin=-1, stdout=-1)
        p.stdout.readline()
        started.append(p)
    t = threading.Thread(target=start); t.start(); t.join()
    print(started[0].wait())
    """
    parent = python(code, mark)
    out, _ = parent.communicate(timeout=30)
    assert int(out) == -signal.SIGKILL


def test_importing_it_is_light() -> None:
    code = "import sys, nbtrain.processes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "nbtrain.processes" in loaded
    assert not re.search(r"\b(psutil|torch|numpy|asyncio|sqlalchemy)\b", loaded)


# --- trees --------------------------------------------------------------------------------------

TREE = """
import subprocess, sys, time
{before}
started = [subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session={session},
           stdout=subprocess.PIPE) for _ in range(2)]
for each in started:
    each.stdout.readline()
print(*[each.pid for each in started], flush=True)
time.sleep(600)
"""
STUBBORN = f"{IGNORE_TERM}; import time; print(1, flush=True); time.sleep(600)"


def start_tree(
    mark: str, *, before: str = "", child: str = STUBBORN, session: bool = False
) -> tuple[subprocess.Popen[str], list[Identity]]:
    root = python(TREE.format(before=before, child=child, session=session), mark)
    assert root.stdout is not None
    children = [identity_of(int(pid)) for pid in root.stdout.readline().split()]
    return root, [identity_of(root.pid), *children]


def test_descendants_come_parents_first(mark: str) -> None:
    root, tree = start_tree(mark)
    assert set(descendants(root.pid)) == set(tree[1:])
    mine = [one for one in descendants() if one in tree]
    assert mine[0] == tree[0]
    assert {*marked(mark)} == {*tree}
    assert stop_tree([tree[0]], grace=0, on_poll=root.poll) == []


@pytest.mark.parametrize("session", [False, True])
def test_a_tree_whose_leaves_ignore_sigterm_is_killed_after_the_grace(
    session: bool, mark: str
) -> None:
    root, tree = start_tree(mark, session=session)
    assert stop_tree([tree[0]], grace=0.3, on_poll=lambda: root.poll()) == []
    assert not any(map(is_alive, tree))
    # The root had no handler: SIGTERM ended it. Its stubborn children did not end it otherwise.
    assert root.returncode == -signal.SIGTERM


def test_a_tree_that_stops_by_itself_gets_its_grace(mark: str) -> None:
    code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print(1, flush=True)
    while True: time.sleep(0.1)
    """
    root = python(code, mark)
    assert root.stdout is not None
    root.stdout.readline()
    # Longer than the test may take: it must not be waited out.
    assert stop_tree([identity_of(root.pid)], grace=3600, on_poll=lambda: root.poll()) == []
    assert root.returncode == 7


def test_spared_processes_live(mark: str) -> None:
    root, tree = start_tree(mark)
    assert stop_tree(tree, grace=0, spare={tree[1].pid}, on_poll=lambda: root.poll()) == []
    assert [is_alive(one) for one in tree] == [False, True, False]
    assert stop_tree([tree[1]], grace=0) == []


def test_an_orphan_is_found_by_its_mark(mark: str) -> None:
    root, tree = start_tree(mark, session=True)
    root.kill()
    root.communicate()
    assert [is_alive(one) for one in tree] == [False, True, True]
    assert {*marked(mark)} == {*tree[1:]}
    assert {*marked(mark.partition("/")[0] + "/")} == {*tree[1:]}
    assert marked(mark + "0") == []
    assert stop_tree([], grace=0, mark=mark) == []
    assert not any(map(is_alive, tree))


def test_a_subreaper_finds_what_lost_its_parent(mark: str) -> None:
    """A process that moved to its own session, dropped its environment, and was orphaned."""
    code = """
    import os, signal, subprocess, sys
    from nbtrain import processes as p
    assert p.become_subreaper()
    middle = '''
    import subprocess, sys
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, env={}, start_new_session=True)
    '''
    import textwrap
    subprocess.run([sys.executable, "-c", textwrap.dedent(middle)])
    found = p.descendants()
    left = p.stop_tree([p.process_identity()], grace=0.2, on_poll=p.reap_orphans)
    print(len(found), len(left), len([x for x in found if os.path.exists(f"/proc/{x.pid}")]))
    """
    process = python(code, mark)
    out, _ = process.communicate(timeout=30)
    assert out.split() == ["1", "0", "0"]


def test_die_with_parent_defaults_to_the_parent_now(mark: str) -> None:
    parent, child = parent_of(
        "from nbtrain.processes import die_with_parent as d; d(); import time; time.sleep(600)",
        mark,
    )
    assert not until(lambda: not is_alive(child), 0.7)
    parent.kill()
    parent.communicate()
    assert until(lambda: not is_alive(child), 5.0)
