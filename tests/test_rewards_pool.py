"""Grading in real worker processes: whatever a reward does, the run goes on."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import reward_functions as functions

from nbtrain import rewards
from nbtrain.rewards import GradeRequest, GroupGrades, RewardPool, as_terms, pack, trial
from nbtrain.rewards.output import OUTPUT_LIMIT

LIMIT = 1.5
GOOD_AND_BAD = [
    functions.right,
    functions.group_right,
    functions.compute_score,
    functions.spins,
    functions.group_spins,
    functions.holds_the_gil,
    functions.slow,
    functions.dies,
    functions.alarmed,
    functions.key_error,
    functions.some_raise,
    functions.strange_error,
    functions.odd_numbers,
    functions.none_for_some,
    functions.number_types,
    functions.waits,
    functions.waits_alone,
    functions.prints,
    functions.prints_below,
    functions.starts_a_program,
    functions.reads_stdin,
    functions.where_am_i,
]


def write(folder: Path, items: list[Any]) -> Path:
    file = folder / "rewards.pkl"
    file.write_bytes(pack(as_terms(items))[0])
    return file


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    """One worker that holds every function; a test asks for the terms it is about."""
    folder = tmp_path_factory.mktemp("pool")
    file = write(folder, GOOD_AND_BAD)
    with RewardPool(
        file, workers=1, timeout_seconds=LIMIT, log_path=folder / "logs" / "rewards.log"
    ) as pool:
        yield pool


def take(pool: RewardPool, seconds: float = 60) -> dict[Any, GroupGrades]:
    """Everything that is under way."""
    end = time.monotonic() + seconds
    got: dict[Any, GroupGrades] = {}
    while pool.pending:
        assert time.monotonic() < end, "the pool stands still"
        got |= dict(pool.finished(5))
    return got


def grade(
    pool: RewardPool, names: str, completions: list[str], *, retry: bool = True, **columns: Any
) -> GroupGrades:
    index = {term.name: number for number, term in enumerate(pool.terms)}
    request = GradeRequest([{"role": "user", "content": "?"}], completions, columns, task_id="t1")
    pool.submit("key", request, terms=[index[name] for name in names.split()], retry=retry)
    return take(pool)["key"]


def kinds(grades: GroupGrades) -> list[str]:
    return [g.kind for g in grades]


def log(pool: RewardPool) -> str:
    return pool.log_path.read_text(errors="replace")


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def workers_of(pid: int) -> list[int]:
    """Reward workers below a process; Python's own resource tracker is none."""
    children = psutil.Process(pid).children(recursive=True)
    return [c.pid for c in children if "resource_tracker" not in " ".join(c.cmdline())]


# --- what works ------------------------------------------------------------------------------


def test_terms_of_every_form_are_graded_in_one_call(pool: RewardPool) -> None:
    assert pool.check_start() is None
    grades = grade(
        pool, "right group_right compute_score", ["2", "3"], answer="2", ground_truth="3"
    )
    assert [g.terms for g in grades] == [
        {"right": 1.0, "group_right": 1.0, "compute_score": 0.0},
        {"right": 0.0, "group_right": 0.0, "compute_score": 1.0},
    ]
    assert [g.reward for g in grades] == [2.0, 1.0]
    assert grades.seconds > 0


def test_groups_come_back_under_their_keys(pool: RewardPool) -> None:
    for number in range(50):
        request = GradeRequest("?", [str(number), "x"], {"answer": str(number)}, raw=True)
        pool.submit(number, request, terms=[0])
    assert pool.pending == 50
    got = take(pool)
    assert sorted(got) == list(range(50))
    assert all([g.reward for g in group] == [1.0, 0.0] for group in got.values())
    assert pool.finished(None) == []


def test_an_empty_group_is_graded_at_once(pool: RewardPool) -> None:
    assert len(grade(pool, "right group_right", [])) == 0


def test_numbers_of_every_kind_arrive_as_floats(pool: RewardPool) -> None:
    grades = grade(pool, "number_types", ["a"] * 6)
    assert [g.reward for g in grades] == [1.0, 0.0, 0.5, 0.25, 1.0, 3.0]


def test_rewards_run_in_the_main_thread_with_signals(pool: RewardPool) -> None:
    first = grade(pool, "where_am_i", ["a"])[0].reward
    assert kinds(grade(pool, "alarmed", ["a", "b"], retry=False)) == ["ok", "ok"]
    # The alarm that the function left behind must not strike later: slow takes longer than it.
    assert kinds(grade(pool, "slow", ["a"] * 4, retry=False)) == ["ok"] * 4
    assert grade(pool, "where_am_i", ["a"])[0].reward == first != float(os.getpid())


def test_async_rewards_are_awaited_together(pool: RewardPool) -> None:
    # Eight waits of 0.2 s, one after the other, would be over the limit and not retried.
    assert kinds(grade(pool, "waits", ["a"] * 8, retry=False)) == ["ok"] * 8
    assert kinds(grade(pool, "waits_alone", ["a"] * 8, retry=False)) == ["ok"] * 8


def test_stdin_is_empty(pool: RewardPool) -> None:
    assert grade(pool, "reads_stdin", ["a"])[0].reward == 0.0


def test_many_slow_completions_are_not_taken_for_a_hang(pool: RewardPool) -> None:
    grades = grade(pool, "slow", ["a"] * 8, retry=False)  # 2.4 s against a limit of 1.5 s
    assert kinds(grades) == ["ok"] * 8
    assert grades.seconds > LIMIT


# --- failures --------------------------------------------------------------------------------


def test_exceptions_missing_and_odd_numbers_are_reasons_never_zero(pool: RewardPool) -> None:
    for name, completions, expected in [
        ("key_error", ["a", "b"], ["exception"] * 2),
        ("some_raise", ["a", "bad"], ["ok", "exception"]),
        ("strange_error", ["a"], ["exception"]),
        ("odd_numbers", ["a"] * 4, ["ok", "nonfinite", "ok", "nonfinite"]),
        ("none_for_some", ["a", "skip"], ["ok", "missing"]),
    ]:
        grades = grade(pool, name, completions)
        assert kinds(grades) == expected
        for one in grades:
            assert (one.reward is None) == (one.kind != "ok") == (one.error is not None)
    first_line = str(grade(pool, "key_error", ["a"])[0].error).splitlines()[0]
    assert first_line == "reward 'key_error' raised KeyError: 'missing_key'"


@pytest.mark.parametrize("name", ["spins", "waits_alone", "holds_the_gil"])
def test_a_hang_leaves_only_its_completion_ungraded(pool: RewardPool, name: str) -> None:
    grades = grade(pool, name, ["a", "tower", "b"])
    assert kinds(grades) == ["ok", "timeout", "ok"]
    assert grades[1].error == (
        f"reward '{name}' on completion 2 of task t1 did not answer within 1.5 s; "
        "its process was killed"
    )


def test_a_hang_on_a_whole_group_leaves_the_group_ungraded(pool: RewardPool) -> None:
    grades = grade(pool, "right group_spins", ["tower", "b"], answer="b")
    assert kinds(grades) == ["timeout"] * 2
    assert [g.terms for g in grades] == [
        {"right": 0.0, "group_spins": None},
        {"right": 1.0, "group_spins": None},
    ]
    assert kinds(grade(pool, "group_spins", ["a", "b"])) == ["ok"] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", "killed by signal 9 (SIGKILL); if nobody did it"),
        ("segfault", "killed by signal 11 (SIGSEGV)"),
        ("exit3", "ended its process with status 3"),
        ("exit0", "ended its process with status 0"),
    ],
)
def test_a_worker_that_dies_leaves_only_its_completion_ungraded(
    pool: RewardPool, how: str, says: str
) -> None:
    grades = grade(pool, "dies", ["a", how])
    assert kinds(grades) == ["ok", "died"]
    assert says in str(grades[1].error)


def test_an_idle_worker_killed_from_outside_is_replaced(pool: RewardPool) -> None:
    pid = int(grade(pool, "where_am_i", ["a"])[0].reward or 0)
    os.kill(pid, signal.SIGKILL)
    other = grade(pool, "where_am_i", ["a"])[0].reward
    assert other not in (None, float(pid))


def test_programs_that_a_reward_started_die_with_it(pool: RewardPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    grades = grade(pool, "starts_a_program", ["a"], pid_file=str(file))
    assert kinds(grades) == ["timeout"]
    assert not alive(int(file.read_text()))


def test_misuse_is_refused(pool: RewardPool) -> None:
    pool.submit("twice", GradeRequest("?", ["2"], {"answer": "2"}), terms=[0])
    with pytest.raises(ValueError, match="'twice' is being graded already"):
        pool.submit("twice", GradeRequest("?", ["2"], {"answer": "2"}), terms=[0])
    assert kinds(take(pool)["twice"]) == ["ok"]
    with pytest.raises(ValueError, match="must be above 0"):
        RewardPool(pool.log_path, workers=0, timeout_seconds=1, log_path=pool.log_path)


# --- output ----------------------------------------------------------------------------------


def test_what_rewards_print_is_logged_and_bounded(tmp_path: Path) -> None:
    file = write(tmp_path, [functions.prints, functions.prints_below])
    log_path = tmp_path / "logs" / "rewards.log"
    with RewardPool(file, workers=1, timeout_seconds=30, log_path=log_path) as pool:
        for _ in range(10):  # 20 MiB in all
            assert kinds(grade(pool, "prints", ["a", "b"])) == ["ok", "ok"]
        assert kinds(grade(pool, "prints_below", ["a"])) == ["ok"]  # 50 MB past Python's streams
    text = log(pool)
    assert text.startswith("oooo")
    assert "eeee" in text
    assert text.count("what it prints from now on is dropped") == 1
    assert text.count("later output is dropped") == 1
    assert OUTPUT_LIMIT < log_path.stat().st_size < OUTPUT_LIMIT + (1 << 17)
    assert log_path.stat().st_mode & 0o777 == 0o600


# --- start and end ---------------------------------------------------------------------------


def broken(folder: Path, value: Any) -> Path:
    """Packed rewards whose functions are something else."""
    file = write(folder, [functions.right])
    head, _, _ = file.read_bytes().partition(b"\n")
    file.write_bytes(head + b"\n" + (value if isinstance(value, bytes) else pickle.dumps(value)))
    return file


class EndsTheProcess:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_rewards_that_cannot_be_loaded_are_one_problem_with_its_traceback(tmp_path: Path) -> None:
    file = broken(tmp_path, b"\x80\x04]cno_such_module\nreward\na.")
    with RewardPool(file, workers=1, timeout_seconds=5, log_path=tmp_path / "log") as pool:
        (problem,) = trial(pool, GradeRequest("?", ["a"]))
        assert problem.message.startswith(
            "the rewards could not be loaded: ModuleNotFoundError: No module named 'no_such_module'"
        )
        assert "Traceback (most recent call last)" in problem.message
        assert kinds(grade(pool, "right", ["a"])) == ["exception"]


def test_rewards_that_kill_the_process_when_loaded_are_a_problem(tmp_path: Path) -> None:
    file = broken(tmp_path, [EndsTheProcess()])
    with RewardPool(file, workers=1, timeout_seconds=5, log_path=tmp_path / "log") as pool:
        problem = pool.check_start()
        assert problem is not None
        assert "dies" in problem.message


def test_a_trial_returns_every_problem_at_once(tmp_path: Path) -> None:
    def nothing(completion: str) -> None:
        return None

    items = [
        functions.key_error,
        functions.odd_numbers,
        functions.no_answer_no_list,
        functions.group_spins,
        functions.none_for_some,
        nothing,
        (functions.some_raise, 0),
        functions.without_torch,
    ]
    file = write(tmp_path, items)
    with RewardPool(file, workers=2, timeout_seconds=1, log_path=tmp_path / "log") as pool:
        found = trial(pool, GradeRequest("?", ["skip", "bad", "tower", "a"]))
        light = grade(pool, "without_torch", ["a"])
    messages = [problem.message.splitlines()[0] for problem in found]
    assert messages == [
        "reward 'key_error' raised KeyError: 'missing_key'",
        "reward 'odd_numbers' returned nan for completion 2; a reward is a finite number or None",
        "reward 'no_answer_no_list' returned 0 values for 4 completions",
        "reward 'group_spins' did not answer within 1 s; its process was killed",
        "0 of 4 completions of the trial were graded: reward 'nothing' returned None for "
        "completion 1",
    ]
    assert [warning.splitlines()[0][:45] for warning in found.warnings] == [
        "reward 'some_raise' raised ValueError: no no ",
    ]
    assert light[0].reward == 1.0  # no worker imports what its rewards do not


def by_turns(*odd: int) -> Callable[..., Any]:
    def some(completion: str) -> float | None:
        return None if int(completion) % 2 in odd else 1.0

    return some


@pytest.mark.parametrize(
    ("items", "columns", "graded", "message"),
    [
        ([rewards.json_label_match()], {"answer": '{"a": 1}'}, 4, None),
        (
            [rewards.json_label_match()],
            {"answer": "no labels"},
            0,
            "reward 'json-label-match' returned None for completion 1: the column 'answer' holds "
            "no JSON object or list: 'no labels'",
        ),
        (
            [rewards.exact("answer")],
            {"answer": None},
            0,
            "reward 'exact' returned None for completion 1: the column 'answer' is null",
        ),
        ([by_turns(0)], {}, 2, None),
        (
            [by_turns(0), by_turns(1)],
            {},
            0,
            "reward 'some' returned None for completion 1",
        ),
        ([(rewards.exact("answer"), 0), by_turns()], {"answer": None}, 4, None),
    ],
)
def test_a_trial_without_any_grade_is_refused_with_the_first_reason(
    items: list[Any], columns: dict[str, Any], graded: int, message: str | None, tmp_path: Path
) -> None:
    file = write(tmp_path, items)
    with RewardPool(file, workers=1, timeout_seconds=20, log_path=tmp_path / "log") as pool:
        found = trial(pool, GradeRequest("?", ["0", "1", "2", "3"], columns=columns))
    assert found.graded == graded
    told = f"0 of 4 completions of the trial were graded: {message}"
    assert [problem.message for problem in found] == ([told] if message is not None else [])


def test_a_full_queue_and_a_closed_pool_say_so(tmp_path: Path) -> None:
    file = write(tmp_path, [functions.spins])
    request = GradeRequest("?", ["tower"])
    before = set(workers_of(os.getpid()))
    pool = RewardPool(file, workers=1, timeout_seconds=60, log_path=tmp_path / "log", queue_limit=2)
    try:
        assert pool.check_start() is None
        pool.submit(1, request)
        pool.submit(2, request)
        with pytest.raises(RuntimeError, match="2 groups wait for their grades already"):
            pool.submit(3, request)
        assert pool.finished() == []
        (mine,) = set(workers_of(os.getpid())) - before
    finally:
        pool.close_all()
    pool.close_all()
    assert not alive(mine)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(4, request)


PARENT = """
import json, sys
from pathlib import Path
from nbtrain.rewards import GradeRequest, RewardPool

def main():
    folder = Path(sys.argv[1])
    log = folder / "log"
    pool = RewardPool(folder / "rewards.pkl", workers=2, timeout_seconds=600, log_path=log)
    pool.check_start()
    pool.submit(0, GradeRequest("?", ["a"]), terms=[0])
    pool.finished(None)
    pool.submit(1, GradeRequest("?", ["tower"]), terms=[1])
    print("hanging", flush=True)
    pool.finished(None)

if __name__ == "__main__":
    main()
"""


def test_workers_die_with_their_parent_even_while_one_holds_the_gil(tmp_path: Path) -> None:
    write(tmp_path, [functions.where_am_i, functions.holds_the_gil])
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    root = str(Path(rewards.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "hanging\n"
        workers = workers_of(parent.pid)
        assert len(workers) == 2
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in workers if alive(pid)]


def test_slow_parts_of_a_group_are_spread_over_free_workers(tmp_path: Path) -> None:
    """What they cost is known after the first group, which goes to one worker as a whole."""
    file = write(tmp_path, [functions.slow_pid])
    with RewardPool(file, workers=3, timeout_seconds=30, log_path=tmp_path / "log") as pool:
        request = GradeRequest([{"role": "user", "content": "?"}], ["a"] * 8, {}, task_id="t")
        used = []
        for key in range(4):
            pool.submit(key, request)
            used.append(len({grade.reward for grade in take(pool)[key]}))
        assert used[0] == 1
        assert used[-1] > 1
