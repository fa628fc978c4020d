"""The report of a run: one file, whole, safe, and true."""

from __future__ import annotations

import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
import stored

from nbtrain.cli import quickstart
from nbtrain.client import Client, Run, report_samples
from nbtrain.client.restated import restate
from nbtrain.errors import NotWritten, Refused
from nbtrain.plan.phases import Phase
from nbtrain.report import drawing, page
from nbtrain.report.drawing import Line, draw_lines, draw_stack
from nbtrain.report.markup import Markup

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">&amp;"
ENDING = f"{HOSTILE}\x00\ud800"  # what no page may contain
_VOID = frozenset(("meta", "img", "br", "link", "hr"))


class Page(HTMLParser):
    """What a page consists of; complains of tags that are left open, and of ids given twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.unlabelled: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.links += [str(v) for n, v in attrs if n in ("src", "href", "srcset", "action", "data")]
        self.links += re.findall(r"url\(([^)]*)\)", str(named.get("style", "")))
        if named.get("id"):
            self.ids.append(str(named["id"]))
        if tag == "th" and "scope" not in named:
            self.unlabelled.append(tag)
        if named.get("role") == "img" and not named.get("aria-label"):
            self.unlabelled.append(tag)
        assert not any(name.startswith("on") for name in named), named

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def read(path: Path) -> Page:
    return Page(path.read_text("utf-8"))


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


def learned(client: Client, name: str = "first") -> Run:
    """A run of a few steps with rounds, checkpoints and a hostile model."""
    run = stored.create(client, name, num_steps=20)
    stored.train(run)
    stored.validate(run, 0, 0.1)
    stored.save(run, 0)
    for number in range(1, 21):
        terms = {"terms": {"exact": number / 20, "length": 0.5}, "tokens_mean": 5.0 + number}
        stored.step(run, number, number / 20, metrics=terms)
    hostile = {
        "trajectory_id": 9000, "group_id": 90, "sample": 0, "task_id": "cd" * 8,
        "status": "completed", "reason": "ENV_DONE", "reward": 2.0, "eligible": True,
        "verdict": HOSTILE, "output_tokens": 5,
        "text": {"prompt": [{"role": "user", "content": HOSTILE}], "completion": ENDING,
                 "terms": {HOSTILE: 1.0}, "error": None},
    }  # fmt: skip
    row = {"step": 21, "avg_reward": 1.0, "used_reward": 1.0, "completed_groups": 1}
    stored.writer(run).commit_step(row, [{"group_id": 90, "size": 1}], [hostile])
    stored.validate(run, 20, 0.9)
    stored.save(run, 20)
    return run


def test_a_report_is_one_file_that_needs_nothing(client: Client, tmp_path: Path) -> None:
    run = learned(client)
    stored.finish(run)
    path = run.report(tmp_path / "new" / "r.html")
    assert path == tmp_path / "new" / "r.html"
    found = read(path)
    assert "script" not in found.tags
    assert all(link.startswith(("#", "data:")) for link in found.links), found.links
    assert not {"link", "iframe", "object", "embed", "form", "base"} & set(found.tags)
    assert len(found.ids) == len(set(found.ids))
    anchors = [link[1:] for link in found.links if link.startswith("#")]
    assert set(anchors) <= set(found.ids)
    assert not found.unlabelled
    assert found.tags.count("h1") == 1
    text = path.read_text("utf-8")
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert "http://" not in text
    assert "https://" not in text


def test_a_report_says_what_the_run_knows(client: Client, tmp_path: Path) -> None:
    run = learned(client)
    stored.finish(run)
    words = read(run.report(tmp_path / "r.html")).words
    for told in (
        "Run first", "succeeded, COMPLETED", "Held-out reward reads 0.100 at step 0 and 0.900 at",
        "exact goes from", "num_steps", "question 20", "answer 20.1", run.id, run.config_hash,
        run.plan.workload.workload_id, run.plan.base_model.fingerprint, "COMPLETED",
        "this is all of it", "weights + training state", "values at their defaults",
    ):  # fmt: skip
        assert told in words, told


def test_the_samples_are_ones_that_trained_where_some_did(client: Client) -> None:
    run = stored.create(client)
    stored.train(run)
    for number in (1, 2):
        stored.step(run, number, 0.5, rewards=(0.25, 0.5), completed_groups=1)
    told = report_samples.gather(run, run._row())
    assert [each.reward for each in told.shown] == [0.5, 0.25]
    assert told.said == "Of the newest 4 training trajectories; the newest among equals."
    used = {"trajectory_id": 200, "group_id": 9, "sample": 0, "task_id": "ef" * 8,
            "status": "completed", "reason": "ENV_DONE", "eligible": True, "output_tokens": 5,
            "verdict": "trained on", "consumed_step": 3}  # fmt: skip
    rows = [used | {"trajectory_id": 900 + n, "sample": n, "reward": reward, "consumed_step": step}
            for n, (reward, step) in enumerate(((0.3, 3), (0.4, 3), (1.0, None)))]  # fmt: skip
    stored.writer(run).commit_step({"step": 3}, [{"group_id": 9, "size": 3}], rows)
    told = report_samples.gather(run, run._row())
    assert [each.reward for each in told.shown] == [0.4, 0.3]
    assert told.said.startswith("Of 2 that trained among the newest 7 training trajectories;")


def test_hostile_text_stays_text(client: Client, tmp_path: Path) -> None:
    run = learned(client, f"bad {HOSTILE}")
    stored.finish(run, Phase.FAILED, failure=f"it {HOSTILE} broke")
    found = read(run.report(tmp_path / "r.html"))
    assert not {"script", "img"} & set(found.tags)
    assert found.words.count(HOSTILE) >= 5
    assert f"it {HOSTILE} broke" in found.words
    assert "\x00" not in found.words
    assert f"{HOSTILE}\ufffd\ufffd" in found.words


@pytest.mark.browser
def test_hostile_text_does_nothing_in_a_browser(client: Client, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    run = learned(client, f"bad {HOSTILE}")
    path = run.report(tmp_path / "r.html")
    # Without its policy and its escaping the page would run this, so the test can fail
    naked = tmp_path / "naked.html"
    naked.write_text(f"<title>page</title>{HOSTILE}", "utf-8")
    asked: list[str] = []
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(
                executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
                args=["--no-sandbox"],
            )
        except api.Error as error:
            pytest.skip(f"no Chromium: {error}")
        tab = chromium.new_page()
        tab.goto(naked.as_uri())
        assert tab.title() == "run"
        for width, scheme in ((1200, "light"), (390, "dark")):
            tab = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            tab.on("dialog", lambda dialog: asked.append(dialog.message))
            tab.on("request", lambda request: asked.append(request.url))
            tab.goto(path.as_uri())
            assert tab.title().startswith("Run bad <script>")
            wider = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wider <= 0
        chromium.close()
    assert asked == [path.as_uri()] * 2


def test_a_run_that_goes_on_is_reported_as_it_stands(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    words = read(run.report(tmp_path / "r.html")).words
    assert "The run goes on: as of" in words
    assert "nothing to draw" in words
    assert "No checkpoint was committed" in words
    stored.train(run)
    stored.step(run, 1, 0.25)
    assert "Mean reward: 0.250 at step 1" in read(run.report(tmp_path / "r.html")).words


def test_a_failed_run_without_a_step_says_why(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    stored.finish(run, Phase.FAILED, failure="the model is gone\nand its folder")
    words = read(run.report(tmp_path / "r.html")).words
    assert "failed, FAILED" in words
    assert "the model is gone\nand its folder" in words
    assert "The run recorded no versions" in words


def test_a_supervised_run_has_its_losses(client: Client, tmp_path: Path) -> None:
    run = stored.create_supervised(client)
    stored.train(run)
    for number in range(1, 6):
        stored.loss(run, number, 2.0 / number)
    stored.read(run, 0, 2.5)
    stored.read(run, 5, 0.5)
    stored.save(run, 5)
    stored.finish(run)
    words = read(run.report(tmp_path / "r.html")).words
    assert "Validation loss reads 2.500 at step 0 and 0.500 at step 5" in words
    assert "support-triage" in words
    assert "triage-val, 20 rows" in words
    assert "What the model wrote" not in words


def test_a_smoke_check_has_its_verdict(client: Client, tmp_path: Path) -> None:
    run = stored.create_supervised(client, smoke=True)
    stored.train(run)
    stored.loss(run, 1, 2.0)
    verdict = {"passed": False, "score": 0.31, "threshold": 0.98, "layer": "template",
               "said": HOSTILE, "worst": []}  # fmt: skip
    run._store.put_verdict(run._key, verdict)
    stored.finish(run)
    words = read(run.report(tmp_path / "r.html")).words
    assert "smoke check failed: score 0.310, needed 0.980" in words
    assert HOSTILE in words


def test_versions_come_from_the_newest_training_state(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    stored.save(run, 3)
    folder = run.folder / "checkpoints" / "step-000003"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"torch": "9.9.9", "device": "cpu", "threads": 2}
    (folder / "state.json").write_text(json.dumps({"environment": environment}), "utf-8")
    words = read(run.report(tmp_path / "r.html")).words
    assert "9.9.9" in words
    assert "As recorded with the training state of step 3" in words


def test_only_a_report_is_replaced(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    path = run.report(tmp_path / "r.html")
    first = path.read_text("utf-8")
    assert run.report(path) == path
    other = tmp_path / "notes.html"
    other.write_text("<p>mine</p>", "utf-8")
    with pytest.raises(Refused, match=r"notes\.html exists and is no report of nbtrain"):
        run.report(other)
    assert other.read_text("utf-8") == "<p>mine</p>"
    with pytest.raises(Refused, match="is a folder"):
        run.report(tmp_path)
    assert sorted(each.name for each in tmp_path.glob("*r.html*")) == ["r.html"]
    assert page.is_report(path)
    assert len(first) > 1000


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_the_report(tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "far" / ("r" * 255), tmp_path / "link.html"
    link.symlink_to(real)
    if there:
        page.write_page(real, page.page("old", Markup(), [], ""))
    assert page.write_page(link, page.page("new", Markup(), [], "")) == link
    assert link.is_symlink()
    assert "<title>new</title>" in real.read_text()
    assert [path.name for path in real.parent.iterdir()] == [real.name]


def test_a_pipe_a_socket_and_a_device_are_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(tmp_path / "socket"))
        for path in (*(tmp_path / name for name in ("pipe", "link", "socket")), Path("/dev/null")):
            with pytest.raises(Refused, match="a pipe, a socket or a device"):
                page.write_page(path, "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"lies beneath .*file, which is no folder"):
        page.write_page(tmp_path / "file" / "x" / "y.html", "x")


def test_a_place_that_takes_no_files_is_named_as_it_was_stated() -> None:
    with pytest.raises(NotWritten, match=r"^/proc/r.html cannot be written: [^/.]*$") as told:
        page.write_page("/proc/r.html", "x")
    assert isinstance(told.value, OSError)


def test_a_full_disk_leaves_the_earlier_report(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored.create(client)
    path = run.report(tmp_path / "r.html")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten) as told:
        run.report(path)
    assert str(told.value) == f"{path} cannot be written: the disk is full"
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["r.html"]


def test_a_long_run_stays_small() -> None:
    steps = range(10_000)
    noisy = [(float(n), (n * 7919 % 1000) / 1000) for n in steps]
    bound = [(x, y - 1) for x, y in noisy]
    line = Line("noise", noisy, low=bound, high=noisy)
    found = draw_lines("Noise", [line], told="noise", unit="of it", wide=True)
    assert len(found.svg) + len(found.narrow or "") < 60_000
    stack = draw_stack(
        "Stack", list(steps), [("a", 0, [1.0] * 10_000), ("b", 1, [0.0] * 10_000)],
        told="stack", unit="of it",
    )  # fmt: skip
    assert len(stack.svg) < 30_000
    assert [key.label for key in stack.keys] == ["a"]


def test_drawings_have_texts_and_the_page_s_colours() -> None:
    found = draw_lines(
        "T", [Line("$x_1$ <b>", [(0.0, 0.0), (5.0, 1e-4)])], told="t", unit="$u$ <b>"
    )
    assert "<text" in found.svg
    assert "$u$ &lt;b&gt;" in found.svg
    assert "var(--line-0,#0072b2)" in found.svg
    assert ">1e-4<" in found.svg
    assert "xmlns" not in found.svg
    assert not re.search(r'<g id="', found.svg)


def test_drawing_changes_no_setting_of_matplotlib() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with drawing._as_text("salt"):
        assert mpl.rcParams["svg.fonttype"] == "none"
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("given", "line", "body"),
    [
        (
            {"options": {"num_steps": 3, "learning_rate": 1e-5},
             "arguments": {"workload": "my sums", "base_model_slug": "nbtrain/tiny",
                           "load_weights_only": True}},
            "%%train --workload 'my sums' --model nbtrain/tiny --weights-only",
            "num_steps: 3\nlearning_rate: 1e-5",
        ),
        ({"options": {"note": "$x"}, "arguments": {"display_name": "$n"}},
         "%%train --name $$n", 'note: "$$x"'),
        ({"descriptor": {"kind": "run"}, "arguments": {}}, "%%train", "kind: run"),
    ],
)  # fmt: skip
def test_the_plan_is_stated_again(given: dict[str, object], line: str, body: str) -> None:
    found = restate(given, "ab" * 32)
    assert found.cell == f"{line}\n{body}"
    compile(found.python, "report", "exec")
    assert "ab" * 32 in found.said


def test_the_stated_python_makes_the_same_plan(client: Client) -> None:
    options = {"num_steps": 5, "batch_size": 2, "group_size": 4, "learning_rate": 3e-4}
    view = client.training.resolve(options=options, bench_id="sums", display_name="x")
    source = restate(view.given, "").python.replace("Client().training.create", "resolve")
    names = {"resolve": client.training.resolve}
    exec(source.replace("from nbtrain import Client", ""), names)  # our own text
    again = names["run"]
    assert again.config_hash == view.config_hash  # type: ignore[attr-defined]


def test_quickstart_writes_its_report_or_says_why_not(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = stored.create(client)
    assert str(tmp_path / "nbtrain-quickstart.html") in quickstart.written(run)
    assert (tmp_path / "nbtrain-quickstart.html").is_file()
    (tmp_path / "nbtrain-quickstart.html").write_text("mine", "utf-8")
    assert "No report was written" in quickstart.written(run)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Run, "report", denied)
    assert quickstart.written(run) == "No report was written: [Errno 13] Permission denied"
