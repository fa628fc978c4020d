"""Checkpoints as the client shows and picks them: intervals, ties, the rank, the export."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import stored
from sqlalchemy import event, insert

from nbtrain.client import Client, Run, picking
from nbtrain.client.held_out import rounds_read
from nbtrain.client.records import Checkpoint
from nbtrain.errors import Refused
from nbtrain.store import Store, tables

WORSE = [0.0] * 20
NEAR = [1.0] * 17 + [0.0, 1.0, 0.0]
ABOUT_BEST = "best: the earliest checkpoint whose difference to the highest may be nothing"
TOP = [1.0] * 16 + [0.0, 1.0, 1.0, 1.0]


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def run(client: Client) -> Run:
    """A run whose checkpoint at step 5 ties with the top, at step 20, and one without a round."""
    run = stored.create(client, num_steps=30)
    stored.train(run)
    for step, scores in ((0, WORSE), (5, NEAR), (20, TOP)):
        stored.scored(run, step, scores)
    stored.save(run, 25)
    return run


def test_best_is_the_earliest_that_ties_with_the_top(run: Run) -> None:
    best = run.best()
    assert (best.step_index, best.ties_with) == (5, 20)
    assert best.held_out_low is not None
    assert best.held_out_high is not None
    assert best.held_out_low < 0.9 < best.held_out_high
    told = repr(best)
    assert "held-out 0.900 [0.7" in told
    assert "ties with step 20 (0.950)" in told
    assert "ties with" not in repr(run.checkpoint_list()[2])


def test_rounds_have_their_intervals(client: Client, run: Run) -> None:
    stored.validate(run, 26, 0.5, complete=False, samples=[("a", 1.0, "ENV_DONE")] * 4)
    frame = run.validation.set_index("step")
    assert frame.loc[0, ["low", "high"]].tolist() == [0.0, 0.0]
    assert frame.loc[5, "low"] < frame.loc[5, "held_out_reward"] < frame.loc[5, "high"]
    assert frame.loc[26, ["low", "high"]].isna().all()
    points = client.training.rewards.list_held_out_rewards("first")
    assert points[1].low == frame.loc[5, "low"]
    assert {"low", "high"} <= set(points.to_frame().columns)
    assert "tasks" not in points.to_frame().columns


def test_what_a_limit_cut_counts_nothing_in_the_interval_too(run: Run) -> None:
    samples = [(f"{n}", 1.0, "TRUNCATION") for n in range(8)]
    stored.validate(run, 27, 0.0, samples=samples)
    assert run.validation.set_index("step").loc[27, ["low", "high"]].tolist() == [0.0, 0.0]


def test_the_frame_tells_intervals_and_ties(client: Client, run: Run) -> None:
    frame = run.checkpoints.set_index("step_index")
    assert frame["tie"].isna().tolist() == [True, False, True, True]
    assert frame.loc[5, "tie"] == 20
    assert frame.loc[5, "low"] == run.best().held_out_low
    assert frame.loc[25, ["low", "high"]].isna().all()
    tuned = stored.create_supervised(client)
    assert not {"low", "high", "tie"} & set(tuned.checkpoints)
    assert "low" not in tuned.validation


def test_a_listing_is_by_step_and_shown_so_with_ranks(client: Client, run: Run) -> None:
    listing = client.training.checkpoints.list("first")
    assert [c.step_index for c in listing] == [0, 5, 20, 25]
    assert [c.step_index for c in picking.ranked(run)] == [5, 20, 0, 25]
    lines = repr(listing).splitlines()
    assert lines[0] == "4 checkpoints by step, the best is [1]"
    assert [line.split("step ")[1].split(" ")[0] for line in lines[1:5]] == ["0", "5", "20", "25"]
    assert [line[:3] for line in lines[1:5]] == ["[0]", "[1]", "[2]", "[3]"]
    assert lines[2].endswith("rank 1, best (ties with step 20)")
    assert lines[3].endswith("rank 2, highest")
    assert lines[1].endswith("rank 3")
    assert "rank" not in lines[4]
    assert lines[5] == ABOUT_BEST
    shown = listing._repr_html_()
    assert "best (ties with step 20)" in shown
    assert ">highest<" in shown
    assert shown.count(ABOUT_BEST) == 1
    assert "0.950 [" in shown
    assert "1 kB" in shown
    assert repr(run.checkpoint_list()) == repr(listing)
    empty = client.training.checkpoints.list(stored.create(client, "empty"))
    assert repr(empty) == "0 checkpoints"
    assert "ties_with" in empty.to_frame().columns


def test_the_summary_shows_intervals_and_ties(run: Run) -> None:
    bundle = run._repr_mimebundle_()
    for form in ("text/plain", "text/html"):
        assert "best (ties with step 20)" in bundle[form]
        assert "highest" in bundle[form]
        assert bundle[form].count(ABOUT_BEST) == 1
    assert len(bundle["image/png"]) < 28_000
    assert run.glance().refresh().held_out[1].low is not None


def test_a_checkpoint_found_by_its_id_knows_its_tie(client: Client, run: Run) -> None:
    found = client.training.checkpoints.get(run.best().checkpoint_id[:10])
    assert found.ties_with == 20


def test_an_attempt_that_comes_back_hides_its_rounds(client: Client, run: Run) -> None:
    run._store.move_phase(run._key, "FAILED", attempt=1)
    stored.host(run._store, run._key, 2)
    again = stored.RunWriter(run._store, run._key, 2)
    again.supersede_after(5)
    assert [c.step_index for c in run.checkpoint_list()] == [0, 5]
    assert (run.best().step_index, run.best().ties_with) == (5, None)


def test_a_round_is_read_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    held_out = Store.held_out

    def counted(store: Store, run_key: int, steps: set[int]) -> list[tuple[object, ...]]:
        asked.append(set(steps))
        return held_out(store, run_key, steps)

    monkeypatch.setattr(Store, "held_out", counted)
    run.best()
    run.best()
    stored.scored(run, 28, TOP)
    run.checkpoints  # noqa: B018
    assert asked == [{0, 5, 20}, {28}]


def test_few_rounds_of_many_trajectories_are_read_by_their_own_rows(client: Client) -> None:
    run = stored.create(client, "long", num_steps=2000)
    stored.train(run)
    for step in range(0, 2001, 100):
        stored.scored(run, step, [n % 7 / 7 for n in range(50)])
    rows = [
        {"run": run._key, "attempt": 1, "step": 1 + n // 100, "split": "train",
         "trajectory_id": n, "reward": 0.5}
        for n in range(100_000)
    ]  # fmt: skip
    others = [
        {"run": run._key, "attempt": 1, "step": 1 + n // 50, "split": "held_out",
         "trajectory_id": n, "reward": 0.5, "task_id": "x"}
        for n in range(100_000)
    ]  # fmt: skip
    with stored.store_of(client).database.writing() as connection:
        connection.execute(insert(tables.trajectories), rows)
        connection.execute(insert(tables.trajectories), others)
    rounds = run._rows("validation_rounds")
    read = rounds_read(run._store, rounds, {c.step for c in run._store.checkpoints(run._key)})
    assert len(read) == 21
    asked: list[tuple[str, tuple[object, ...]]] = []
    engine = run._store.engine
    event.listen(engine, "before_cursor_execute", lambda *seen: asked.append((seen[2], seen[3])))
    run._store.held_out(run._key, {100, 200})
    (query, values) = next(each for each in asked if "trajectories" in each[0])
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
    assert "ix_trajectories_step" in str(plan)


# Export


def saved_files(run: Run, tmp_path: Path) -> Checkpoint:
    """The best checkpoint with small files in its folder that are those of its manifest."""
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": null, "r": 4}')
    names = ("adapter_model.safetensors", "adapter_config.json")
    digests = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    identity = {"tokenizer_fingerprint": "t", "config_hash": "c", "workload_id": "w"}
    manifest = json.dumps({"weights": digests, "identity": identity}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    return replace(run.best(), checkpoint_id=hashlib.sha256(manifest).hexdigest(), path=str(folder))


def test_an_export_holds_the_adapter_and_where_it_came_from(run: Run, tmp_path: Path) -> None:
    checkpoint = saved_files(run, tmp_path)
    out = checkpoint.export(tmp_path / "new" / "adapter")
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "nbtrain.json",
    ]  # fmt: skip
    assert (out / "adapter_model.safetensors").read_bytes() == b"weights"
    config = json.loads((out / "adapter_config.json").read_text())
    about = json.loads((out / "nbtrain.json").read_text())
    assert config["r"] == 4
    assert config["base_model_name_or_path"] == about["base_model"]["name_or_path"]
    assert (about["run_id"], about["step"], about["held_out_reward"]) == (run.id, 5, 0.9)
    assert about["base_model"]["slug"] == "nbtrain/tiny"
    digest = hashlib.sha256(b"weights").hexdigest()
    assert about["sha256"] == {"adapter_model.safetensors": digest}
    assert [path.name for path in out.parent.iterdir()] == ["adapter"]


def test_an_export_is_refused_with_all_reasons(run: Run, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    with pytest.raises(Refused) as refused:
        replace(run.best(), has_weights=False, kind="training state").export(full)
    told = str(refused.value)
    assert "holds something already" in told
    assert "holds no weights, only training state" in told
    with pytest.raises(Refused, match="is a file"):
        run.best().export(full / "mine.txt")
    with pytest.raises(Refused, match=r"cannot be exported.*No such file"):
        run.best().export(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"]
)
def test_an_altered_checkpoint_is_not_exported(run: Run, tmp_path: Path, name: str) -> None:
    checkpoint = saved_files(run, tmp_path)
    with Path(checkpoint.path, name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(Refused, match=r"not (the one that|what) was saved"):
        checkpoint.export(tmp_path / "new")
    assert not (tmp_path / "new").exists()
