"""The panel in this process: its state, its messages, its actions, and who keeps it up to date."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stored
from ipywidgets.widgets.widget import _instances

from nbtrain.client import Checkpoint, Client, Run, feed, fronts, going_on
from nbtrain.client.feed import Feed
from nbtrain.client.new_folder import NewFolder
from nbtrain.errors import NbtrainError, NotFound
from nbtrain.notebook import live
from nbtrain.notebook.panel import actions, messages, program, views
from nbtrain.notebook.panel.messages import as_asked
from nbtrain.notebook.panel.program import Program
from nbtrain.notebook.panel.views import Views
from nbtrain.notebook.panel.widget import RunPanel
from nbtrain.notebook.poller import Poller
from nbtrain.plan.phases import Phase


class Panel(RunPanel):
    """A panel that keeps what it sends."""

    def deliver(self, message: messages.Message) -> None:
        if not hasattr(self, "sent"):
            self.sent: list[dict[str, Any]] = []
        content, buffers = message
        json.dumps(content, allow_nan=False)
        self.sent.append({**content, "buffers": buffers})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [content for content in getattr(self, "sent", ()) if content["kind"] == kind]

    def say(self, content: Any) -> None:
        self._hear(self, content, [])

    def do(self, action: Any, request: int = 1, **args: Any) -> dict[str, Any]:
        self.say({"kind": "do", "id": request, "action": action, "args": args})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for content in self.of("done"):
                if content["id"] == request:
                    return content
            time.sleep(0.01)
        msg = f"{action} did not end"
        raise AssertionError(msg)


class Still(Poller):
    """A poller that looks when a test says so."""

    def watch(self, view: Any, *, least: float = 0.0, now: bool = False) -> None:
        self._views.setdefault(view, None)  # type: ignore[arg-type]

    def turn(self) -> None:
        for view in list(self._views):
            if view.look()[1]:
                del self._views[view]


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A stand-in for what the build of the page leaves."""
    made = Program(b"export default {}", b".nbtrain{}", "ab" * 16)
    for module in (program, __import__("nbtrain.notebook.panel.widget", fromlist=["x"])):
        monkeypatch.setattr(module, "loader", lambda: "export default {\n render() {}\n};\n")
        monkeypatch.setattr(module, "program", lambda: made)
    monkeypatch.setattr(feed, "READ_WITHIN", 0.0)
    monkeypatch.setattr(views, "READ_WITHIN", 0.0)
    monkeypatch.setattr(views, "_UNSEEN", 0.0)
    return made


@pytest.fixture
def run(home: Path) -> Run:
    run = stored.create(Client(), num_steps=100)
    stored.train(run)
    stored.step(run, 1)
    return run


@pytest.fixture
def poller() -> Still:
    return Still()


@pytest.fixture
def over() -> list[Run]:
    return []


@pytest.fixture
def all_views(poller: Still, over: list[Run]) -> Views:
    return Views(poller, over.append)


@pytest.fixture
def panel(run: Run, all_views: Views) -> Iterator[Panel]:
    panel = Panel(run, all_views)
    yield panel
    panel.close()


# State and looks


def test_the_state_that_a_notebook_saves_is_small_and_says_how_the_run_stands(
    panel: Panel, run: Run
) -> None:
    state = {name: value for name, value in panel.get_state().items() if name != "layout"}
    assert len(json.dumps(state)) < 10_000
    assert (state["run_id"], state["run_name"], state["selected_id"]) == (run.id, "first", None)
    assert "running, TRAINING" in state["told"]
    assert state["_esm"].startswith("export default")


def test_a_wait_that_ends_leaves_the_end_in_what_is_saved(
    panel: Panel, run: Run, all_views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook may be saved right after, before the poller looks again."""
    monkeypatch.setattr(live, "views", all_views)
    stored.step(run, 3, 0.5)
    stored.finish(run)
    assert "running, TRAINING" in panel.told
    live.bring_up_to_date(run)
    assert "succeeded, COMPLETED" in panel.told
    assert "step 3 of" in panel.told


def test_the_summary_beside_a_panel_says_each_new_phase_at_once(
    home: Path, all_views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The panel has the curve; what is saved above it must not stay at how the run began."""
    now = [1000.0]
    monkeypatch.setattr(live, "views", all_views)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(live, "READ_WITHIN", 0.0)
    run = stored.create(Client(), num_steps=100)
    published: list[dict[str, Any]] = []
    publisher = SimpleNamespace(publish=lambda data, **_: published.append(data))
    panel = Panel(run, all_views)
    panel.say({"kind": "hello"})
    summary = live.LiveSummary(publisher, run)
    summary.show()
    summary.look()
    stored.train(run)
    summary.look()
    assert "running, TRAINING" in published[-1]["text/plain"]
    stored.step(run, 1)
    count = len(published)
    now[0] += 1
    assert summary.look() == (False, False)
    assert len(published) == count
    now[0] += 15
    summary.look()
    assert "step 1 of 100" in published[-1]["text/plain"]
    assert "image/png" in published[-1]
    stored.step(run, 2)
    drawn = published[-1]["image/png"]
    now[0] += 15
    summary.look()
    assert "step 2 of 100" in published[-1]["text/plain"]
    assert published[-1]["image/png"] == drawn  # pictures are dear
    stored.finish(run)
    now[0] += 0.1
    assert summary.look() == (True, True)
    assert "succeeded, COMPLETED" in published[-1]["text/plain"]
    assert published[-1]["image/png"] != drawn
    panel.close()


def test_the_real_loader_fits_into_the_state() -> None:
    loader = Path(program.__file__).parent.parent / "static" / "loader.js"
    if not loader.exists():
        pytest.skip("the page is not built in this tree")
    assert loader.stat().st_size < 8_000


def test_its_output_without_a_widget_is_text_and_escaped(home: Path, all_views: Views) -> None:
    run = stored.create(Client(), "<b>bold</b>", num_steps=100)
    panel = Panel(run, all_views)
    data, _ = panel._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id
    assert "<b>bold</b>" in data["text/plain"]
    assert "&lt;b&gt;bold&lt;/b&gt;" in data["text/html"]
    assert "<b>bold" not in data["text/html"]
    assert f"nbtrain.attach(&#x27;{run.id[:12]}&#x27;)" in data["text/html"]
    assert repr(panel) == f"<panel of {run.title}>"
    panel.close()


def test_a_source_tree_without_the_page_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "_BUILT", tmp_path)
    with pytest.raises(NbtrainError, match=r"panel.js is not there .*jlpm build"):
        program._read("panel.js")


def test_a_terminal_has_no_panel(run: Run, shell: Any) -> None:
    assert not fronts.panels
    shell.run("%train watch first")
    (bundle,) = shell.bundles
    assert bundle.keys() <= {"text/plain", "text/html", "image/png"}
    with pytest.raises(NbtrainError, match="a panel needs a notebook"):
        run.panel()


# What it sends


def test_a_page_gets_the_program_once(panel: Panel, built: Program) -> None:
    panel.say({"kind": "code", "have": None})
    panel.say({"kind": "code", "have": built.hash})
    panel.say({"kind": "code", "have": 7})
    sent = panel.of("code")
    assert [content["hash"] for content in sent] == [built.hash] * 3
    whole = [bytes(buffer) for buffer in sent[0]["buffers"]]
    assert whole == [built.module, built.style]
    assert sent[1]["buffers"] == []
    assert len(sent[2]["buffers"]) == 2


def test_hello_brings_everything_and_then_what_is_new(
    panel: Panel, run: Run, poller: Still, over: list[Run]
) -> None:
    poller.turn()
    assert panel.of("update") == []  # no page is there
    panel.say({"kind": "hello"})
    poller.turn()
    (whole,) = panel.of("update")
    assert whole["base"] == 0
    assert [(t["name"], t["rows"]) for t in whole["tables"]] == [("steps", 1), ("rounds", 0)]
    assert [len(buffer) for buffer in whole["buffers"]] == [8] * 11 + [0] * 6
    poller.turn()
    assert len(panel.of("update")) == 1
    stored.step(run, 2)
    poller.turn()
    new = panel.of("update")[-1]
    assert (new["base"], new["serial"]) == (whole["serial"], whole["serial"] + 1)
    stored.finish(run)
    poller.turn()
    assert panel.of("update")[-1]["state"]["head"]["over"]
    assert "COMPLETED" in panel.told
    assert over == [run]
    poller.turn()
    assert over == [run]


def test_pages_hear_a_tick_also_when_the_run_is_over_and_then_nothing_is_read(
    panel: Panel, run: Run, poller: Still, all_views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_views.look() == (False, True)
    panel.say({"kind": "hello"})
    stored.finish(run)
    poller.turn()
    poller.turn()
    (ticking,) = poller.views()
    assert ticking is all_views
    monkeypatch.setattr(run._store.database, "reading", None)
    before = len(panel.of("tick"))
    for _ in range(3):
        poller.turn()
    assert len(panel.of("tick")) == before + 3


def test_many_panels_of_a_run_share_one_reading_and_each_update_is_made_once(
    run: Run, poller: Still, all_views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [Run(run._store, stored.row_of(run)) for _ in range(10)]
    panels = [Panel(handle, all_views) for handle in handles]
    made: list[int] = []
    whole = messages.update
    monkeypatch.setattr(messages, "update", lambda new: made.append(1) or whole(new))
    for panel in panels:
        panel.say({"kind": "hello"})
    poller.turn()
    stored.step(run, 2)
    poller.turn()
    assert len(made) == 2
    assert all(len(panel.of("update")) == 2 for panel in panels)
    for panel in panels:
        panel.close()
    poller.turn()
    assert poller.views() == []


def test_a_closed_panel_and_one_that_is_gone_are_dropped(
    run: Run, poller: Still, all_views: Views
) -> None:
    first, second = Panel(run, all_views), Panel(run, all_views)
    for panel in (first, second):
        panel.say({"kind": "hello"})
    poller.turn()
    first.close()
    stored.step(run, 2)
    poller.turn()
    assert (len(first.of("update")), len(second.of("update"))) == (1, 2)
    first.say({"kind": "hello"})
    poller.turn()
    assert len(first.of("update")) == 1
    followed = all_views.of(run)
    # ipywidgets itself holds what is open; without that nothing else does
    super(RunPanel, second).close()
    del first, second, panel
    gc.collect()
    assert not followed._all
    assert followed.look() == (False, True)


def test_what_is_sent_never_raises(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        msg = "the comm is gone"
        raise RuntimeError(msg)

    monkeypatch.setattr(panel, "send", broken)
    RunPanel.deliver(panel, messages.TICK)


# What comes from a page


@pytest.mark.parametrize(
    "content",
    [
        None, 3, "hello", [], {}, {"kind": 3}, {"kind": "update"}, {"kind": "do"},
        {"kind": "do", "id": "1", "action": "cancel", "args": {}},
        {"kind": "do", "id": True, "action": "cancel", "args": {}},
        {"kind": None}, {"kind": ["hello"]},
    ],
)  # fmt: skip
def test_what_is_no_message_is_ignored(panel: Panel, content: Any) -> None:
    assert as_asked(content) is None
    panel.say(content)
    assert not hasattr(panel, "sent")


@pytest.mark.parametrize(
    ("action", "args", "told"),
    [
        ("fly", {}, "there is no action 'fly'"),
        (None, {}, "there is no action ''"),
        ("resume", {"checkpoint": 3, "steps": 5}, "pick a checkpoint first"),
        ("resume", {"checkpoint": "abcd", "steps": "5"}, "further steps"),
        ("resume", {"checkpoint": "abcd", "steps": 10**9}, "a whole number from 1 to 1,000,000"),
        ("resume", {"checkpoint": "abcd", "steps": True, "name": 3}, "the name is no text"),
        ("resume", {"checkpoint": "abcd" * 16, "steps": 5}, "no checkpoint"),
        ("export", {"checkpoint": "abcd"}, "name a folder first"),
        ("export", {"folder": "x"}, "pick a checkpoint first"),
        ("generate", {"prompts": "hi", "n": 1}, "write a prompt first"),
        ("generate", {"prompts": ["hi", 3], "n": 0}, "replies per prompt"),
        ("generate", {"prompts": [" "], "n": 1}, "write a prompt first"),
        ("generate", {"prompts": ["a"] * 65, "n": 1}, "at most 64 prompts"),
        ("follow", {}, "no run is named"),
        ("follow", {"run_id": "nothing of the kind"}, "no run has the name or id"),
    ],
)
def test_bad_requests_end_in_a_sentence(
    panel: Panel, action: Any, args: dict[str, Any], told: str
) -> None:
    done = panel.do(action, **args)
    assert done["ok"] is False
    assert told in done["said"]


def test_arguments_that_are_none_and_ones_that_are_huge_are_refused(panel: Panel) -> None:
    for request, args in ((1, None), (2, [1]), (3, {"prompts": ["x" * 300_000]})):
        panel.say({"kind": "do", "id": request, "action": "generate", "args": args})
    assert [content["said"] for content in panel.of("done")] == ["no arguments"] * 3


def test_an_unexpected_error_is_told_and_printed_nowhere(
    panel: Panel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Run) -> Run:
        msg = "the disk is gone"
        raise OSError(msg)

    monkeypatch.setattr(Run, "cancel", broken)
    done = panel.do("cancel")
    assert (done["ok"], done["said"]) == (False, "OSError: the disk is gone")
    assert capfd.readouterr() == ("", "")


def test_cancel(panel: Panel, run: Run) -> None:
    assert panel.do("cancel")["ok"]
    assert [row["command"] for row in run._store.commands(run._key)] == ["cancel"]
    stored.finish(run, Phase.CANCELLED)
    assert "is over already: cancelled" in panel.do("cancel", 2)["said"]


def test_generate_tells_how_far_it_is_and_what_came(
    panel: Panel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sample:
        prompt, completion, ended, tokens = "1+1?", "<b>2</b>", "ended by itself", 3

    def generate(self: Checkpoint, prompts: Any, n: int = 1, **settings: Any) -> Any:
        settings["told"]("loading the model")
        assert (prompts, n) == (["1+1?"], 2)
        return [Sample(), Sample()]

    monkeypatch.setattr(Checkpoint, "generate", generate)
    saved = stored.save(run, 1)
    done = panel.do("generate", checkpoint=saved, prompts=["1+1?"], n=2)
    assert (done["ok"], done["said"]) == (True, "2 replies")
    sample = {"prompt": "1+1?", "completion": "<b>2</b>", "ended": "ended by itself"}
    assert done["result"] == {"samples": [sample, sample]}
    assert [content["said"] for content in panel.of("doing")] == ["loading the model"]


def test_a_slow_action_keeps_nothing_else_up_and_is_asked_for_once(
    panel: Panel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    begun: list[int] = []

    def slow(*_: Any, **__: Any) -> Any:
        begun.append(1)
        assert go_on.wait(30)
        return []

    monkeypatch.setattr(Checkpoint, "generate", slow)
    saved = stored.save(run, 1)
    ask = {"checkpoint": saved, "prompts": ["a"], "n": 1}
    for request in (1, 1, 2, 3, 4):
        panel.say({"kind": "do", "id": request, "action": "generate", "args": ask})
    assert "4 actions are under way" in panel.do("cancel", 9)["said"]
    go_on.set()
    deadline = time.monotonic() + 30
    while len(panel.of("done")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(begun) == 4
    assert panel.do("cancel", 10)["ok"]


def test_an_export_that_cannot_be_written_names_the_stated_folder(
    panel: Panel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(_: Checkpoint, folder: str) -> Any:
        with NewFolder(folder, "an adapter").filled("last") as half:
            (half / "last").write_text("")

    monkeypatch.setattr(Checkpoint, "export", export)
    done = panel.do("export", checkpoint=stored.save(run, 1), folder="/proc/x")
    said = "/proc/x cannot be written: the file system takes no new file there"
    assert (done["ok"], done["said"]) == (False, said)


def test_resume_starts_a_run_or_says_everything_that_is_wrong(
    panel: Panel, run: Run, launched: list[Run]
) -> None:
    saved, bare = stored.save(run, 1), stored.save(run, 2, state=False)
    done = panel.do("resume", checkpoint=saved, steps=5, name="more", weights_only=False)
    assert done["ok"], done
    (started,) = launched
    assert panel.resumed == started
    assert done["result"] == {"run_id": started.id, "title": started.title}
    assert (started.plan.start_step, started.plan.total_steps) == (1, 6)
    refused = panel.do("resume", 2, checkpoint=bare, steps=5, name=None, weights_only=False)
    assert refused["ok"] is False
    assert "load_weights_only" in refused["said"]
    assert panel.do("resume", 3, checkpoint=bare, steps=5, name="", weights_only=True)["ok"]
    assert (launched[1].plan.start_step, launched[1].plan.total_steps) == (0, 5)


def test_further_steps_of_a_supervised_run_need_further_epochs(home: Path) -> None:
    run = stored.create_supervised(Client(), rows=160)  # 20 updates an epoch, 2 epochs
    assert going_on._more(run.plan, 40, 5) == {"max_steps": 45, "epochs": 3}
    assert going_on._more(run.plan, 20, 5) == {"max_steps": 25, "epochs": 2}


def test_follow_turns_the_panel_to_another_run(
    panel: Panel, run: Run, poller: Still, all_views: Views
) -> None:
    panel.say({"kind": "hello"})
    poller.turn()
    panel.selected = stored.save(run, 1)
    other = stored.create(Client(), "other", num_steps=10)
    assert panel.do("follow", run_id=other.id)["result"]["title"] == other.title
    assert (panel.run_id, panel.run_name, panel.selected_id) == (other.id, "other", None)
    assert panel.run == other
    poller.turn()
    assert panel.of("update")[-1]["state"]["head"]["run_id"] == other.id
    before = len(panel.of("update"))
    stored.step(run, 2)
    poller.turn()
    assert len(panel.of("update")) == before
    assert "other" in panel.told


def test_an_action_that_ended_is_answered_again_and_never_done_again(
    panel: Panel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Run, "cancel", lambda self: asked.append(self.id))
    first = panel.do("cancel", 7)
    failed = panel.do("follow", 8)
    for request, action in ((7, "cancel"), (8, "follow"), (7, "cancel")):
        panel.say({"kind": "do", "id": request, "action": action, "args": {}})
    assert panel.of("done") == [first, failed, first, failed, first]
    assert asked == [run.id]
    monkeypatch.setattr(actions, "_REMEMBERED", 2)
    panel.do("cancel", 9)
    assert list(panel._actions._ended) == [8, 9]


def test_any_number_of_hellos_costs_two_updates_a_second(
    panel: Panel, run: Run, poller: Still, all_views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(views, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hurried: list[object] = []
    follow = all_views.follow
    monkeypatch.setattr(
        all_views, "follow", lambda panels, **how: hurried.append(how) or follow(panels, **how)
    )
    for _ in range(10_000):
        panel.say({"kind": "hello"})
    assert len(hurried) == 1
    for _ in range(20):
        panel.say({"kind": "hello"})
        poller.turn()
    assert len(panel.of("update")) == 1
    stored.step(run, 2)
    poller.turn()  # what is new comes all the same
    assert [update["base"] > 0 for update in panel.of("update")] == [False, True]
    stored.finish(run)
    for _ in range(2):
        poller.turn()
    now[0] += views.PAUSE
    for _ in range(3):  # the last one is answered, though the run is over
        poller.turn()
    assert panel.of("update")[-1]["base"] == 0
    assert [update["base"] for update in panel.of("update")].count(0) == 2


# Python's side


def test_selected_is_the_picked_checkpoint(panel: Panel, run: Run) -> None:
    assert panel.selected is None
    saved = stored.save(run, 1)
    seen: list[Any] = []
    panel.observe(lambda change: seen.append(change["new"]), "selected_id")
    panel.set_state({"selected_id": saved})  # as a page does
    assert panel.selected is not None
    assert panel.selected.checkpoint_id == saved
    panel.selected = None
    panel.selected = saved[:10]
    panel.selected = panel.selected
    assert seen == [saved, None, saved]
    panel.set_state({"selected_id": "what a page makes up"})
    assert panel.selected is None
    other = stored.create(Client(), "other", num_steps=10)
    with pytest.raises(NotFound, match="is none of run first"):
        panel.selected = stored.save(other, 1)
    with pytest.raises(NotFound):
        panel.selected = "abcdef"


@pytest.mark.parametrize(
    "state",
    [
        {"selected_id": 5}, {"selected_id": ["ab"]}, {"selected_id": "a" * 65},
        {"selected_id": "x" * 1_000_000}, {"selected_id": "\ud800"}, {"selected_id": "a\n"},
        {"run_id": None}, {"run_id": "ab" * 32, "run_name": "other", "told": "x" * 1_000_000},
        {"_esm": "export default {}"}, {"layout": "IPY_MODEL_x"}, {"_view_name": None},
    ],
)  # fmt: skip
def test_a_page_sets_the_pick_and_nothing_else(panel: Panel, state: dict[str, Any]) -> None:
    before = panel.get_state()
    panel.set_state(state)
    assert panel.get_state() == before
    panel.set_state({**state, "selected_id": "ab" * 32})
    assert panel.get_state() == before | {"selected_id": "ab" * 32}
    panel.set_state({"selected_id": ""})
    assert panel.selected is None


def test_a_run_of_another_home_has_a_panel_of_its_own(
    run: Run, all_views: Views, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run._store.home, tmp_path / "copied")
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "copied"))
    other, again = Client().training.runs.get(run.id), Client().training.runs.get(run.id)
    assert (other.id, other == again, hash(other)) == (run.id, True, hash(again))
    assert other != run
    panels = [Panel(handle, all_views) for handle in (run, other, again)]
    assert all_views.of(run) is not all_views.of(other)
    assert all_views.of(other) is all_views.of(again)
    assert all_views.of(run).newest is panels[0]
    panels[1].do("cancel")
    assert (len(run._store.commands(run._key)), len(other._store.commands(other._key))) == (0, 1)
    panels[0].turn_to(other)
    assert panels[0].run == other
    for panel in panels:
        panel.close()


def test_a_closed_panel_leaves_no_widget(run: Run, all_views: Views) -> None:
    before = set(_instances)
    panel = Panel(run, all_views)
    assert len(set(_instances) - before) == 2
    panel.close()
    panel.close()
    assert set(_instances) == before


def test_an_update_is_columns_behind_a_plain_description(run: Run) -> None:
    content, buffers = messages.update(Feed(run).whole())
    steps = content["tables"][0]
    assert (steps["rows"], len(steps["columns"])) == (1, 11)
    assert len(buffers) == sum(len(table["columns"]) for table in content["tables"])
    assert all(buffer.format == "B" for buffer in buffers)
