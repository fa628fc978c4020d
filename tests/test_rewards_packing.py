"""Packing rewards: what travels by value, what is refused, and what their identity is."""

from __future__ import annotations

import json
import linecache
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reward_functions as functions

from nbtrain import rewards
from nbtrain.errors import Refused
from nbtrain.rewards.contract import as_terms
from nbtrain.rewards.packing import pack, read_packed
from nbtrain.rewards.travel import open_parcel


def cell(text: str, name: str = "/tmp/ipykernel_1/1.py", **values: Any) -> dict[str, Any]:
    """Run a text as a notebook does its cells; returns the namespace."""
    text = textwrap.dedent(text)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__", **values}
    exec(compile(text, name, "exec"), namespace)
    return namespace


def identity(reward: Any) -> dict[str, Any]:
    return pack(as_terms(reward))[1][0]


def cell_identity(text: str, name: str = "/tmp/ipykernel_1/1.py", **values: Any) -> dict[str, Any]:
    return identity(cell(text, name, **values)["f"])


# --- travelling ------------------------------------------------------------------------------


def in_fresh_process(data: bytes, folder: Path, code: str) -> str:
    """Run code with ``terms``, the unpacked functions, in a process that knows none of this."""
    file = folder / "rewards.pkl"
    file.write_bytes(data)
    program = (
        "import sys; from nbtrain.rewards.travel import open_parcel, read_parcel, restore\n"
        f"parcel = read_parcel({str(file)!r}, 'rewards'); restore(parcel)\n"
        f"terms = open_parcel(parcel)\n{code}"
    )
    root = str(Path(rewards.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def local_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook's folder with modules of its own, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_by_value.py").write_text(
        "SCALE = 2.0\ndef scale(x):\n    return x * SCALE\n"
    )
    (tmp_path / "helper_with_lock.py").write_text(
        "import threading\nlock = threading.Lock()\ndef scale(x):\n    with lock: return x * 3.0\n"
    )
    yield tmp_path
    for name in ("helper_by_value", "helper_with_lock"):
        sys.modules.pop(name, None)


def test_a_cell_and_its_modules_travel_by_value(local_modules: Path, tmp_path: Path) -> None:
    space = cell(
        """
        import os
        import helper_by_value
        import helper_with_lock
        offset = 1.0
        def by_value(completion): return helper_by_value.scale(float(completion)) + offset
        def by_name(completion): return helper_with_lock.scale(float(completion))
        def here(completion):
            import helper_by_value as again
            return os.getcwd()
        """
    )
    data, _ = pack(as_terms([space["by_value"]]))
    (local_modules / "helper_by_value.py").write_text("def scale(x):\n    return -1.0\n")
    # Edited after packing: the packed reward stays what it was.
    assert in_fresh_process(data, tmp_path, "print(terms[0]('4'))") == "9.0"

    # A module that holds a lock cannot travel; it is imported from the notebook's folder.
    data, _ = pack(as_terms([space["by_name"], space["here"]]))
    printed = in_fresh_process(data, tmp_path, "print(terms[0]('4'), terms[1](''))")
    assert printed == f"12.0 {local_modules}"


def test_packed_rewards_are_read_without_running_them(tmp_path: Path) -> None:
    data, _ = pack(as_terms([(functions.right, 0.5), functions.waits]))
    file = tmp_path / "rewards.pkl"
    file.write_bytes(data)
    packed = read_packed(file)
    assert [(t.name, t.weight, t.form.value) for t in packed.terms] == [
        ("right", 0.5, "sample"),
        ("waits", 1.0, "group"),
    ]
    assert packed.parcel.cwd == str(Path.cwd())
    assert open_parcel(packed.parcel)[0]("2", {"answer": "2"}) == 1.0


@pytest.mark.parametrize("data", [b"", b"{}\n", b'{"format": 99}\n', pickle.dumps({})])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "rewards.pkl"
    file.write_bytes(data)
    with pytest.raises(Refused, match="does not hold packed rewards"):
        read_packed(file)


def test_another_python_version_is_refused_in_words(tmp_path: Path) -> None:
    head, _, blob = pack(as_terms(functions.right))[0].partition(b"\n")
    header = json.loads(head) | {"python": "3.1"}
    file = tmp_path / "rewards.pkl"
    file.write_bytes(json.dumps(header).encode() + b"\n" + blob)
    with pytest.raises(RuntimeError, match=r"packed by Python 3\.1 .* register the workload again"):
        open_parcel(read_packed(file).parcel)


def test_the_text_of_a_cell_travels_for_tracebacks(tmp_path: Path) -> None:
    space = cell("def f(completion):\n    return 1 / len(completion)  # the culprit\n")
    data, _ = pack(as_terms([space["f"]]))
    code = "import traceback\ntry: terms[0]('')\nexcept Exception: print(traceback.format_exc())"
    assert "return 1 / len(completion)" in in_fresh_process(data, tmp_path, code)


# --- refusals --------------------------------------------------------------------------------


def test_what_cannot_travel_is_named_with_its_term(tmp_path: Path) -> None:
    handle = (tmp_path / "log.txt").open("w")
    reader = (tmp_path / "log.txt").open()
    lock = threading.Lock()

    def writes(completion: str) -> float:
        return handle.write(completion)

    def locks(completion: str, guard: Any = lock) -> float:
        return float(guard.locked())

    text = "def reads(completion): return float(len(state['files'][0].read()))"
    reads = cell(text, state={"files": [reader]})["reads"]

    with pytest.raises(Refused) as refused:
        pack(as_terms([writes, functions.right, locks, reads]))
    handle.close()
    reader.close()
    messages = [problem.message for problem in refused.value.problems]
    assert len(messages) == 3
    assert "reward 'writes' uses the closed-over variable 'handle', a TextIOWrapper" in messages[0]
    assert "reward 'locks' uses the default 'guard', a lock" in messages[1]
    assert (
        "reward 'reads' uses the item '0' of the entry 'files' of the global variable 'state'"
        in messages[2]
    )
    assert all("inside the function" in str(problem.hint) for problem in refused.value.problems)


def test_rewards_that_carry_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.rewards.travel._SIZE_LIMIT", 1 << 20)
    table = np.zeros(1 << 18)
    with pytest.raises(Refused, match="2 MiB to pack, most of it the closed-over variable 'table'"):
        pack(as_terms([lambda completion: float(table[0])]))


# --- identity --------------------------------------------------------------------------------


def test_layout_comments_and_the_cell_do_not_matter() -> None:
    one = cell_identity("def f(completion, task): return float(completion == 'a')")
    two = cell_identity(
        """
        # a remark
        def f(completion,
              task):
            # another
            return float(completion == "a")
        """,
        "/tmp/ipykernel_2/2.py",
    )
    assert one == two
    assert one["name"] == "f"
    assert (one["weight"], one["kind"], one["form"]) == (1.0, "function", "sample")
    assert json.loads(json.dumps(one)) == one


BASE = """
import re
scale = {scale}
unused = {unused}
def helper(x): return {helper}
def f(completion, task, power={power}):
    return helper(scale * len(completion)) ** power
"""
PARTS = {"scale": "2.0", "unused": "1", "helper": "x + 1", "power": "2"}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"unused": "2"}, True),
        ({"scale": "3.0"}, False),
        ({"scale": "2"}, False),
        ({"helper": "x + 2"}, False),
        ({"helper": "x  +  1"}, True),
        ({"power": "3"}, False),
        ({"scale": "[1, {'a': 2}][0]"}, False),
    ],
)
def test_what_a_function_can_see_is_part_of_it(change: dict[str, str], same: bool) -> None:
    before = cell_identity(BASE.format(**PARTS))
    after = cell_identity(BASE.format(**{**PARTS, **change}), "/tmp/ipykernel_1/2.py")
    assert (before == after) is same


def make(value: Any) -> Any:
    return lambda completion, task: float(value is None)


def values() -> list[Any]:
    """Values of every kind, made anew."""
    loop: list[Any] = [1]
    loop.append(loop)
    return [
        None, True, 1, 1.0, "1", b"1", 1j, (1,), [1], {1}, frozenset("abcdefgh"), {"a": 1, "b": 2},
        {"a": 2, "b": 1}, loop, np.arange(3), np.arange(3, dtype=np.int32), np.float32(1),
        pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": [1, 3]}), Path("a"), slice(1, 2),
        functions.right, functions.group_right, functions.Unpicklable, len, max, "abc".upper,
        json.dumps, json, functions, rewards.exact("a"), rewards.exact("b"),
    ]  # fmt: skip


def test_closed_over_values_of_every_kind_tell_rewards_apart() -> None:
    first = [identity(make(value))["values"] for value in values()]
    again = [identity(make(value))["values"] for value in values()]
    assert first == again
    assert len(set(first)) == len(first)


def test_two_lambdas_on_one_line_differ() -> None:
    one, two = (lambda completion: 1.0), (lambda completion: 2.0)
    assert identity(one) != identity(two)
    assert identity(one) == identity(one)


def test_functions_that_call_each_other_have_an_identity() -> None:
    text = """
    def even(n): return n == 0 or odd(n - 1)
    def odd(n): return n != 0 and even(n - {step})
    def f(completion): return float(even(len(completion)))
    """
    assert cell_identity(text.format(step=1)) == cell_identity(text.format(step=1))
    assert cell_identity(text.format(step=1)) != cell_identity(text.format(step=2))


def test_objects_classes_and_decorated_functions_count_whole() -> None:
    text = """
    import functools
    from dataclasses import dataclass
    @dataclass
    class Judge:
        limit: int
        def __call__(self, completion): return float(len(completion) < self.limit + {plus})
    def twice(g):
        @functools.wraps(g)
        def wrapper(completion): return {times} * g(completion)
        return wrapper
    @twice
    def g(completion): return 1.0
    f = {which}
    """
    variants = [
        {"plus": 1, "times": 2, "which": "Judge(3)"},
        {"plus": 2, "times": 2, "which": "Judge(3)"},
        {"plus": 1, "times": 2, "which": "Judge(4)"},
        {"plus": 1, "times": 2, "which": "g"},
        {"plus": 1, "times": 3, "which": "g"},
        {"plus": 1, "times": 2, "which": "functools.partial(g)"},
    ]
    first = [cell_identity(text.format(**v)) for v in variants]
    again = [cell_identity(text.format(**v), "/tmp/ipykernel_9/9.py") for v in variants]
    assert first == again
    assert len({json.dumps(one) for one in first}) == len(variants)


def test_a_local_module_counts_by_its_content(local_modules: Path) -> None:
    text = "import helper_by_value\ndef f(completion): return helper_by_value.scale(1.0)"
    before = cell_identity(text)
    file = local_modules / "helper_by_value.py"
    file.write_text("SCALE = 2.0\n# a remark\ndef scale(x): return x * SCALE\n")
    del sys.modules["helper_by_value"]
    assert cell_identity(text) == before
    file.write_text("SCALE = 5.0\ndef scale(x):\n    return x * SCALE\n")
    linecache.clearcache()
    del sys.modules["helper_by_value"]
    assert cell_identity(text) != before


def test_the_identity_is_the_same_in_every_process() -> None:
    program = (
        "import sys, json; sys.path[:0] = sys.argv[1:]\n"
        "import test_rewards_packing as t\n"
        "print(json.dumps([t.identity(t.make(v)) for v in t.values()]))\n"
    )
    folders = [str(Path(rewards.__file__).parents[2]), str(Path(__file__).parent)]
    mine = [identity(make(value)) for value in values()]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, *folders],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == mine
