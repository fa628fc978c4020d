"""A run as updates: what a page has after all the news equals everything read anew."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import stored
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nbtrain.client import Client, Run, feed, feed_parts, shown_parts
from nbtrain.client.feed import ROUNDS, STEPS_REINFORCED, STEPS_SUPERVISED, Feed, Update
from nbtrain.client.followed import Followed
from nbtrain.client.glance import Glance
from nbtrain.plan.phases import Phase
from nbtrain.plan.schedule import learning_rate, schedule_of
from nbtrain.store import RunWriter


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look reads, and what is dear is made whenever it changed."""
    monkeypatch.setattr(feed, "READ_WITHIN", 0.0)
    monkeypatch.setattr(feed_parts, "_PAUSES", {"trajectories": 0.0, "log": 0.0})
    monkeypatch.setattr(feed_parts, "_LONGEST", 0.0)


@pytest.fixture
def run(home: Path, eager: None) -> Run:
    run = stored.create(Client(), num_steps=100)
    stored.train(run)
    return run


class Page:
    """What a page knows after the updates it took."""

    def __init__(self) -> None:
        self.feed = ""
        self.serial = 0
        self.tables: dict[str, dict[float, tuple[Any, ...]]] = {}
        self.state: dict[str, Any] = {}

    def take(self, update: Update | None) -> None:
        if update is None:
            return
        if update.base == 0:
            self.tables, self.state = {"steps": {}, "rounds": {}}, {}
        else:
            assert (update.feed, update.base) == (self.feed, self.serial)
        self.feed, self.serial = update.feed, update.serial
        for table in update.tables:
            assert {len(column) for column in table.values} == {table.rows}
            for row in zip(*table.values, strict=True):
                self.tables[table.name][row[0]] = tuple(None if math.isnan(v) else v for v in row)
        # what a page gets is what JSON can hold
        self.state |= json.loads(json.dumps(dict(update.state), allow_nan=False))


def anew(run: Run) -> Page:
    """A page on a run that nobody has followed yet."""
    fresh = Run(run._store, stored.row_of(run))
    fresh._glance = Glance(Followed(run._store, run._key, fresh._look))
    page = Page()
    page.take(Feed(fresh).whole())
    return page


def same(one: Page, other: Page) -> None:
    clocks = ("elapsed_seconds", "eta_seconds")
    assert one.tables == other.tables
    told = [{**page.state, "progress": dict(page.state["progress"])} for page in (one, other)]
    for state in told:
        for name in clocks:
            state["progress"].pop(name)
        del state["diagnosis"]  # throttled by what it costs
    assert told[0] == told[1]


# What comes to a page


class Story:
    """A run that goes as an example says; attempts, steps and what waits are kept track of."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attempt = 1
        self.step = 0
        self.waiting: list[int] = []

    @property
    def writer(self) -> RunWriter:
        return RunWriter(self.run._store, self.run._key, self.attempt)

    def tell(self, what: str, number: int) -> None:
        getattr(self, what)(number)

    def make(self, number: int) -> None:
        self.step += 1
        settled = number % 3 > 0
        amend = {}
        if number % 2 and self.waiting:
            amend = {self.waiting.pop(0): {"settled": True, "pending_groups": 0, "used_groups": 3}}
        self.writer.commit_step(
            {
                "step": self.step,
                "avg_reward": [number / 10, None, math.nan][number % 3],
                "learning_rate": 1e-4,
                "used_groups": 2,
                "no_signal_groups": 1,
                "no_signal_not_trained": number % 2,
                "pending_groups": 0 if settled else 1,
                "settled": settled,
            },
            trajectories=[{"trajectory_id": self.step, "group_id": 1, "sample": 0, "reward": 0.5}],
            amend=amend,
        )
        if not settled:
            self.waiting.append(self.step)

    def validate(self, number: int) -> None:
        known = self.run._store.validation_rounds(self.run._key)
        if all(row["step"] != self.step for row in known):
            row = {"step": self.step, "held_out_reward": number / 10, "round_completed": True}
            self.writer.commit_validation(row)

    def come_back(self, number: int) -> None:
        store = self.run._store
        store.move_phase(self.run._key, Phase.FAILED, attempt=self.attempt, failure="killed")
        self.attempt += 1
        stored.host(store, self.run._key, self.attempt)

    def go_back(self, number: int) -> None:
        """The attempt takes up work: what is past the restored step is hidden."""
        rows = self.run._store.steps(self.run._key, columns=("id", "attempt"))
        if self.attempt == 1 or any(row["attempt"] == self.attempt for row in rows):
            return
        self.step = max(0, self.step - number)
        self.writer.supersede_after(self.step)
        self.waiting = [step for step in self.waiting if step <= self.step]


EVENTS = st.tuples(
    st.sampled_from(["make"] * 5 + ["validate", "come_back", "go_back", "look"]),
    st.integers(0, 5),
)


@example(events=[("validate", 0)])
@example(events=[("make", 0), ("come_back", 0), ("look", 0), ("go_back", 1), ("make", 1)])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=14))
def test_everything_is_the_sum_of_the_news(
    home: Path, eager: None, events: list[tuple[str, int]]
) -> None:
    run = stored.create(Client(), None, num_steps=100)
    stored.train(run)
    story, page, feed = Story(run), Page(), Feed(run)
    page.take(feed.whole())
    for what, number in events:
        if what == "look":
            page.take(feed.news(page.serial))
        else:
            story.tell(what, number)
    page.take(feed.news(page.serial))
    same(page, anew(run))
    run._store.move_phase(run._key, Phase.FAILED, attempt=story.attempt, failure="killed")
    page.take(feed.news(page.serial))
    same(page, anew(run))
    assert feed.is_final
    assert feed.news(page.serial) is None


def test_rows_that_an_attempt_hides_later_go_though_somebody_looked_in_between(run: Run) -> None:
    story, page, feed = Story(run), Page(), Feed(run)
    for _ in range(4):
        story.make(1)
    page.take(feed.whole())
    story.come_back(0)
    page.take(feed.news(page.serial))
    assert len(page.tables["steps"]) == 4
    story.go_back(2)
    for _ in range(3):  # already further than before when somebody looks again
        story.make(2)
    page.take(feed.news(page.serial))
    assert [row[1] for row in page.tables["steps"].values()] == [1, 2, 3, 4, 5]
    same(page, anew(run))


def test_a_page_that_is_behind_gets_what_it_lacks_and_one_far_behind_everything(run: Run) -> None:
    feed = Feed(run)
    first = feed.whole().serial
    pages = []
    for number in range(1, 4):
        stored.step(run, number)
        page = Page()
        page.take(feed.whole())
        pages.append(page)
    late = feed.news(pages[0].serial)
    assert late is not None
    assert (late.base, late.tables[0].rows) == (pages[0].serial, 2)
    for page in pages:
        page.take(feed.news(page.serial))
        same(page, anew(run))
    assert feed.news(first + 10_000).base == 0  # type: ignore[union-attr]


def test_nothing_new_is_no_update_and_reads_one_transaction(run: Run) -> None:
    from sqlalchemy import event

    stored.step(run, 1)
    feed = Feed(run)
    serial = feed.whole().serial
    asked: list[str] = []
    listen = (run._store.engine, "before_cursor_execute", lambda *a: asked.append(a[2]))
    event.listen(*listen)
    assert feed.news(serial) is None
    event.remove(*listen)
    assert [query.split()[0] for query in asked] == ["BEGIN"] + ["SELECT"] * 4


def test_a_thousand_rows_at_once(run: Run) -> None:
    for number in range(1, 200):
        stored.step(run, number, text=False, rewards=())
    (steps, rounds) = Feed(run).whole().tables
    assert (steps.rows, rounds.rows) == (199, 0)
    assert list(steps.values[1]) == list(range(1, 200))


# What the columns hold


def rows_of(update: Update, name: str) -> list[dict[str, float]]:
    (table,) = [table for table in update.tables if table.name == name]
    return [dict(zip(table.columns, row, strict=True)) for row in zip(*table.values, strict=True)]


def test_groups_come_as_the_ledger_counts_them(run: Run) -> None:
    figures = {"completed_groups": 9, "used_groups": 3, "no_signal_groups": 4}
    figures |= {"no_signal_not_trained": 2, "filtered_groups": 1, "too_small_groups": 1}
    figures |= {"discarded_groups": 1, "pending_groups": 1}
    stored.step(run, 1, **figures)
    stored.step(run, 2)  # a run of before that was counted
    first, second = rows_of(Feed(run).whole(), "steps")
    places = ("used", "no_signal", "filtered", "too_small", "discarded", "pending")
    assert tuple(first) == STEPS_REINFORCED
    assert [first[name] for name in places] == [3, 2, 1, 1, 1, 1]
    assert sum(first[name] for name in places) == 9
    assert [second[name] for name in places] == [2, 1, 0, 0, 0, 0]


def test_a_supervised_run_has_losses(home: Path, eager: None) -> None:
    run = stored.create_supervised(Client())
    stored.train(run)
    stored.loss(run, 1, 2.5)
    stored.loss(run, 2, 2.25)
    stored.read(run, 2, 2.0)
    update = Feed(run).whole()
    first, second = rows_of(update, "steps")
    assert tuple(first) == STEPS_SUPERVISED
    assert (second["loss"], second["learning_rate"]) == (2.25, pytest.approx(1e-4 * 39 / 40))
    assert second["grad_norm"] == pytest.approx(0.7)
    (point,) = rows_of(update, "rounds")
    assert tuple(point) == ROUNDS
    assert (point["step"], point["value"], point["complete"]) == (2, 2.0, 1)
    assert update.state["about"]["score"] == "validation loss"
    assert update.state["about"]["higher_is_better"] is False
    assert update.state["trajectories"] == {"step": None, "best": [], "worst": []}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_me01_figures_that_are_no_numbers_are_named_and_all_messages_are_strict(
    home: Path, eager: None, value: float
) -> None:
    run = stored.create_supervised(Client())
    stored.train(run)
    feed, page = Feed(run), Page()
    page.take(feed.whole())
    stored.loss(run, 1, 2.5)
    for number in (2, 3):
        stored.loss(run, number, value, grad_norm=value)
    stored.loss(run, 4, 2.0)
    page.take(feed.news(page.serial))
    losses = [row[2] for row in page.tables["steps"].values()]
    assert losses == [2.5, None, None, 2.0]
    assert page.state["not_finite"] == [
        {"step": step, "name": name} for step in (2, 3) for name in ("loss", "grad_norm")
    ]


# The parts


def test_the_head_and_the_progress_of_a_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        stored.step(run, number, reward=number / 10)
    state = Feed(run).whole().state
    assert state["head"]["title"] == run.title
    assert (state["head"]["status"], state["head"]["over"]) == ("running", False)
    assert state["head"]["headline"].startswith("running, TRAINING")
    assert state["head"]["subject"] == "gspo · sums · nbtrain/tiny"
    progress = state["progress"]
    assert (progress["start"], progress["completed"], progress["total"]) == (0, 5, 100)
    assert "5 updates" in progress["counts"]
    assert any(line.startswith("reward 0.") for line in progress["movement"])
    stored.finish(run)
    over = Feed(run).whole().state
    assert (over["head"]["over"], over["progress"]["eta_seconds"]) == (True, None)
    assert over["actions"]["cancel"] is False


@pytest.mark.parametrize(
    ("times", "left", "now", "expected"),
    [
        ([100, 98, 96], 10, 100, 20.0),
        ([100, 98, 96], 10, 101, 19.0),  # the step under way
        ([100, 98, 96], 10, 500, 18.0),  # it lasts, and is not said to be over
        ([100, 98], 10, 100, None),
        ([100, 98, 96], 0, 100, None),
        ([100, 100, 100], 3, 100, None),
        ([100, 101, 104], 3, 100, None),  # a clock that was set back
    ],
)
def test_the_time_left(times: list[float], left: int, now: float, expected: float | None) -> None:
    assert shown_parts.eta(times, left, now) == expected


@pytest.mark.parametrize("steps", [1, 3, 199, 200, 201, 1000, 100_000])
def test_the_schedule_is_short_and_has_every_corner(home: Path, steps: int) -> None:
    plan = (
        Client()
        .training.resolve(
            options={"num_steps": steps, "lr_warmup_steps": min(7, steps)}, bench_id="sums"
        )
        .plan
    )
    told = shown_parts.schedule(plan)
    settings = schedule_of(plan.options, plan.total_steps)
    assert len(told["steps"]) == len(told["rates"]) <= 200
    assert told["steps"] == sorted(set(told["steps"]))
    assert {1, steps, settings["warmup"]} <= set(told["steps"])
    assert told["rates"] == [learning_rate(n, **settings) for n in told["steps"]]
    if steps <= 190:
        assert len(told["steps"]) == steps


def test_best_and_worst_of_the_newest_settled_step_with_terms_and_verdicts(run: Run) -> None:
    stored.step(run, 1, rewards=(0.1, 0.9, 0.5, None, 0.3, 0.8))
    stored.step(run, 2, settled=False, pending_groups=1, rewards=(0.7,))
    told = Feed(run).whole().state["trajectories"]
    assert told["step"] == 1
    assert [item["reward"] for item in told["best"]] == [0.9, 0.8, 0.5]
    assert [item["reward"] for item in told["worst"]] == [0.1, 0.3, None]
    best = told["best"][0]
    assert (best["prompt"], best["completion"]) == ("question 1", "answer 1.1")
    assert best["terms"] == [{"name": "exact", "score": 1.0}]
    assert (best["verdict"], best["reason"]) == ("trained on", "ENV_DONE")
    assert best["id"].startswith(run.id[:12])


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \ud83d \x00 ]]> {{7*7}}"


def test_long_texts_are_cut_and_hostile_ones_stay_plain_text(run: Run) -> None:
    text = {"prompt": [{"role": "user", "content": HOSTILE.replace("\ud83d", "?")}]}
    text |= {"completion": "<b>" * 5000, "terms": {"<i>": 0.5}, "error": None}
    row = {"trajectory_id": 1, "group_id": 1, "sample": 0, "reward": 1.0, "text": text}
    stored.writer(run).commit_step({"step": 1, "avg_reward": 1.0}, [], [row])
    (best,) = Feed(run).whole().state["trajectories"]["best"]
    assert best["prompt"] == HOSTILE.replace("\ud83d", "?")
    assert best["completion"].startswith("<b><b>")
    assert best["completion"].endswith("… (13,000 characters more)")
    assert best["terms"] == [{"name": "<i>", "score": 0.5}]
    assert shown_parts._cut(HOSTILE).encode() == HOSTILE.encode("utf-8", "replace")


def test_the_log_is_its_last_lines(run: Run) -> None:
    logs = run.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    feed, page = Feed(run), Page()
    page.take(feed.whole())
    assert page.state["log"] == ""
    with (logs / "rank0.log").open("w") as stream:
        for number in range(10_000):
            stream.write(f"line {number} of <b>the log</b>\n")
    page.take(feed.news(page.serial))
    lines = page.state["log"].rstrip("\n").split("\n")
    assert 150 <= len(lines) <= 200
    assert lines == [f"line {n} of <b>the log</b>" for n in range(10_000 - len(lines), 10_000)]
    (logs / "rank0.log").write_text("x" * 100_000)
    page.take(feed.news(page.serial))
    assert len(page.state["log"]) <= 16_000


def test_checkpoints_come_ranked_with_what_can_be_done_with_them(run: Run) -> None:
    assert not any(Feed(run).whole().state["actions"][n] for n in ("resume", "generate", "export"))
    for number, reward in ((2, 0.4), (4, 0.9), (6, 0.6)):
        stored.step(run, number)
        stored.validate(run, number, reward, complete=number != 6)
        stored.save(run, number, state=number != 2)
    stored.save(run, 8, weights=False)
    state = Feed(run).whole().state
    rows = state["checkpoints"]
    assert [(row["step"], row["rank"]) for row in rows] == [(4, 1), (2, 2), (6, None), (8, None)]
    assert [row["best"] for row in rows] == [True, False, False, False]
    assert [row["complete"] for row in rows] == [True, True, False, None]
    assert [row["can_resume"] for row in rows] == [True, False, True, False]
    assert [row["has_weights"] for row in rows] == [True, True, True, False]
    assert all(state["actions"][name] for name in ("resume", "generate", "export", "cancel"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda c: stored.create(c, val_interval_steps=0), "val_interval_steps is 0"),
        (lambda c: stored.create_supervised(c, validates=False), "no validation dataset"),
        (lambda c: stored.create(c), None),
        (lambda c: stored.create_supervised(c), None),
    ],
)
def test_what_ranks_nothing_says_why(home: Path, make: Any, told: str | None) -> None:
    run = make(Client())
    found = shown_parts.about(run, run.plan)["unranked"]
    assert found is None if told is None else told in found


def test_what_is_dear_is_made_rarely_and_at_the_end_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "READ_WITHIN", 0.0)
    run = stored.create(Client(), num_steps=100)
    stored.train(run)
    made: list[int] = []
    whole = shown_parts.trajectories
    monkeypatch.setattr(shown_parts, "trajectories", lambda f: made.append(1) or whole(f))
    watched, page = Feed(run), Page()
    page.take(watched.whole())
    for number in range(1, 6):
        stored.step(run, number)
        page.take(watched.news(page.serial))
    assert len(made) == 1
    stored.finish(run)
    page.take(watched.news(page.serial))
    assert len(made) == 2
    assert page.state["trajectories"]["step"] == 5
    assert watched.is_final


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    whole = Followed._take
    monkeypatch.setattr(Followed, "_take", lambda *a: found.append(1) or whole(*a))
    return found


def test_summary_and_feeds_of_several_handles_read_a_run_once(home: Path, reads: list[int]) -> None:
    run = stored.create(Client(), num_steps=100)
    stored.train(run)
    handles = [Run(run._store, stored.row_of(run)) for _ in range(4)]
    feeds = [Feed(handle) for handle in handles]
    pages = [Page() for _ in feeds]
    for page, each in zip(pages, feeds, strict=True):
        page.take(each.whole())
    handles[0].glance().bundle(hurry=True)
    assert len(reads) <= 2
    for page in pages[1:]:
        assert page.tables == pages[0].tables


def test_columns_are_little_endian_doubles_of_eight_bytes(run: Run) -> None:
    """What a page reads without looking, on every machine that browsers run on."""
    stored.step(run, 7)
    steps = Feed(run).whole().tables[0]
    assert struct.unpack("<d", steps.values[1].tobytes()) == (7.0,)


def test_best_and_worst_are_of_different_tasks_and_say_which_step_trained(run: Run) -> None:
    rewards = {"a": (1.0, 1.0, 1.0, 0.0), "b": (0.9, 0.1, 0.1, 0.1), "c": (0.8, 0.2, None, 0.3)}
    rows = [
        {
            "trajectory_id": 10 * group + sample,
            "group_id": group,
            "sample": sample,
            "task_id": task * 16,
            "reward": reward,
            "verdict": "finished and graded" if reward is not None else "no grade: left out",
            "consumed_step": 12 if task != "c" else None,
            "text": {"prompt": task, "completion": "x", "terms": {}, "error": None},
        }
        for group, (task, scores) in enumerate(rewards.items(), 1)
        for sample, reward in enumerate(scores)
    ]
    stored.writer(run).commit_step({"step": 1, "avg_reward": 0.5}, [], rows)
    told = Feed(run).whole().state["trajectories"]
    assert [(t["prompt"], t["reward"]) for t in told["best"]] == [
        ("a", 1.0),
        ("b", 0.9),
        ("c", 0.8),
    ]
    assert [(t["prompt"], t["reward"]) for t in told["worst"]] == [("a", 0), ("b", 0.1), ("c", 0.2)]
    verdicts = [t["verdict"] for t in told["best"]]
    assert verdicts == [*["finished and graded; trained in step 12"] * 2, "finished and graded"]
    texts = run.texts(step=1)
    assert texts["verdict"].value_counts().to_dict() == {
        "finished and graded; trained in step 12": 8,
        "finished and graded": 3,
        "no grade: left out": 1,
    }
