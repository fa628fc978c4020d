"""The client: options, plans, references, listings, workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import stored
from sqlalchemy import event, update

import nbtrain
from nbtrain.client import Client, NotBuiltYet, Run
from nbtrain.errors import AmbiguousReference, NotFound, PlanRefused, Refused
from nbtrain.plan.phases import Phase
from nbtrain.store import tables


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def run(client: Client) -> Run:
    run = stored.create(client)
    stored.train(run)
    stored.validate(run, 0, 0.1)
    stored.save(run, 0)
    for number in range(1, 4):
        stored.step(run, number, number / 10)
    stored.validate(run, 2, 0.4)
    stored.save(run, 2)
    return run


def test_importing_is_light() -> None:
    code = (
        "import json, sys, nbtrain; nbtrain.Client; "
        "print(json.dumps([m for m in ('torch', 'transformers', 'jupyterlab', 'pandas', "
        "'sqlalchemy', 'matplotlib', 'IPython') if m in sys.modules]))"
    )
    bare = code.replace("nbtrain.Client; ", "")
    done = [subprocess.check_output([sys.executable, "-c", text]) for text in (bare, code)]
    assert json.loads(done[0]) == []
    assert set(json.loads(done[1])) <= {"sqlalchemy"}


def test_nothing_is_opened_before_it_is_needed(home: Path) -> None:
    client = Client()
    assert client.training.runs is not None
    assert not home.exists()
    assert len(client.training.runs.list()) == 0
    assert (home / "nbtrain.db").exists()


def test_list_options(client: Client) -> None:
    catalog = client.training.list_options(bench_id="sums")
    assert [model.base_model_slug for model in catalog.models] == ["nbtrain/tiny"]
    assert list(catalog) == catalog.items == catalog.models
    options = {option.name: option for option in catalog.models[0].options}
    assert (options["num_steps"].min, options["num_steps"].max) == (1, 100_000)
    assert options["min_trajectories_per_group"].default_kind == "computed"
    table = catalog.to_frame()
    assert set(table["name"]) == set(options)
    assert (table["base_model_slug"] == "nbtrain/tiny").all()


def test_resolve_shows_every_value_and_its_origin(client: Client) -> None:
    view = client.training.resolve(options={"num_steps": 5, "group_size": 4}, bench_id="sums")
    assert view.config["num_steps"] == 5
    assert "val_interval_steps" in view.execution
    assert not set(view.config) & set(view.execution)
    assert view.origins["num_steps"] == "stated"
    assert view.origins["min_trajectories_per_group"] == "computed"
    table = view.to_frame().set_index("option")
    assert table.loc["min_trajectories_per_group", "value"] == 2
    assert bool(table.loc["num_steps", "hashed"])
    assert not table.loc["val_num_tasks", "hashed"]
    assert "num_steps" in repr(view)
    assert view.config_hash[:12] in view._repr_html_()
    assert len(client.training.runs.list()) == 0


def test_a_bad_plan_is_refused_whole_and_no_run_is_created(client: Client) -> None:
    options = {"nmu_steps": 3, "batch_size": 0, "val_enabled": True, "val_interval_steps": 0}
    with pytest.raises(PlanRefused) as refused:
        client.training.create(options=options, bench_id="nothing", base_model_slug="nbtrain/tny")
    fields = {problem.field for problem in refused.value.problems}
    assert fields == {"nmu_steps", "batch_size", "val_enabled", "workload", "base_model_slug"}
    assert len(client.training.runs.list()) == 0


def test_a_parent_hands_down_what_is_not_stated(client: Client, run: Run) -> None:
    best = run.best()
    for ref in (best, best.checkpoint_id, best.checkpoint_id[:10]):
        view = client.training.resolve(options={"num_steps": 5}, parent_checkpoint_id=ref)
        assert view.plan.parent is not None
        assert view.plan.parent.checkpoint_id == best.checkpoint_id
    assert (view.plan.start_step, view.plan.total_steps) == (2, 7)
    assert view.config["batch_size"] == 2
    assert view.origins["batch_size"] == "inherited"
    told = "\n".join(view.notes)
    assert "inherited: batch_size 2, group_size 4" in told
    assert "step 2 to 7, 5 updates, learning rate" in told
    assert "before" in told


def test_weights_only_starts_again_at_step_0(client: Client, run: Run) -> None:
    view = client.training.resolve(
        options={"num_steps": 5, "load_weights_only": True}, parent_checkpoint_id=run.best()
    )
    assert (view.plan.start_step, view.plan.total_steps) == (0, 5)
    assert "weights only: fresh optimizer and schedule" in "\n".join(view.notes)


def test_the_plan_is_kept_as_it_was_given(client: Client, run: Run) -> None:
    stated = {"max_staleness": 3, "learning_rate": None, "seed": np.int64(7), "top_p": None}
    best = run.best()
    view = client.training.resolve(
        options=stated | {"workload": client.workloads.get("sums")},
        parent_checkpoint_id=best,
        load_weights_only=True,
    )
    assert view.given == {
        "options": {
            "max_staleness": 3, "learning_rate": None, "seed": 7, "top_p": None,
            "workload": view.plan.workload.workload_id,
        },
        "arguments": {"parent_checkpoint_id": best.checkpoint_id, "load_weights_only": True},
    }  # fmt: skip
    assert json.loads(json.dumps(view.given)) == view.given


def test_a_training_state_may_go_between_plan_and_start(client: Client, run: Run) -> None:
    best = run.best()
    view = client.training.resolve(options={"num_steps": 1}, parent_checkpoint_id=best)
    assert stored.store_of(client).drop_training_state(best.checkpoint_id)
    with pytest.raises(PlanRefused, match=r"lost its training state.*load_weights_only: true"):
        client.training.launch(view)
    assert [row.run_id for row in stored.store_of(client).runs()] == [run.id]
    assert [folder.name for folder in run.folder.parent.iterdir()] == [run.id]


def test_files_that_a_parent_lost_are_told_before_anything_is_started(
    client: Client, run: Run
) -> None:
    best = run.best()
    path = Path(best.path)
    listed = {"weights": {"weights.bin": ""}, "training_state": {"state.json": ""}}
    (path / "manifest.json").write_text(json.dumps(listed))
    (path / "weights.bin").touch()
    with pytest.raises(PlanRefused, match="holds no training state"):
        client.training.resolve(options={"num_steps": 1}, parent_checkpoint_id=best)
    weights = {"num_steps": 1, "load_weights_only": True}
    assert client.training.resolve(options=weights, parent_checkpoint_id=best).plan.parent
    (path / "weights.bin").unlink()
    for lost in ("weights.bin", "manifest.json"):
        with pytest.raises(PlanRefused, match=rf"has lost {lost} in .*{path.name}") as refused:
            client.training.resolve(options=weights, parent_checkpoint_id=best.checkpoint_id)
        assert [one.field for one in refused.value.problems] == ["parent_checkpoint_id"]
        (path / "manifest.json").unlink(missing_ok=True)


def test_a_run_is_no_checkpoint(client: Client, run: Run) -> None:
    for ref in (run, "first", run.id, run.id[:8]):
        with pytest.raises(PlanRefused, match=r"run\.best\(\) picks one"):
            client.training.resolve(parent_checkpoint_id=ref)
    with pytest.raises(PlanRefused) as refused:
        client.training.resolve(parent_checkpoint_id="nothing like it")
    assert "picks one" not in str(refused.value)


def test_a_run_goes_by_object_name_id_and_prefix(client: Client, run: Run) -> None:
    for ref in (run, "first", run.id, run.id[:8]):
        assert client.training.runs.get(ref) == run
        assert client.training.runs.retrieve(ref) == run
        assert client.training.runs.progress(ref).completed_steps == 3
    assert nbtrain.attach(run.id[:6]) == run


def test_a_name_means_its_newest_run(client: Client, run: Run) -> None:
    newer = stored.create(client, "first")
    assert client.training.runs.get("first") == newer
    assert [r.id for r in client.training.runs.list()] == [newer.id, run.id]


def test_what_is_not_there_is_said_with_what_is_near(client: Client, run: Run) -> None:
    with pytest.raises(NotFound, match="did you mean 'first'"):
        client.training.runs.get("frist")
    assert issubclass(AmbiguousReference, NotFound)


@pytest.mark.parametrize("odd", [5, 1.5, ["a"], b"x", {}, np.zeros(3), pd.DataFrame({"a": [1]})])
def test_what_is_no_name_at_all_is_refused_in_a_sentence(
    client: Client, run: Run, odd: Any
) -> None:
    training = client.training
    lookups: list[tuple[Callable[[Any], object], str]] = [
        (nbtrain.attach, "a run is named by"),
        (training.checkpoints.list, "a run is named by"),
        (training.checkpoints.get, "a checkpoint is named by"),
        (client.models.get, "is no model"),
        (lambda ref: client.models.name("best", ref), "is no model"),
        (client.workloads.get, "is no workload"),
        (client.bundles.get, "is no bundle"),
        (client.base_models.get, "is no base model"),
        (lambda ref: client.trajectories.list(run, after=ref), "is no trajectory"),
    ]
    for look_up, told in lookups:
        with pytest.raises(NotFound, match=told) as refusal:
            look_up(odd)
        assert refusal.value.__context__ is None
        assert "\n" not in str(refusal.value)
    with pytest.raises(Refused, match="needs the name of a registered dataset"):
        client.datasets.get(odd)


def test_step_summaries_rewards_and_rounds(client: Client, run: Run) -> None:
    (first, *_), points = (
        client.training.runs.list_step_summaries(run.id).items,
        client.training.rewards.list_history(run.id),
    )
    assert (first.step, first.no_signal_groups, first.used_groups, first.pending_groups) == (
        1,
        1,
        2,
        0,
    )
    assert [(p.step, p.avg_reward) for p in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert points.to_frame()["avg_reward"].tolist() == [0.1, 0.2, 0.3]
    rounds = client.training.rewards.list_held_out_rewards(run.id)
    assert [(r.step, r.held_out_reward, r.round_completed) for r in rounds] == [
        (0, 0.1, True),
        (2, 0.4, True),
    ]


def test_checkpoints(client: Client, run: Run) -> None:
    found = client.training.checkpoints.list(run)
    assert len(found) == 2
    last = max(found, key=lambda c: c.step_index)
    assert client.training.checkpoints.get(last.checkpoint_id[:9]) == last
    assert list(found.to_frame()["step_index"]) == [0, 2]


def test_trajectories_come_page_by_page_with_lazy_texts(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbtrain.client import listing

    monkeypatch.setattr(listing, "_PAGE", 2)
    found = client.trajectories.list(training_run_id=run.id)
    items = list(found)
    assert len(found) == len(items) == len(found.items) == 6
    assert items[0].prompt == [{"role": "user", "content": "question 1"}]
    assert items[1].completion == "answer 1.1"
    assert items[1].terms == {"exact": 1.0}
    assert items[1].traceback is None
    assert items[1].reward == 1.0
    assert items[1].status == "completed"
    with pytest.raises(AttributeError, match="has no 'rewrad'"):
        _ = items[1].rewrad
    assert "completion" not in found.to_frame().columns


def test_trajectories_narrow_by_step_limit_and_cursor(client: Client, run: Run) -> None:
    everything = [t.trajectory_id for t in client.trajectories.list(run)]
    second = client.trajectories.list(run, step=2)
    assert [t.trajectory_id for t in second] == everything[2:4]
    assert len(second) == 2
    after = client.trajectories.list(run, limit=3, after=everything[1])
    assert [t.trajectory_id for t in after] == everything[2:5]
    assert len(after) == 3
    with pytest.raises(NotFound, match="is no trajectory"):
        client.trajectories.list(run, after="17")


def test_pages_are_indexed_and_sliced(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbtrain.client import listing

    monkeypatch.setattr(listing, "_PAGE", 2)
    found = client.trajectories.list(run)
    ids = [t.trajectory_id for t in found]
    for index in (0, 3, 5, -1, -6):
        assert found[index].trajectory_id == ids[index]
    for part in (slice(2), slice(1, 4), slice(-2, None), slice(None, None, -1), slice(4, 90, 2)):
        assert [t.trajectory_id for t in found[part]] == ids[part]
    for index in (6, -7):
        with pytest.raises(IndexError, match="there are 6"):
            found[index]


def test_a_list_of_runs_has_a_line_each(client: Client, run: Run) -> None:
    stored.create(client, None)
    lines = repr(client.training.runs.list()).splitlines()
    assert lines[0] == "2 items"
    assert len(lines) == 3
    assert f"first {run.id[:12]}: running, step 3 of 8, sums, nbtrain/tiny" in lines[2]


def asked(client: Client, ask: Callable[[], object]) -> list[str]:
    """The statements that ``ask`` put to the database."""
    seen: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_rest: object) -> None:
        seen.append(statement)

    engine = stored.store_of(client).engine
    event.listen(engine, "before_cursor_execute", note)
    ask()
    event.remove(engine, "before_cursor_execute", note)
    return [statement for statement in seen if statement.startswith("SELECT")]


def test_a_table_of_ended_runs_is_one_query_without_plans(client: Client, run: Run) -> None:
    for n in range(5):
        stored.finish(stored.create(client, f"r{n}"))
    listed = client.training.runs.list(limit=5)
    tables = []
    (query,) = asked(client, lambda: tables.append(listed.to_frame()))
    assert "runs.resolved" not in query
    assert list(tables[0]["name"]) == ["r4", "r3", "r2", "r1", "r0"]
    assert set(tables[0]["status"]) == {"succeeded"}
    stored.step(run, 4)  # one that goes on is asked for as it is now
    table = client.training.runs.list().to_frame()
    assert table.set_index("name").loc["first", "completed_steps"] == 4
    assert len(client.training.runs.list(limit=0).to_frame()) == 0


def test_a_look_reads_the_checkpoints_only_after_a_save(client: Client, run: Run) -> None:
    glance = run.glance()
    assert [line.step for line in glance.refresh().checkpoints] == [0, 2]
    assert not any("FROM checkpoints" in query for query in asked(client, glance.refresh))
    stored.step(run, 4)
    stored.validate(run, 4, 0.9)
    stored.save(run, 4)
    assert [line.step for line in glance.refresh().checkpoints] == [0, 2, 4]


def test_an_estimate_starts_nothing_and_says_what_is_wrong(client: Client) -> None:
    found = client.training.estimate(options={"num_steps": 3}, bench_id="sums")
    assert (found.steps, found.validation_rounds) == (3, 4)
    assert found.memory is not None
    assert found.free_bytes is not None
    assert found.seconds is None
    assert len(client.training.runs.list()) == 0
    with pytest.raises(PlanRefused, match="batch_size"):
        client.training.estimate(options={"batch_size": 0}, bench_id="sums")
    view = client.training.resolve(options={"num_steps": 3}, bench_id="sums")
    assert replace(view.estimate, free_bytes=0) == replace(found, free_bytes=0)


def test_time_is_told_by_the_runs_that_ended_here(client: Client, run: Run) -> None:
    options = {"num_steps": 10, "batch_size": 2, "group_size": 4, "val_interval_steps": 0}

    def measured() -> Any:
        return client.training.estimate(options=options, bench_id="sums").measured

    assert measured() is None  # the run goes on
    stored.finish(run)
    found = measured()
    row = stored.row_of(run)
    assert found.runs == 1
    assert found.same_workload
    assert found.mean.tokens == row.output_tokens / row.attempted_trajectories
    assert found.mean.surplus >= 1
    assert client.training.estimate(options=options, bench_id="sums").seconds is not None
    with stored.store_of(client).database.writing() as connection:
        connection.execute(update(tables.attempts).values(hostname="elsewhere"))
    assert measured() is None


def test_time_goes_by_runs_of_the_same_workload_else_by_those_of_as_many_turns(
    client: Client, run: Run
) -> None:
    stored.finish(run)
    client.workloads.create("w", tasks=rows(20), rewards=[(digits_only, 1)])
    client.workloads.sample("calculator")

    def of(workload: str, **options: object) -> Any:
        options = {"num_steps": 10, "val_interval_steps": 0, **options}
        found = client.training.estimate(
            options=options, bench_id=workload, base_model_slug="nbtrain/tiny"
        )
        return found.measured, found

    def ended(name: str, **options: object) -> None:
        one = stored.create(client, name, **options)
        stored.step(one, 1, rewards=(0.0,) * 10, output_tokens=999)
        stored.finish(one)

    assert of("sums")[0].same_workload
    assert not of("w")[0].same_workload
    assert "with another workload, sampler or number of ranks" in of("w")[1].line
    assert of("calculator")[0] is None  # several turns, and none was measured
    assert "time unknown" in repr(of("calculator")[1])
    assert not of("sums", gpus=2)[0].same_workload
    assert not of("sums", sampler="generate")[0].same_workload
    ended("two", gpus=2)
    assert of("sums", gpus=2)[0].runs == of("sums")[0].runs == 1
    assert of("sums", gpus=2)[0].same_workload
    assert of("w")[0].runs == 2
    for n in range(6):
        ended(f"more{n}")
    assert of("sums")[0].runs == 5
    assert of("sums", gpus=2)[0].runs == 1


def test_earlier_runs_are_those_of_the_same_recipe(client: Client, run: Run) -> None:
    again = stored.create(client, "again")
    other = stored.create(client, "other", learning_rate=1e-3)
    assert [r.id for r in again.earlier_runs] == [run.id]
    assert len(other.earlier_runs) == len(run.earlier_runs) == 0


def test_workload_and_model_go_by_their_plain_names_too(client: Client) -> None:
    settled = client.training.resolve(
        options={"num_steps": 3}, bench_id="sums", base_model_slug="nbtrain/tiny"
    )
    for name in ("model", "base_model"):
        also: dict[str, Any] = {"workload": "sums", name: "nbtrain/tiny"}
        view = client.training.resolve(options={"num_steps": 3}, **also)
        assert view.plan == settled.plan
        assert view.given == settled.given
        assert client.training.estimate(options={"num_steps": 3}, **also).steps == 3
    with pytest.raises(PlanRefused, match="no workload is called 'smus'"):
        client.training.create(options={"num_steps": 3}, workload="smus", model="nbtrain/tiny")
    with pytest.raises(PlanRefused, match="model is another name of base_model_slug"):
        client.training.start(workload="sums", model="a", base_model_slug="b")


def test_options_among_the_arguments_are_refused_with_an_example(client: Client) -> None:
    with pytest.raises(PlanRefused) as refused:
        client.training.create(bench_id="sums", num_steps=20, learning_rate=1e-4)
    assert [p.field for p in refused.value.problems] == ["num_steps", "learning_rate"]
    assert 'Write options={"num_steps": 20, …}' in str(refused.value)
    with pytest.raises(TypeError, match="'nmae', did you mean 'display_name'"):
        client.training.resolve(bench_id="sums", nmae="x")
    assert len(client.training.runs.list()) == 0


def test_an_environment_with_tools_is_refused_before_the_start(client: Client) -> None:
    class Adder:
        def reset(self) -> None:
            self.reward = 0.0

        def add(self, a: int, b: int) -> int:
            """Add.

            Args:
                a: one
                b: the other
            """
            return a + b

    made = client.workloads.create("tools", tasks=rows(20), environment=Adder)
    assert made._workload.environment_form == "tools"
    assert client.workloads.sample("calculator")._workload.environment_form == "step"
    assert client.workloads.sample("sums")._workload.environment_form is None
    assert client.base_models.get("nbtrain/tiny")._model.template == "plain"
    with pytest.raises(PlanRefused, match="the chat template of nbtrain/tiny shows no tools"):
        client.training.resolve(workload="tools", model="nbtrain/tiny")


def test_the_same_plan_of_a_name_is_found_again(client: Client, run: Run) -> None:
    def view(name: str, **options: object) -> object:
        return client.training.resolve(
            options={**stored.OPTIONS, **options}, bench_id="sums", display_name=name
        )

    find = client.training.find_same
    assert find(view("first")) == run
    assert find(view("first", num_steps=9)) is None
    # validation changes no weight, but the cell asks for something else than what is there
    assert find(view("first", val_interval_steps=4)) is None
    assert find(view("another")) is None
    assert find(client.training.resolve(options=stored.OPTIONS, bench_id="sums")) is None
    stored.finish(run, Phase.FAILED, failure="x")
    assert find(view("first")) == run


def rows(n: int) -> list[dict[str, object]]:
    return [{"prompt": f"what is {i} + 1?", "answer": str(i + 1)} for i in range(n)]


def digits_only(completion: str, task: dict[str, object]) -> float:
    return float(completion.strip().isdigit())


def test_a_workload_from_a_frame(client: Client) -> None:
    rewards = [(nbtrain.rewards.exact("answer"), 0.8), (digits_only, 0.2)]
    made = nbtrain.workload(
        "mine", tasks=pd.DataFrame(rows(40)), rewards=rewards, base_model="nbtrain/tiny"
    )
    assert client.workloads.get("mine") == made == client.workloads.get(made.id[:8])
    assert made.reward_names == ["exact", "digits_only"]
    for ref in (made, "mine", made.id):
        view = client.training.resolve(options={"num_steps": 1}, bench_id=ref)
        assert view.plan.workload.workload_id == made.id
        assert view.plan.workload.train_tasks + view.plan.workload.held_out_tasks == 40
        assert view.plan.workload.held_out_tasks > 0
    assert "mine" in client.workloads.list().to_frame()["name"].tolist()


def test_the_same_content_is_the_same_workload_and_a_name_moves(client: Client) -> None:
    exact = nbtrain.rewards.exact("answer")
    one = nbtrain.workload("a", tasks=rows(20), rewards=exact)
    assert nbtrain.workload("b", tasks=rows(20), rewards=exact).id == one.id
    other = nbtrain.workload("a", tasks=rows(21), rewards=exact)
    assert client.workloads.get("a").id == other.id != one.id
    assert client.workloads.get("b").id == one.id
    told = f"a now means {other.id[:12]}; before {one.id[:12]}"
    assert other.note == told
    assert repr(other).endswith(told)
    assert one.note is nbtrain.workload("a", tasks=rows(21), rewards=exact).note is None


def test_a_samples_name_stays_the_samples(client: Client) -> None:
    exact = nbtrain.rewards.exact("answer")
    with pytest.raises(Refused, match="belongs to a sample workload"):
        nbtrain.workload("sums", tasks=rows(20), rewards=exact)
    assert client.workloads.get("sums") == client.workloads.sample()


def test_a_workload_asked_for_by_id_shows_its_name(client: Client) -> None:
    made = nbtrain.workload("mine", tasks=rows(20), rewards=nbtrain.rewards.exact("answer"))
    for ref in (made.id, made.id[:8]):
        assert repr(client.workloads.get(ref)).startswith("<Workload mine ")


def test_a_wrong_workload_is_refused_whole(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        nbtrain.workload("no good", tasks=[{"question": "x"}], rewards=[], held_out=2)
    told = str(refused.value)
    for part in ("no good", "no column 'prompt'", "rewards is empty", "held_out is 2"):
        assert part in told
    with pytest.raises(Refused, match="answer"):
        nbtrain.workload("w", tasks=[{"prompt": "x"}], rewards=nbtrain.rewards.exact("answer"))


def test_base_models(client: Client) -> None:
    (tiny,) = client.base_models.list()
    assert tiny.base_model_slug == client.base_models.get("nbtrain/tiny").slug == "nbtrain/tiny"
    with pytest.raises(NotFound):
        client.base_models.get("nbtrain/huge")
    selected = client.base_models.select(tiny.location, "copy")
    assert [m.slug for m in client.base_models.list()] == ["nbtrain/tiny", "copy"]
    assert selected.kind == "folder"


def test_parts_that_come_later_are_refused_by_name(client: Client) -> None:
    with pytest.raises(NotBuiltYet, match=r"client\.evaluations\.create is not built yet"):
        client.evaluations.create("x")
    for name in ("export", "register"):
        with pytest.raises(NotBuiltYet, match=rf"client\.models\.{name} is not built yet"):
            getattr(client.models, name)("x")


def test_what_cannot_be_tasks_or_rewards_is_refused(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.workloads.create("w", rewards=[digits_only])
    assert {problem.field.split("[")[0] for problem in refused.value.problems} >= {"tasks"}
