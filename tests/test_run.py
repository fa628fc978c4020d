"""A run as an object: state, best checkpoint, waiting, refusals, picture."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored
from shells import interrupting

from nbtrain.client import Client, Detached, NotBuiltYet, NoWeightChanged, Run, tables, waiting
from nbtrain.errors import NotFound, RunEnded, StoreError
from nbtrain.plan.phases import Phase
from nbtrain.processes import process_identity


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def run(client: Client) -> Run:
    return stored.create(client)


def test_state_follows_the_store(run: Run) -> None:
    assert (run.status, run.phase, run.is_over) == ("pending", "RESOLVING_DATASET", False)
    stored.train(run)
    assert (run.status, run.phase) == ("running", "TRAINING")
    stored.step(run, 1)
    assert run.progress.completed_steps == 1
    assert run.progress.total_steps == 8
    assert run.progress.attempted_trajectories == 2
    assert run.progress.graded_trajectories == 2
    stored.finish(run, Phase.FAILED, failure="the disk is full")
    assert (run.status, run.failure, run.is_over) == ("failed", "the disk is full", True)


def test_every_name_of_the_id_is_the_id(run: Run) -> None:
    assert run.id == run.run_id == run.training_run_id
    assert len(run.id) == len(run.config_hash) == 64


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))]
)
def test_what_is_read_from_the_store_is_copied_and_pickled_with_its_place(
    client: Client, run: Run, again: Callable[[Any], Any]
) -> None:
    stored.train(run)
    stored.step(run, 1)
    saved = stored.save(run, 1)
    assert "step 1" in repr(run)
    other = again(run)
    assert other == run
    assert repr(other) == repr(run)
    (checkpoint,) = again(run.checkpoint_list())
    assert checkpoint.checkpoint_id == saved
    assert checkpoint._store.url == run._store.url
    listed = client.training.checkpoints.list(run)
    assert again(listed).items == listed.items
    assert again(client.training.runs.list()).items == [run]
    tried = again(list(client.trajectories.list(run)))
    assert [each.completion for each in tried] == ["answer 1.0", "answer 1.1"]


def test_what_was_pickled_makes_no_store_where_there_is_none(run: Run, home: Path) -> None:
    held = pickle.dumps(run)
    run._store.close()
    home.rename(home.with_name("moved"))
    with pytest.raises(StoreError, match=r"nbtrain.db is not there: what was copied or pickled"):
        pickle.loads(held)
    assert not home.exists()


def test_a_run_whose_host_is_gone_reads_failed(client: Client, run: Run) -> None:
    stored.train(run)
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = process_identity(gone.pid)
    assert who is not None
    store = stored.store_of(client)
    store.update_attempt(
        run._key, 1, host_pid=who.pid, host_start_time=who.start_time, boot_id=who.boot_id
    )
    assert run.status == "running"
    gone.kill()
    gone.wait()
    assert run.status == "failed"
    assert "is gone" in (run.failure or "")


def test_a_silent_run_is_told_apart_from_a_failed_one(client: Client, run: Run) -> None:
    stored.train(run)
    assert run.unresponsive_since is None
    long_ago = time.time() - 600
    stored.store_of(client).update_attempt(run._key, 1, heartbeat_at=long_ago, started_at=long_ago)
    assert run.status == "running"
    assert run.unresponsive_since == pytest.approx(long_ago)
    assert "unresponsive since" in repr(run)


def test_what_a_run_does_now_is_shown_until_it_is_over(client: Client, run: Run) -> None:
    store = stored.store_of(client)
    store.heartbeat(run._key, 1, "rank", activity="start checks: 3 of <8> ended")
    assert run.progress.activity == "start checks: 3 of <8> ended"
    assert repr(run).splitlines()[1] == "now: start checks: 3 of <8> ended"
    assert "now: start checks: 3 of &lt;8&gt; ended" in run._repr_mimebundle_()["text/html"]
    stored.finish(run, Phase.FAILED, failure="out of memory")
    assert run.progress.activity is None
    assert "now:" not in repr(run)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([(0, 0.1, True), (2, 0.5, True), (4, 0.3, True)], 2),
        ([(0, 0.1, True), (2, 0.5, True), (4, 0.5, True)], 2),
        ([(0, 0.1, True), (2, 0.9, False), (4, 0.2, True)], 4),
        ([(0, 0.3, True), (2, None, True), (4, 0.2, True)], 0),
        ([(2, -0.5, True), (4, -0.2, True)], 4),
    ],
)
def test_best_is_the_earliest_with_the_highest_complete_round(
    run: Run, rounds: list[tuple[int, float | None, bool]], expected: int
) -> None:
    stored.train(run)
    for number in (0, 2, 4):
        stored.save(run, number)
    for number, reward, complete in rounds:
        stored.validate(run, number, reward, complete=complete)
    best = run.best()
    assert best.step_index == expected
    assert best.round_completed
    assert best.base_model_slug == "nbtrain/tiny"
    assert best.training_run_id == run.id


def test_best_needs_a_complete_round_and_weights(run: Run) -> None:
    stored.train(run)
    stored.save(run, 2, weights=False)
    stored.save(run, 4)
    stored.validate(run, 2, 0.9)
    stored.validate(run, 4, 0.9, complete=False)
    with pytest.raises(LookupError, match="no checkpoint with a complete validation round"):
        run.best()


def test_wait_returns_the_run_that_succeeded(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1)
    threading.Timer(0.3, stored.finish, (run,)).start()
    assert run.wait(timeout=20) is run


def test_wait_raises_with_the_reason(run: Run) -> None:
    stored.finish(run, Phase.FAILED, failure="the reward raised ValueError")
    with pytest.raises(RunEnded, match="the reward raised ValueError"):
        run.wait()


def test_wait_raises_for_a_cancelled_run(run: Run) -> None:
    stored.finish(run, Phase.CANCELLED)
    with pytest.raises(RunEnded, match="was cancelled"):
        run.wait()


def test_wait_gives_up_after_its_timeout_and_says_that_the_run_goes_on(run: Run) -> None:
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(timeout=0.2)


def test_a_run_without_an_update_says_that_no_weight_changed(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1, update_applied=False, skip_reason="no eligible group")
    stored.finish(run)
    with pytest.warns(NoWeightChanged, match="no weight changed"):
        run.wait()
    assert repr(run).splitlines()[0].count("no weight changed") == 1


def test_an_interrupt_only_stops_the_waiting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.train(run)
    monkeypatch.setattr(waiting, "time", interrupting())
    with pytest.raises(Detached, match=r"goes on in the background.*run\.cancel\(\)"):
        run.wait(timeout=20)
    assert run.status == "running"
    assert not run._store.commands(run._key)


def test_cancel_asks_once_and_leaves_an_ended_run_alone(client: Client, run: Run) -> None:
    stored.train(run)
    run.cancel().cancel()
    assert [c["command"] for c in stored.store_of(client).commands(run._key)] == ["cancel"]
    over = stored.create(client, "over")
    stored.finish(over)
    over.cancel()
    assert not stored.store_of(client).commands(over._key)


@pytest.mark.parametrize("name", ["pause", "resume", "branch", "evaluate"])
def test_what_comes_later_is_refused_by_name(run: Run, name: str) -> None:
    with pytest.raises(NotBuiltYet, match=rf"Run\.{name} is not built yet"):
        getattr(run, name)()


def test_the_summary_tells_why_trajectories_were_not_graded(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1, rewards=(None, None, None, 1.0), errors=("a", "b", "b", None))
    told = repr(run)
    assert "3 not graded, most often: b" in told
    assert "most trajectories not graded" in told
    stored.step(run, 2, rewards=[None] * 4, errors=["a"] * 4)
    assert "7 not graded, most often: a" in repr(run)


def test_a_best_that_is_not_there_says_how_much_was_graded(run: Run) -> None:
    stored.train(run)
    stored.save(run, 2)
    stored.validate(run, 2, 0.5, complete=False)
    with pytest.raises(NotFound, match="20 of 50 held-out samples were graded at step 2"):
        run.best()


def test_texts_show_what_the_model_wrote(run: Run) -> None:
    stored.train(run)
    assert list(run.texts().columns) == list(tables.TEXT_COLUMNS)
    assert run.texts().empty
    stored.step(run, 1)
    stored.step(run, 2, rewards=(0.0, 1.0, None))
    newest = run.texts()
    assert newest["step"].tolist() == [2, 2, 2]
    assert newest["prompt"].tolist() == ["question 2"] * 3
    assert newest["completion"].tolist() == ["answer 2.0", "answer 2.1", "answer 2.2"]
    assert newest["terms"][1] == {"exact": 1.0}
    assert newest["reward"].tolist()[:2] == [0.0, 1.0]
    assert newest["trajectory_id"][0].startswith(run.id[:12])
    first = run.texts(step=1, limit=1)
    assert first["completion"].tolist() == ["answer 1.0"]
    assert first.attrs["left_off"] == 1
    assert run.texts(split="held_out").empty
    with pytest.raises(ValueError, match="'train' or 'held_out'"):
        run.texts(split="test")


def test_what_is_refused_by_name_is_not_offered(run: Run) -> None:
    offered = dir(run)
    assert {"best", "texts", "wait", "cancel"} <= set(offered)
    assert not {"pause", "branch", "evaluate"} & set(offered)


def test_a_refusal_says_a_thing_once_and_names_the_way(run: Run) -> None:
    with pytest.raises(NotBuiltYet) as refused:
        run.branch()
    told = str(refused.value)
    assert told.count("not built yet") == 1
    assert "%%train --from" in told


def test_a_plan_shows_itself_as_a_dry_run_does(client: Client, run: Run) -> None:
    view = client.training.resolve(options=stored.OPTIONS, bench_id="sums", display_name="first")
    assert repr(run.plan) == repr(view)
    assert run.plan._repr_html_() == view._repr_html_()  # type: ignore[attr-defined]


def test_repr_is_text_html_and_a_small_picture(run: Run) -> None:
    stored.train(run)
    for number in range(1, 5):
        stored.step(run, number, number / 5)
    stored.validate(run, 4, 0.4)
    stored.save(run, 4)
    bundle = run._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    assert "step 4 of 8" in bundle["text/plain"] == repr(run)
    assert "<script" not in bundle["text/html"]
    assert run.id[:12] in bundle["text/html"]
    assert len(bundle["image/png"]) < 30_000
    assert bundle["image/png"].startswith("iVBORw0KGgo")


def test_a_run_without_a_step_has_no_picture(run: Run) -> None:
    assert set(run._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_text_of_the_job_is_escaped(run: Run) -> None:
    stored.finish(run, Phase.FAILED, failure="<script>alert(1)</script>")
    assert "<script" not in run._repr_mimebundle_()["text/html"]
    assert "<script>" in repr(run)


def test_what_is_not_finite_does_not_break_the_picture(run: Run) -> None:
    stored.train(run)
    for number, reward in enumerate((0.1, float("nan"), float("inf"), None, 0.4), 1):
        stored.step(run, number, reward)
    figure = run.plot()
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata()) == [0.1, 0.4]


def test_plot_leaves_pyplot_alone(run: Run) -> None:
    import matplotlib.pyplot as plt

    stored.train(run)
    stored.step(run, 1)
    before = plt.get_fignums(), plt.get_backend()
    run.plot()
    assert (plt.get_fignums(), plt.get_backend()) == before


def test_the_summary_reads_only_what_is_new_and_ends_whole(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1, 0.1)
    glance = run.glance()
    assert [r for _, r in glance.refresh().rewards] == [0.1]
    stored.step(run, 2, 0.2)
    stored.writer(run).commit_step(
        {"step": 3, "avg_reward": 0.3, "update_applied": True, "settled": False}
    )
    assert [r for _, r in glance.refresh().rewards] == [0.1, 0.2, 0.3]
    stored.writer(run).commit_step(
        {"step": 4, "avg_reward": 0.4, "update_applied": True},
        amend={3: {"avg_reward": 0.35, "settled": True}},
    )
    stored.finish(run)
    assert [r for _, r in glance.refresh().rewards] == [0.1, 0.2, 0.35, 0.4]


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        (0, "groups of the last step: 4 used, 3 of them without signal"),
        (3, "groups of the last step: 4 used, 3 no signal"),
        (2, "groups of the last step: 4 used, 1 of them without signal, 2 no signal"),
        (None, "groups of the last step: 4 used, 3 no signal"),
    ],
)
def test_a_group_without_signal_that_trains_is_one_of_the_used(
    run: Run, left_out: int | None, told: str
) -> None:
    stored.train(run)
    metrics = {} if left_out is None else {"metrics": {"no_signal_not_trained": left_out}}
    stored.step(run, 1, used_groups=4, no_signal_groups=3, **metrics)
    assert told in repr(run).splitlines()
    stored.step(run, 2, used_groups=4, no_signal_groups=3, pending_groups=1, **metrics)
    assert "of them" not in repr(run), "one of them may be the one that waits"


def test_the_summary_sees_what_changes_of_steps_that_were_not_settled(run: Run) -> None:
    stored.train(run)
    write = stored.writer(run).commit_step
    for number in range(1, 31):
        write({"step": number, "avg_reward": 0.1, "settled": number not in (4, 29)})
    glance = run.glance()
    assert len(glance.refresh().rewards) == 30
    write({"step": 31, "avg_reward": 0.2}, amend={4: {"avg_reward": 0.4, "settled": True}})
    seen = dict(glance.refresh().rewards)
    assert (len(seen), seen[4], seen[29], seen[31]) == (31, 0.4, 0.1, 0.2)
    write({"step": 32, "avg_reward": 0.3}, amend={29: {"avg_reward": 0.9, "settled": True}})
    seen = dict(glance.refresh().rewards)
    assert (len(seen), seen[29], list(seen)) == (32, 0.9, list(range(1, 33)))


def test_turns_are_shown_with_their_roles(client: Client, run: Run) -> None:
    stored.train(run)
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    turns = [
        {"role": "assistant", "content": "let me <see>", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 3"}]},
    ]
    text = {"prompt": [{"role": "user", "content": "1 + 2?"}], "completion": turns, "terms": {}}
    row = {"trajectory_id": 1, "group_id": 1, "sample": 0, "reward": 1.0, "turns": 2}
    stored.writer(run).commit_step({"step": 1}, (), [row | {"text": text, "verdict": "<used>"}])
    told = [
        "assistant: let me <see>",
        'calls add {"a": 1, "b": 2}',
        "tool (add): 3",
        "assistant: It is 3",
    ]
    assert run.texts()["completion"][0].splitlines() == told
    assert "&lt;see&gt;" in run.texts().to_html()
    (item,) = client.trajectories.list(run.id)
    assert item.transcript.splitlines() == ["user: 1 + 2?", *told]
    assert item.completion == turns
    assert "&lt;see&gt;" in item._repr_html_()
    assert "<used>" not in item._repr_html_()
    assert run.trajectories["turns"].tolist() == [2]


def test_the_log_is_text_and_says_what_it_leaves_off(run: Run) -> None:
    assert run.log == ""
    logs = run.folder / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("".join(f"line {n}\n" for n in range(20_000)))
    log = run.log
    assert log.splitlines()[-1] == "line 19999"
    assert "bytes are left off" in log.splitlines()[0]
    assert len(log) < 70_000


def test_the_log_shows_itself_without_progress_bars(run: Run) -> None:
    from IPython.lib.pretty import pretty

    logs = run.folder / "logs"
    logs.mkdir()
    text = (
        "loading\n"
        "\r  0%|          | 0/2 [00:00<?, ?it/s]\r100%|####| 2/2 [00:01<00:00, 2.0it/s]\n"
        "counting 1\rcounting 2\n"
        "/x/transformers/utils.py:7: FutureWarning: old\n"
        "  warnings.warn('old')\n"
        "/x/mine.py:3: FutureWarning: mine\n"
        "  mine()\n"
        "windows\r\n"
        "a budget is 100% | used\n"
    )
    (logs / "rank0.log").write_bytes(text.encode())
    assert run.log == f"== rank0.log ==\n{text}"
    assert pretty(run.log).splitlines() == [
        "== rank0.log ==",
        "loading",
        "counting 2",
        "/x/mine.py:3: FutureWarning: mine",
        "  mine()",
        "windows",
        "a budget is 100% | used",
    ]


def test_a_used_up_budget_says_how_to_go_on(client: Client) -> None:
    one = stored.create(client, "one")
    stored.step(one, 1)
    stored.save(one, 0)
    last = stored.save(one, 1)
    stored.finish(one, ended="max_total_trajectories (9) was reached after step 1")
    told = f"was reached after step 1; go on with: %%train --from {last[:12]}"
    assert told in repr(one)
    assert one.ended == "max_total_trajectories (9) was reached after step 1"
    other = stored.create(client, "other")
    stored.save(other, 0)
    stored.finish(other, ended="nothing left to learn from these tasks")
    assert "go on with" not in repr(other)


def test_runs_are_equal_by_id(client: Client, run: Run) -> None:
    again = client.training.runs.get("first")
    assert again == run
    assert len({again, run}) == 1
    assert run != stored.create(client, "second")
