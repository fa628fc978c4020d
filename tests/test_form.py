"""The configuration form without a browser: its widgets are real, launching is cut short."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st
from ipywidgets.widgets.widget import _instances
from shells import Shell

import nbtrain
import nbtrain.client.training
from nbtrain.client import Client, Run
from nbtrain.errors import PlanRefused, Refused
from nbtrain.notebook.cell import CellText, read_cell
from nbtrain.notebook.form.entries import OPEN, UNSTATED, Entry, entries, groups
from nbtrain.notebook.form.form import Form
from nbtrain.notebook.form.inputs import put
from nbtrain.plan.descriptor.table import fields_of
from nbtrain.plan.fields import Option
from nbtrain.plan.options import OPTIONS

AT_TOP = {"algorithm", "load_weights_only", "dataset"}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": f"{n}"},
        ],
        "mask": [1],
    }
    for n in range(40)
]


@pytest.fixture
def client(home: Path, launched: list[Run]) -> Iterator[Client]:
    """The client that the form uses, with a dataset."""
    from nbtrain.client import default_client

    client = default_client()
    client.datasets.register("numbers", ROWS)
    client.datasets.register("others", ROWS[:9])
    yield client
    ipywidgets.Widget.close_all()


def form(method: str | None = None, **options: Any) -> Form:
    if method == "sft":
        made = nbtrain.panel("support-triage", "nbtrain/tiny", method, {"dataset": "numbers"})
    else:
        made = nbtrain.panel("sums", "nbtrain/tiny", method)
    return made.set(**options) if options else made


def open_all(made: Form) -> dict[str, Any]:
    """Every field of the form by name, all groups opened."""
    assert made._groups is not None
    for group in made._groups:
        group.open()
    return {name: pair for group in made._groups for name, pair in group.pairs.items()}


def other(option: Option) -> Any:
    """A value that is allowed and not what the plan takes by itself."""
    special = {
        "batch_timeout_seconds": 20_000, "trajectory_timeout_seconds": 100, "sampler": "ragged",
        "lora_target_modules": ".*q_proj", "explicit_loss_mask_column": "mask",
        "validation_dataset": "others", "precision": None, "gpus": None, "val_enabled": False,
        "max_concurrent_trajectories": 700, "reasoning_effort": None,
        "checkpoint_interval_steps": 7, "val_reasoning_effort": None, "max_seq_length": 100,
        "min_trajectories_per_group": 3, "gradient_accumulation": 8, "micro_batch_per_gpu": 1,
        "group_size": 6, "attention_implementation": "eager", "lr_min_ratio": 0.25,
        "val_interval_steps": 4, "temperature": 0.5, "val_temperature": 0.5, "top_k": 7,
        "val_top_k": 7, "max_wall_clock_seconds": 90_000, "min_learning_rate_ratio": None,
    }  # fmt: skip
    if option.name in special:
        return special[option.name]
    if option.type == "boolean":
        return not option.default
    if option.choices:
        return next((c for c in option.choices if c != option.default), None)
    low = 0 if option.min is None else option.min
    return low + 1 if option.type == "integer" else min(low + 0.005, option.max or 1)


METHODS = ("gspo", "sft")


def test_every_option_and_every_flat_field_has_a_field(client: Client) -> None:
    assert set(entries("gspo")) == set(entries("grpo")) == set(OPTIONS) - AT_TOP
    flat = {field.setting for field in fields_of("sft") if field.setting}
    assert set(entries("sft")) == flat - AT_TOP
    for method in METHODS:
        assert set(open_all(form(method))) == set(entries(method))


@pytest.mark.parametrize("method", METHODS)
def test_a_value_typed_into_any_field_arrives_in_the_plan_as_stated(
    client: Client, method: str
) -> None:
    made = form(method)
    fields = open_all(made)
    tried = []
    for name, entry in entries(method).items():
        value = other(entry.option)
        if value is None:
            continue
        fields[name].field.value = entry.write(value)
        assert made.options == {name: value}
        if name == "validation_dataset":
            known = made.plan.plan.validation_dataset
            assert known is not None
            assert known.name == value
        else:
            setting = made.plan.plan.settings[name]
            assert (name, setting.origin, setting.value) == (name, "stated", value)
        assert "stated" in fields[name].beside.value
        # emptied, it is not stated any more
        fields[name].field.value = ""
        assert made.options == {}
        if name != "validation_dataset":
            assert made.plan.plan.settings[name].origin != "stated"
        tried.append(name)
    assert len(tried) > len(entries(method)) - 7


@pytest.mark.parametrize("method", METHODS)
def test_every_refusal_stands_beside_its_field(client: Client, method: str) -> None:
    made = form(method)
    fields = open_all(made)
    for name, entry in entries(method).items():
        bad = "perhaps" if entry.option.type in ("boolean", "text") else "-0.5"
        if entry.option.type == "text" and not entry.option.choices:
            bad = "*("
        if isinstance(fields[name].field, ipywidgets.Dropdown):
            fields[name].field.options = [*fields[name].field.options, (bad, bad)]
        fields[name].field.value = bad
    problems = made.problems
    assert len({problem.field for problem in problems}) > len(entries(method)) - 3
    assert made._outcome is not None
    assert made._outcome.general == ()
    for problem in problems:
        pair = fields[problem.field]
        assert 'role="alert"' in pair.beside.value
        assert problem.field in pair.beside.value
        assert "nbtrain-bad" in pair.field._dom_classes
    assert f"refused: {len(problems)} problems" in made._state.value
    with pytest.raises(PlanRefused) as refused:
        made.launch()
    assert refused.value.problems == problems


def test_what_is_refused_elsewhere_leaves_the_other_values_told(client: Client) -> None:
    made = form(batch_size=9000, group_size=6)
    fields = open_all(made)
    assert "3 · computed" in fields["min_trajectories_per_group"].beside.value
    assert "9,000" in fields["batch_size"].beside.value


def test_a_refusal_opens_its_group(client: Client) -> None:
    made = form()
    assert made._groups is not None
    (closed,) = [g for g in made._groups if g.name == "budgets"]
    assert not closed.is_open
    assert closed.pairs == {}
    made.set(max_total_trajectories=0)
    assert closed.is_open
    assert "0" in closed.pairs["max_total_trajectories"].beside.value


def test_groups_open_by_themselves_are_the_telling_ones(client: Client) -> None:
    made = form()
    assert made._groups is not None
    assert {g.name for g in made._groups if g.is_open} == set(OPEN) & set(groups("gspo"))


def test_numbers_are_typed_as_in_a_cell(client: Client) -> None:
    fields = open_all(made := form())
    fields["learning_rate"].field.value = " 1e-3 "
    fields["top_p"].field.value = "null"
    assert made.options == {"learning_rate": 1e-3, "top_p": None}
    fields["learning_rate"].field.value = "1_0"
    (problem,) = made.problems
    assert problem.field == "learning_rate"
    assert "without quotes" in str(problem)


SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Z"]), min_size=1)
)  # fmt: skip


@given(SCALARS)
def test_what_a_field_writes_reads_back_as_the_same_value(value: Any) -> None:
    number = Entry("learning_rate", OPTIONS["learning_rate"])
    read = number.read(number.write(value))
    assert read == value
    assert type(read) is type(value)


def test_an_empty_field_is_not_stated() -> None:
    for entry in entries("gspo").values():
        assert entry.read("  ") is UNSTATED
        assert entry.write("") == ""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gspo", {"num_steps": 4, "learning_rate": 3e-4, "top_p": None, "val_enabled": False}),
        (None, {"lora_target_modules": r".*\.(q_proj|v_proj)", "sampler": "ragged"}),
        ("grpo", {"name": "it's a # name", "temperature": 0.7, "small": True}),
        ("sft", {"epochs": 2, "packing": True, "learning_rate": 1e-4, "precision": "BF16"}),
    ],
)
def test_the_cell_makes_the_same_plan(
    client: Client, method: str | None, options: dict[str, Any]
) -> None:
    made = form(method, **options)
    line, _, body = made.cell.removeprefix("%%train ").partition("\n")
    view = read_cell(CellText(line, body), {}).resolve(client)
    assert view.config_hash == made.plan.config_hash
    assert view.plan.to_json() == made.plan.plan.to_json()


def test_the_method_swaps_the_fields_and_keeps_what_was_typed(client: Client) -> None:
    made = form(batch_size=4, learning_rate=3e-4)
    method = made._head.pair("method")
    assert method is not None
    method.field.value = "sft"
    assert made.options == {"learning_rate": 3e-4}
    assert {problem.field for problem in made.problems} == {"dataset"}
    assert "epochs" in open_all(made)
    made.set(dataset="numbers", workload="support-triage")
    assert made.plan.plan.method == "sft"
    made.set(method="grpo", workload="sums")
    assert made.options == {"batch_size": 4, "learning_rate": 3e-4}


def test_a_checkpoint_is_offered_with_step_and_score_and_brings_its_plan(client: Client) -> None:
    run = stored.create(client, batch_size=3)
    stored.train(run)
    stored.step(run, 4)
    stored.validate(run, 4, 0.75)
    ident = stored.save(run, 4)
    stored.finish(run)
    made = nbtrain.panel(options={"num_steps": 5})
    parent = made._head.pair("parent")
    assert parent is not None
    (label,) = [label for label, value in parent.field.options if value == ident]
    assert label == f"first · step 4 · held-out 0.750 · highest · {ident[:12]}"
    parent.field.value = ident
    assert made.plan.plan.settings["batch_size"].origin == "inherited"
    assert made.plan.plan.total_steps == 9
    assert "3 · inherited" in open_all(made)["batch_size"].beside.value
    assert "--from" in made.cell


def test_launching_twice_attaches_and_train_again_does_not(
    client: Client, launched: list[Run]
) -> None:
    made = form(name="first", num_steps=4)
    one = made.launch()
    assert made.run == one
    assert made.launch() == one
    assert "attached to" in made._output._result.value
    assert made.launch(new=True) != one
    assert len(launched) == 2
    assert stored.row_of(one).plan["text"] == made.cell
    assert f"same recipe as run first {one.id[:12]}" in _after(made.set(val_num_tasks=3))


def _after(made: Form) -> str:
    return str(made._state.value)


def test_the_buttons_do_what_they_say(client: Client, launched: list[Run]) -> None:
    made = form(name="pressed", num_steps=4)
    made._button["dry run"].click()
    assert made.plan.config_hash[:12] in made._output._result.value
    assert "num_steps: 4" in made._copy.value
    assert "<textarea readonly" in made._copy.value
    made._button["launch"].click()
    assert [run.name for run in launched] == ["pressed"]
    made._again.value = True
    made._button["launch"].click()
    assert len(launched) == 2
    made.set(num_steps=-1)
    assert made._button["launch"].disabled
    made._button["launch"].click()
    assert len(launched) == 2
    assert "num_steps" in made._output._result.value


def test_what_is_missing_is_no_fault_before_a_first_change(client: Client) -> None:
    made = nbtrain.panel()
    assert made._draft.head == {"model": "nbtrain/tiny"}
    assert made._state.value == '<div class="">choose a workload</div>'
    workload, batch = made._head.pair("workload"), open_all(made)["batch_size"]
    assert workload is not None
    assert "alert" not in workload.beside.value
    assert "not stated yet: workload" in repr(made)
    with pytest.raises(PlanRefused):
        _ = made.plan
    batch.field.value = "4"
    made._look()
    assert "refused: 1 problem; nothing starts before it is mended" in made._state.value
    assert "workload is missing" in workload.beside.value


def test_a_button_tells_what_is_missing_as_a_refusal(client: Client, launched: list[Run]) -> None:
    made = nbtrain.panel(method="sft")
    assert "choose a workload and a dataset" in made._state.value
    assert not made._button["launch"].disabled
    made._button["launch"].click()
    assert "refused: " in made._state.value
    assert "is missing" in made._output._result.value
    assert launched == []


def test_the_cell_of_a_refused_plan_is_said_to_be_refused(client: Client) -> None:
    made = nbtrain.panel("sums", options={"batch_size": 4000})
    assert "a cell copied now is refused too" in made._state.value
    assert "it is refused as it stands" in made._copy.value
    made.set(batch_size=4)
    assert "refused" not in made._copy.value


def test_what_is_wrong_is_refused_at_once(client: Client) -> None:
    made = nbtrain.panel(options={"batch_size": -1})
    assert "refused: 1 problem" in made._state.value
    assert "choose a workload" in made._state.value


def test_the_base_model_is_that_of_the_workload_until_another_is_typed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(client.workloads).get

    def get(self: Any, name: str) -> Any:
        found = real(self, "sums" if name == "own" else name)
        found.base_model = "nbtrain/other" if name == "own" else None
        return found

    monkeypatch.setattr(type(client.workloads), "get", get)
    made = nbtrain.panel()
    workload, model = made._head.pair("workload"), made._head.pair("model")
    assert workload is not None
    assert model is not None
    put(workload.field, "own")
    assert model.field.value == "nbtrain/other"
    workload.field.value = "sums"
    assert model.field.value == "nbtrain/tiny"
    assert "--workload sums --model nbtrain/tiny --method gspo" in made.cell
    model.field.value = "mine/model"
    put(workload.field, "own")
    assert model.field.value == "mine/model"


def test_start_checks_run_beside_and_can_be_stopped(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def check(_: Any, view: Any, told: Any) -> Any:
        told("start checks: reading")
        began.set()
        assert go_on.wait(10)
        told("start checks: loading")
        raise AssertionError

    monkeypatch.setattr("nbtrain.client.training.Training.check", check)
    made = form()
    made._button["start checks"].click()
    assert began.wait(10)
    assert "reading" in made._output._result.value
    assert made._button["start checks"].description == "stop checks"
    checking = made._checking
    made._button["start checks"].click()
    go_on.set()
    assert checking is not None
    checking.join(10)
    assert "stopped; nothing is left running" in made._output._result.value
    assert made._button["start checks"].description == "start checks"


def test_names_and_values_without_a_field_are_refused_together(client: Client) -> None:
    made = form(batch_size=4)
    with pytest.raises(Refused) as refused:
        made.set(num_steps=3, learnig_rate=1, epochs=2, temperature=[1], workload=3)
    told = {problem.field: str(problem) for problem in refused.value.problems}
    assert set(told) == {"learnig_rate", "epochs", "temperature", "workload"}
    assert "learning_rate" in told["learnig_rate"]
    assert "sft" in told["epochs"]
    assert made.options == {"batch_size": 4}  # all or nothing


def test_texts_of_others_are_escaped(client: Client) -> None:
    evil = '<img src=x onerror="alert(1)">'
    made = form(name=evil, lora_target_modules=f"*{evil}")
    open_all(made)
    values = _all_html()
    assert any("&lt;img" in value for value in values)
    assert not any("<img" in value for value in values)


def _all_html() -> list[str]:
    from ipywidgets.widgets.widget import _instances

    return [w.value for w in list(_instances.values()) if isinstance(w, ipywidgets.HTML)]


def test_typing_is_looked_at_once_it_pauses(client: Client) -> None:
    made = form()
    fields = open_all(made)
    for text in ("4", "40", "400", "4000"):
        fields["batch_size"].field.value = text
    assert "4,000" not in fields["batch_size"].beside.value
    end = time.monotonic() + 10
    while "4,000" not in fields["batch_size"].beside.value and time.monotonic() < end:
        time.sleep(0.02)
    assert "4,000; allowed: 1 to 256" in fields["batch_size"].beside.value


def test_a_form_displays_a_widget_a_fallback_and_the_place_of_a_summary(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: shell.ip)
    shell.do(
        "import nbtrain\nf = nbtrain.panel('sums', options={'num_steps': 3}, name='shown')\n"
        "f._ipython_display_()"
    )
    first, second = shell.bundles
    assert "application/vnd.jupyter.widget-view+json" in first
    assert "num_steps: 3" in first["text/plain"]
    assert "num_steps: 3" in first["text/html"]
    assert "no run was launched" in second["text/plain"]
    place = shell.ip.display_pub.outputs[1]["transient"]["display_id"]
    shell.do("run = f.launch()")
    update = shell.ip.display_pub.outputs[0]
    assert update["transient"]["display_id"] == place
    assert update["update"] is True
    assert shell.ns["run"].id[:12] in update["data"]["text/html"]


def test_what_a_form_leaves_in_a_saved_notebook_is_small(client: Client) -> None:
    ipywidgets.Widget.close_all()
    form()
    state = ipywidgets.Widget.get_manager_state(drop_defaults=True)
    assert len(json.dumps(state)) < 80_000


def test_launched_by_several_threads_at_once_one_plan_starts_once(
    client: Client, launched: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = form(name=None)
    launch = nbtrain.client.training.Training.launch

    def slowly(*args: Any, **how: Any) -> Run:
        time.sleep(0.3)
        return launch(*args, **how)

    monkeypatch.setattr(nbtrain.client.training.Training, "launch", slowly)

    def at_once(**how: Any) -> set[Run]:
        found: list[Run] = []
        threads = [
            threading.Thread(target=lambda: found.append(made.launch(**how))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        return set(found)

    (first,) = at_once()
    (again,) = at_once(new=True)
    assert launched == [first, again]
    assert made.launch(new=True) not in (first, again)


def test_a_closed_form_leaves_no_widget_and_works_on(
    client: Client, launched: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(_instances)
    made = form("sft")
    open_all(made)
    made.set(method="gspo")
    assert len(set(_instances) - before) > 100
    made.close()
    made.close()
    assert set(_instances) == before
    made.set(method="sft", workload=None, dataset="numbers", epochs=3)
    assert set(_instances) == before
    assert made.options == {"epochs": 3}
    made._changed("epochs", "4")
    assert made.options == {"epochs": 3}


@pytest.mark.parametrize("name", ["model", "workload", "parent", "dataset", "name"])
@pytest.mark.parametrize("text", ["\ud800", "./half\udfff/x"])
def test_half_a_character_is_refused_beside_its_field(client: Client, name: str, text: str) -> None:
    made = form("sft").set(**{name: text})
    assert name in made._current().beside
    made._look_quietly()
    assert "refused" in made._state.value
    assert "UnicodeEncodeError" not in made._state.value
