"""The start checks alone, in a process of their own: of both methods, and of what breaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from described import plan_of as reinforcement
from described import sums
from supervised_world import World, chats, write_jsonl

from nbtrain import processes
from nbtrain.client.checking import run_checks
from nbtrain.plan.resolved import ResolvedPlan, SmokeRef
from nbtrain.store import open_store
from nbtrain.training import check
from nbtrain.training.supervised import smoke


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


class Command:
    """Runs the command in ``folder`` and reads what it leaves."""

    def __init__(self, folder: Path, plan: object) -> None:
        self.folder, self.out = folder / "work", folder / "checks.json"
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps(plan), "utf-8")

    @property
    def argv(self) -> list[str]:
        argv = [sys.executable, "-P", "-m", "nbtrain.training.check", "--plan", str(self.plan)]
        return [*argv, "--out", str(self.out), "--folder", str(self.folder)]

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv, capture_output=True, text=True, timeout=300, check=False)

    def here(self) -> int:
        """The same in this process, which saves seconds of imports."""
        return check.main(self.argv[4:])

    def found(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Checks by name, and problems."""
        found = json.loads(self.out.read_text("utf-8"))
        assert found.keys() == {"checks", "problems"}
        assert not list(self.out.parent.glob("*.partial"))
        return {check["name"]: check for check in found["checks"]}, found["problems"]


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not to die with the one that started the tests."""
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)


def told_in(output: str) -> list[str]:
    return [json.loads(line)["doing"] for line in output.splitlines()]


def count(world: World) -> int:
    return len(world.store.runs())


def test_a_supervised_plan_that_would_train(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = world.plan(chats(6), validation=chats(2), packing=True)
    command = Command(tmp_path, plan.to_json())
    assert command.here() == 0
    checks, problems = command.found()
    told = told_in(capsys.readouterr().out)
    assert problems == []
    assert {check["verdict"] for check in checks.values()} <= {"passed", "warned"}
    assert checks["trained_tokens"]["said"].startswith("56 of ")
    assert checks["packing"]["measured"] < 0.005
    assert checks["adapter_targets"]["measured"] == 21
    assert "validation.trained_tokens" in checks
    assert any("reading the dataset" in line for line in told)
    assert "loading the model" in told
    assert count(world) == 0
    assert list(command.folder.iterdir()) == []


def test_everything_wrong_with_a_supervised_plan_at_once(world: World, tmp_path: Path) -> None:
    rows = chats(6)
    rows[2]["messages"][1]["content"] = "long " * 60
    rows[4]["mask"] = [0, 0]
    path = write_jsonl(tmp_path / "rows.jsonl", rows, blank=[0, 3])
    plan = world.plan(path, lora_target_modules="nothing", explicit_loss_mask_column="mask")
    command = Command(tmp_path, plan.to_json())
    assert command.here() == 0
    checks, problems = command.found()
    lines = {p["where"]["line"] for p in problems if p["where"] is not None}
    assert {4, 7} <= lines
    said = " ".join(p["message"] for p in problems)
    assert "longer than maxSeqLength 200" in said
    assert "no token of this row is trained" in said
    assert "lora.targetModules" in said
    assert checks["adapter_targets"]["verdict"] == "refused"


def test_a_smoke_check_reads_its_slice_alone(world: World, tmp_path: Path) -> None:
    rows = chats(6)
    rows[4]["messages"][1]["content"] = "long " * 60
    plan = replace(world.plan(rows, validation=chats(2)), smoke=SmokeRef(4, 50, 0.9))
    command = Command(tmp_path, plan.to_json())
    assert command.here() == 0
    checks, problems = command.found()
    assert problems == []
    assert "in 4 rows" in checks["trained_tokens"]["said"]
    assert not any(name.startswith("validation") for name in checks)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_dataset_whose_file_was_changed_is_not_trained_on(
    world: World, tmp_path: Path, method: str
) -> None:
    rows = sums(6)
    plan = (
        world.plan(chats(6))
        if method == "sft"
        else reinforcement(world.datasets.register("sums", rows))
    )
    assert plan.dataset is not None
    file = world.datasets.get(plan.dataset.dataset_id).folder / "rows.jsonl"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"3", b"4"))
    command = Command(tmp_path, plan.to_json())
    command.here()
    _, problems = command.found()
    (said,) = [p["message"] for p in problems if "registered" in p["message"]]
    assert "is not what was registered; register it again" in said


def test_the_templates_ids_are_compared_in_sixteen_rows_or_more(
    world: World, tmp_path: Path
) -> None:
    rows = [row | {"mask": [0, 1]} for row in chats(40)]
    plan = world.plan(rows, explicit_loss_mask_column="mask")
    command = Command(tmp_path, plan.to_json())
    command.here()
    tried = command.found()[0]["template_round_trip"]
    assert (tried["measured"], tried["verdict"]) == (0, "passed")
    assert tried["said"].startswith("0 of 20 rows tried have other ids")
    rows = [row | {"mask": [0, 0]} for row in chats(3)]
    command = Command(tmp_path, world.plan(rows, explicit_loss_mask_column="mask").to_json())
    command.here()
    tried = command.found()[0]["template_round_trip"]
    assert tried["measured"] is None
    assert tried["said"].startswith("not tried")


@pytest.fixture
def tasks(world: World) -> ResolvedPlan:
    return reinforcement(world.datasets.register("sums", sums(6)))


def test_a_reinforcement_plan_that_would_train(
    world: World, tasks: ResolvedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, tasks.to_json())
    assert command.here() == 0
    checks, problems = command.found()
    told = told_in(capsys.readouterr().out)
    assert problems == []
    assert checks["reward_answers"]["measured"] == 1.0
    assert any("loading the model" in line for line in told)
    assert count(world) == 0


def test_prompts_that_leave_no_room_are_named_by_line(world: World, tmp_path: Path) -> None:
    rows = sums(4)
    rows[2]["messages"][0]["content"] = "What is " + "1 + " * 200 + "3?"
    path = write_jsonl(tmp_path / "rows.jsonl", rows, blank=[1])
    plan = reinforcement(world.datasets.register("sums", path))
    command = Command(tmp_path, plan.to_json())
    done = command.run()
    assert done.returncode == 0, done.stderr
    checks, problems = command.found()
    assert told_in(done.stdout)
    assert checks["longest_prompt"]["verdict"] == "refused"
    assert [p["where"]["line"] for p in problems if p["where"]] == [4]


def test_what_cannot_be_checked_is_said_in_a_sentence(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, {"settings": {}})
    assert command.here() == 1
    assert not command.out.exists()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "the start checks could not be made: KeyError: 'workload'"
    )


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
for line in child.stdout:
    if "loading the model" in line:
        print(child.pid, flush=True)
import time; time.sleep(600)
"""


def test_it_dies_with_its_parent_and_so_do_its_workers(tasks: ResolvedPlan, tmp_path: Path) -> None:
    command = Command(tmp_path, tasks.to_json())
    argv = [sys.executable, "-c", PARENT, *command.argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        checking = psutil.Process(int(parent.stdout.readline()))
        family = [checking, *checking.children(recursive=True)]
        assert len(family) > 1
        os.kill(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(_lives, family)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_lives, family))
    assert not command.out.exists()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_the_client_reads_what_it_writes(world: World, tmp_path: Path) -> None:
    rows = chats(4)
    rows[1]["messages"][1]["content"] = "long " * 60
    path = write_jsonl(tmp_path / "rows.jsonl", rows, blank=[0])
    told: list[str] = []
    report = run_checks(world.store, world.plan(path), told.append)
    assert not report.ok
    assert "line 3" in repr(report)
    assert "loading the model" in told


CHECKING = """
import os, signal, sys
from pathlib import Path
from nbtrain.client.checking import run_checks
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import open_store
import json
plan = ResolvedPlan.from_json(json.loads(Path(sys.argv[1]).read_text()))
def told(line):
    print(line, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
run_checks(open_store(), plan, told)
"""


def test_what_a_killed_check_left_goes_with_the_next(world: World, tmp_path: Path) -> None:
    (plan := tmp_path / "plan.json").write_text(json.dumps(world.plan(chats(2)).to_json()))

    def check(how: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", CHECKING, str(plan), how]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = os.environ | {"NBTRAIN_HOME": str(world.store.home)}
        return subprocess.Popen(argv, text=True, env=env, **pipes)  # type: ignore[call-overload]

    with check("killed") as killed:
        assert killed.wait(60) == -signal.SIGKILL
    (left,) = (world.store.home / "checks").iterdir()
    assert (left / "check.log").stat().st_mode & 0o777 == 0o600
    with check("alive") as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline()
        (living,) = (world.store.home / "checks").iterdir()
        assert living != left
        assert run_checks(world.store, world.plan(chats(2))).ok
        assert living.exists()
        alive.communicate("\n" * 100, timeout=60)
        assert alive.returncode == 0
    assert list((world.store.home / "checks").iterdir()) == []


def test_a_checkpoint_that_cannot_be_gone_on_from_is_told(world: World, tmp_path: Path) -> None:
    parent, _ = world.train(world.plan(chats(4), epochs=1))
    plan = world.plan(chats(4), parent=parent, lora_rank=8, epochs=1)
    command = Command(tmp_path, plan.to_json())
    assert command.here() == 0
    _, problems = command.found()
    assert [p["field"] for p in problems] == ["training.epochs", "parent_checkpoint_id"]
    assert "does not fit" in problems[1]["message"]


def test_a_model_that_cannot_write_is_no_model_for_a_smoke_check(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*given: object, **named: object) -> None:
        msg = "its cache cannot be copied"
        raise ValueError(msg)

    monkeypatch.setattr(smoke, "decoder", unable)
    plan = replace(world.plan(chats(4)), smoke=SmokeRef(4, 50, 0.9))
    command = Command(tmp_path, plan.to_json())
    assert command.here() == 0
    _, (problem,) = command.found()
    assert problem["field"] == "smoke"
    assert problem["message"].endswith("smoke check: its cache cannot be copied")
