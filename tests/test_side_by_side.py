"""Runs side by side, and lists of runs: one table, one pair of axes, and what is not comparable."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stored
from test_reporting import HOSTILE, read

from nbtrain.client import Client, Run
from nbtrain.errors import Refused
from nbtrain.plan.resolved import ModelRef
from nbtrain.report.compared import style_of
from nbtrain.report.listed import listed_html


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


def learned(client: Client, name: str, reward: float, **options: Any) -> Run:
    run = stored.create(client, name, **options)
    stored.train(run)
    stored.validate(run, 0, 0.1)
    for number in range(1, 5):
        stored.step(run, number, reward * number / 4)
    stored.validate(run, 4, reward)
    stored.save(run, 4)
    stored.finish(run)
    return run


def test_the_table_has_what_differs_and_how_far_each_came(client: Client) -> None:
    learned(client, "a", 0.4)
    learned(client, "b", 0.8, learning_rate=3e-4)
    found = client.training.runs.compare("a", "b")
    table = found.to_frame()
    assert list(table["name"]) == ["a", "b"]
    assert list(table["final"]) == [0.4, 0.8]
    assert list(table["best"]) == [0.4, 0.8]
    assert list(table["highest"]) == [0.4, 0.8]
    assert list(table["top_step"]) == [4, 4]
    assert list(table["steps"]) == [4, 4]
    assert list(table["learning_rate"]) == [1e-4, 3e-4]
    assert "batch_size" not in table
    told = repr(found)
    assert "learning_rate  0.0001  0.0003" in told
    assert "0.800 at step 4" in told
    assert "highest held-out  best held-out" in told
    assert "batch_size" not in told
    assert "comparable" not in told


def test_where_a_run_starts_from_is_a_difference(client: Client) -> None:
    first = stored.create(client, "a")
    stored.step(first, 1)
    model = ModelRef("78" * 32, "triage", "cd" * 32, "ef" * 32, "/adapters/triage")
    plan = replace(first.plan, warm_start=model, config_hash="12" * 32)
    warm = Run(first._store, first._store.create_run("ef" * 32, plan={}, resolved=plan))
    found = client.training.runs.compare(first, warm)
    assert found.to_frame()["starts_from"].fillna("").tolist() == ["", "model 787878787878"]
    assert "the plans are the same" not in repr(found)
    checkpoint = stored.save(first, 1)
    more = stored.create(client, "more", parent=checkpoint, num_steps=8)
    told = f"checkpoint {checkpoint[:12]} (step 1 of run {first.id[:12]})"
    assert client.training.runs.compare(warm, more).to_frame()["starts_from"][1] == told
    supervised = stored.create_supervised(client)
    mixed = client.training.runs.compare(supervised, warm).to_frame()
    assert mixed["starts_from"].fillna("").tolist() == ["", "model 787878787878"]


@pytest.mark.parametrize(
    ("change", "name"),
    [({"admission": "as_graded"}, "admission"), ({"config_hash": "12" * 32}, "config_hash")],
)
def test_plans_of_two_hashes_are_never_the_same(
    client: Client, change: dict[str, Any], name: str
) -> None:
    first = stored.create(client, "a")
    plan = replace(first.plan, **change)
    other = Run(first._store, first._store.create_run("ef" * 32, plan={}, resolved=plan))
    found = client.training.runs.compare(first, other)
    assert "the plans are the same" not in repr(found)
    assert name in found.to_frame()


def test_curves_share_their_axes_and_differ_in_colour_and_dash(client: Client) -> None:
    runs = [learned(client, "$a_1$", 0.4), learned(client, "b", 0.8)]
    figure = client.training.runs.compare(*runs).plot()
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert [line.get_label() for line in left.lines] == ["$a_1$", "b"]
    assert len({(line.get_color(), line.get_linestyle()) for line in left.lines}) == 2
    styles = [style_of(n) for n in range(12)]
    assert len(set(styles)) == 12
    assert style_of(0)[1] != style_of(1)[1]


@pytest.mark.filterwarnings("error")
def test_every_run_is_in_the_legend_whatever_its_name(client: Client) -> None:
    runs = [learned(client, name, 0.5) for name in ("_under", "party 🎉 数学", "$a_1$")]
    figure = client.training.runs.compare(*runs).plot()
    figure.canvas.draw()
    (legend,) = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["_under", "party □ □□", "$a_1$"]
    drawn = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert [(each.get_color(), each.get_linestyle()) for each in legend.get_lines()] == drawn


def test_a_run_of_one_step_has_its_point(client: Client) -> None:
    short = stored.create(client, "short")
    stored.train(short)
    stored.step(short, 1, 0.25)
    stored.finish(short)
    found = client.training.runs.compare(short, learned(client, "long", 0.5))
    markers = {line.get_label(): line.get_marker() for line in found.plot().axes[0].lines}
    assert markers == {"short": "o", "long": "None"}


def test_it_shows_itself_as_text_html_and_picture(client: Client) -> None:
    runs = [learned(client, f"a {HOSTILE}", 0.4), learned(client, "b", 0.8)]
    bundle = client.training.runs.compare(*runs)._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert len(bundle["image/png"]) < 40_000
    assert "<script" not in bundle["text/html"]
    assert "&lt;script" in bundle["text/html"]
    assert 'alt="mean reward and held-out reward by step' in bundle["text/html"]
    assert HOSTILE in bundle["text/plain"]


def test_runs_without_a_step_have_no_picture(client: Client) -> None:
    runs = [stored.create(client, "a"), stored.create(client, "b")]
    found = client.training.runs.compare(*runs)
    assert "image/png" not in found._repr_mimebundle_()
    assert "the plans are the same" in repr(found)
    assert found.plot() is not None


def test_supervised_and_sampling_runs_have_tables_only(client: Client, tmp_path: Path) -> None:
    supervised = stored.create_supervised(client)
    stored.loss(supervised, 1, 2.0)
    found = client.training.runs.compare(learned(client, "a", 0.4), supervised)
    with pytest.raises(Refused, match="no axis in common"):
        found.plot()
    assert "no axis in common" in repr(found)
    assert "image/png" not in found._repr_mimebundle_()
    assert found.to_frame()["tokens"].tolist() == [40, 400]
    assert "output tokens" in repr(found)
    assert "trained tokens" in repr(found)
    page = read(found.report(tmp_path / "c.html"))
    assert "svg" not in page.tags
    assert "no axis in common" in page.words


def test_supervised_runs_share_a_loss(client: Client) -> None:
    runs = [stored.create_supervised(client, name, learning_rate=rate)
            for name, rate in (("a", 1e-4), ("b", 2e-4))]  # fmt: skip
    for run in runs:
        stored.loss(run, 1, 2.0)
        stored.read(run, 1, 1.5)
    found = client.training.runs.compare(*runs)
    assert found.plot().axes[0].get_ylabel() == "nats per trained token"
    assert found.to_frame()["final"].tolist() == [1.5, 1.5]
    assert "comparable" not in repr(found)


def test_other_tasks_are_not_comparable(client: Client) -> None:
    first = learned(client, "a", 0.4)
    fewer = learned(client, "b", 0.4, val_num_tasks=5)
    assert "held-out tasks differ" in repr(client.training.runs.compare(first, fewer))
    other = client.workloads.create(
        "other", tasks=[{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "2"}],
        rewards=[_exact()], base_model="nbtrain/tiny", held_out=0,
    )  # fmt: skip
    view = client.training.resolve(
        options={**stored.OPTIONS, "val_interval_steps": 0}, bench_id=other.id, display_name="c"
    )
    store = stored.store_of(client)
    run = Run(store, store.create_run("ef" * 32, plan={}, resolved=view.plan))
    told = repr(client.training.runs.compare(first, run))
    assert "neither rewards nor held-out rewards are comparable" in told


def _exact() -> Any:
    from nbtrain import rewards

    return rewards.exact("answer")


def test_too_few_and_the_same_run_are_refused(client: Client) -> None:
    run = stored.create(client)
    with pytest.raises(Refused, match="takes 2 to 12 runs, got 1"):
        client.training.runs.compare(run)
    with pytest.raises(Refused, match="more than once"):
        client.training.runs.compare(run, run.id[:12])


def test_a_comparison_is_a_page(client: Client, tmp_path: Path) -> None:
    runs = [learned(client, f"a {HOSTILE}", 0.4), learned(client, "b", 0.8, group_size=8)]
    found = read(client.training.runs.compare(*runs).report(tmp_path / "c.html"))
    assert "script" not in found.tags
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert found.tags.count("svg") == 4  # two curves, each for wide and for narrow pages
    assert len(found.ids) == len(set(found.ids))
    assert "group_size" in found.words
    assert not found.unlabelled


def test_a_list_of_runs_is_a_table(client: Client) -> None:
    learned(client, f"a {HOSTILE}", 0.4)
    stored.create(client, "b")
    listing = client.training.runs.list()
    shown = listing._repr_html_()
    assert "2 runs" in shown
    assert "<script" not in shown
    assert "4 of 8" in shown
    assert "running" in shown or "pending" in shown
    assert "0 runs" in client.training.runs.list(0)._repr_html_()
    checkpoints = client.training.checkpoints.list(listing[1])
    assert listing[1].best().checkpoint_id[:12] in checkpoints._repr_html_()


def test_a_long_list_says_what_it_leaves_out() -> None:
    rows = [{"id": "ab" * 32, "nothing": None, "at": 1.5, "created_at": 0.0, "ok": True}] * 3
    shown = listed_html(["id", "nothing", "at", "created_at", "ok"], rows, 1_005)
    assert "1,005 items" in shown
    assert "… 1,002 more" in shown
    assert "nothing" not in shown
    assert ">abababababab<" in shown
    assert "1970-01-01 00:00:00 UTC" in shown
    assert ">yes<" in shown
