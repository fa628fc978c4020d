"""The kill matrix with the real rank and a real reward worker that hangs holding the GIL.

Everything else about the supervision is tried with a stand-in rank in ``test_kill_matrix.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from stub_runs import host_of, nothing_left, processes_of, rank_of, until
from tiny_models import byte_tokenizer, tiny_model

from nbtrain.client import Client
from nbtrain.jobs.control import request_cancel
from nbtrain.jobs.liveness import reap
from nbtrain.plan.phases import Phase
from nbtrain.store import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")


@pytest.mark.parametrize(
    ("kill", "phase", "says"),
    [
        ("host", Phase.FAILED, "host process"),
        pytest.param("rank", Phase.FAILED, "signal 9 (SIGKILL)", marks=pytest.mark.long),
        pytest.param("cancel", Phase.CANCELLED, "cancelled", marks=pytest.mark.long),
    ],
)
def test_a_hanging_reward_and_what_it_started_end_with_the_run(
    kill: str, phase: Phase, says: str, home: Path, tmp_path: Path
) -> None:
    folder, armed, hanging = (tmp_path / name for name in ("model", "armed", "hanging"))
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)

    def hangs(completion: str, task: dict[str, object]) -> float:
        import re
        import subprocess

        if armed.exists():
            # A program of the user's own, in a session of its own, that nobody waits for.
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            hanging.touch()
            re.match("(a+)+$", "a" * 64 + "b")
        return float(len(completion) % 3)

    client = Client()
    client.base_models.select(folder, name="tiny-llama")
    client.workloads.create(
        "hangs",
        tasks=[{"prompt": f"say {n}"} for n in range(8)],
        rewards=[hangs],
        base_model="tiny-llama",
        raw=True,
    )
    started = client.training.create(
        bench_id="hangs",
        options={
            "num_steps": 50,
            "batch_size": 2,
            "group_size": 2,
            "max_output_tokens_per_trajectory": 4,
            "max_output_tokens_per_turn": 4,
            "val_enabled": False,
        },
    )
    with open_store() as store:
        run = store.find_run(started.id)
        # The trial of the reward and a first step pass.
        until(lambda: store.run(run.key).completed_steps or store.run(run.key).ended_for_good, 120)
        armed.touch()
        until(lambda: hanging.exists() or store.run(run.key).ended_for_good, 60.0)
        assert hanging.exists(), store.run(run.key).failure
        assert any("sleep 600" in one for one in processes_of(run))
        if kill == "host":
            os.kill(host_of(store, run).pid, signal.SIGKILL)
            assert until(lambda: not processes_of(run), 5.0), processes_of(run)
        elif kill == "rank":
            os.kill(rank_of(store, run).pid, signal.SIGKILL)
        else:
            request_cancel(store, run)
        until(lambda: reap(store, run) or store.run(run.key).ended_for_good, 15.0)
        nothing_left(store, run)
        ended = store.run(run.key)
    assert ended.phase is phase
    assert says in (ended.failure or ended.ended or "")
