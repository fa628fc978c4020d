"""What outputs are made of where nothing runs: text stays text, styles are inline, all is readable.

Everything that shows itself as HTML stands in one gallery, made twice: with plain words, and with
words that are markup. What the plain one has no element for, the other must not have either.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
import stored
from IPython.core.formatters import DisplayFormatter
from PIL import Image
from saved import Markup
from shells import Shell

import nbtrain
from nbtrain.client import Client, Run
from nbtrain.client.checking import CheckReport
from nbtrain.client.dataset_analysis import DatasetAnalysis, RowPreview
from nbtrain.client.listing import Listing, Unreadable
from nbtrain.client.resolved_descriptor import DescriptorView
from nbtrain.client.trying import Sample, Samples
from nbtrain.client.wide import WideFrame
from nbtrain.data.analysis import Analysis, Lengths
from nbtrain.data.findings import Finding
from nbtrain.data.masks import MaskedRow
from nbtrain.data.preview import preview_html
from nbtrain.errors import Problem
from nbtrain.notebook import live
from nbtrain.notebook.form.form import Form
from nbtrain.notebook.option_table import OptionTable
from nbtrain.plan.checks import Check
from nbtrain.plan.phases import Phase
from nbtrain.report.figures import HELD_OUT, REWARD

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=\"alert('2')\">"
    "<iframe src='javascript:3'></iframe><a href=javascript:4>a</a>"
    "<style>*{}</style></div></td></table></pre>&amp;"
)
FILE = "<img src=x onerror=alert(1)>'\".jsonl"
PLAIN, PLAIN_FILE = "plain words &amp; no more", "plain.jsonl"

TAGS = frozenset(
    (
        *("div", "span", "b", "i", "pre", "code", "mark", "img", "br", "ul", "ol", "li"),
        *("table", "thead", "tbody", "tr", "th", "td", "caption", "small", "summary", "details"),
    )
)
ATTRIBUTES = frozenset(("style", "class", "scope", "colspan", "rowspan", "alt", "src", "open"))
FRAMES = ("texts", "wide", "log")
"""Shown by pandas or as text, with markup of their own."""
ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-f]+")


def validated(run: Run, step: int, text: str) -> Any:
    """A checkpoint without files whose round sampled four tasks."""
    rows = [
        {
            "trajectory_id": 5000 + step * 10 + task, "group_id": task, "sample": 0,
            "task_id": f"{task:016x}", "status": "completed", "reason": "ENV_DONE",
            "reward": float((task + step) % 2), "eligible": False, "verdict": text,
            "output_tokens": 5,
            "text": {"prompt": [{"role": "user", "content": text}], "completion": text,
                     "terms": {text: 1.0}, "error": None},
        }
        for task in range(4)
    ]  # fmt: skip
    figures = {"held_out_reward": 0.5, "completed_samples": 4, "seconds": 1.0}
    stored.writer(run).commit_validation(
        {"step": step, "round_completed": True, "expected_samples": 4, **figures}, rows
    )
    saved = stored.save(run, step)
    return next(c for c in run.checkpoint_list() if c.checkpoint_id == saved)


def ran(client: Client, text: str) -> Run:
    """A run in all of whose texts stands ``text``."""
    run = stored.create(client, text, num_steps=20)
    client.training.runs.annotate(run, description=text, config_name=text)
    stored.train(run)
    for number in range(1, 9):
        errors = (f"ValueError: {text}", None)
        stored.step(run, number, 0.5, rewards=(None, 1.0), errors=errors)
    row = {
        "trajectory_id": 9000, "group_id": 90, "sample": 0, "task_id": "cd" * 8,
        "status": "completed", "reason": "ENV_DONE", "reward": 2.0, "eligible": True,
        "verdict": text, "output_tokens": 5,
        "text": {"prompt": [{"role": text, "content": text}], "completion": text,
                 "terms": {text: 1.0}, "error": text},
    }  # fmt: skip
    step = {"step": 9, "avg_reward": 1.0, "used_reward": 1.0, "completed_groups": 1}
    stored.writer(run).commit_step(step, [{"group_id": 90, "size": 1}], [row])
    return run


def smoked(client: Client, text: str) -> Run:
    run = stored.create_supervised(client, text, smoke=True)
    stored.train(run)
    stored.loss(run, 1, 2.0)
    verdict = {"passed": False, "score": 0.31, "threshold": 0.98, "layer": "template",
               "said": text, "worst": []}  # fmt: skip
    run._store.put_verdict(run._key, verdict)
    stored.finish(run)
    return run


def gallery(folder: Path, text: str, file: str) -> dict[str, Any]:
    """Everything that shows itself, with ``text`` wherever a text can stand."""
    client = Client(home=folder / "home")
    run = ran(client, text)
    one, other = validated(run, 8, text), validated(run, 9, text)
    shown: dict[str, Any] = {"going": run.glance().bundle(notes=(text,))}
    stored.finish(run, Phase.FAILED, failure=f"it broke: {text}")
    second = ran(client, f"{text} 2")
    source = folder / file
    rows = f'{{"messages": [{{"role": "user", "content": {json.dumps(text)}}}, '
    rows += f'{{"role": "assistant", "content": {json.dumps(text)}}}], {json.dumps(text)}: 1}}\n'
    source.write_text(rows, "utf-8")
    dataset = client.datasets.register("asked", source)
    settings = {"n": 1, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": 1}
    view = client.training.resolve(
        options=stored.OPTIONS, bench_id="sums", display_name=f"{text} 3"
    )
    masked = MaskedRow([1, 2], [False, True], (), text + text, [
        (0, len(text)), (len(text), 2 * len(text))
    ])  # fmt: skip
    finding = Finding("x", "refusal", text, text, expected=text, found=text, hint=text)
    lengths = Lengths(1, 1, 1, 1, 1)
    analysis = Analysis(1, 1, lengths, lengths, 8, 0, (), (finding,), "ab", "cd", (text,))
    descriptor = client.training.resolve(
        {
            "kind": "run", "workload": "support-triage", "baseModel": "nbtrain/tiny",
            "description": text, "config": {"dataset": dataset.id, "method": "sft"},
        }
    )  # fmt: skip
    assert isinstance(descriptor, DescriptorView)
    model = client.base_models.get("nbtrain/tiny")._model
    shown |= {
        "run": run,
        "smoke check": smoked(client, text),
        "runs": client.training.runs.list(),
        "checkpoints": run.checkpoint_list(),
        "two runs": client.training.runs.compare(run, second),
        "two checkpoints": client.training.checkpoints.compare(one, other),
        "samples": Samples(
            [
                Sample(text, text, "stop", 3, 1),
                Sample([{"role": text, "content": text}], text, "length", 3, 2),
            ],
            one, settings, [text],
        ),
        "trajectory": next(t for t in client.trajectories.list(run) if t.reward == 2.0),
        "diagnosis": run.diagnose(),
        "plan": view,
        "estimate": view.estimate,
        "run's plan": run.plan,
        "descriptor": descriptor,
        "options": OptionTable.supervised(model, []),
        "dataset": dataset,
        "datasets": client.datasets.list(),
        "rows": client.datasets.rows("asked"),
        "analysis": DatasetAnalysis(analysis, text, text),
        "preview": RowPreview(0, 1, 2, 1, text, preview_html(masked)),
        "check": CheckReport(
            (Check(text, 2.0, text, text, refuse=1.0), Check("good", None, "", text)),
            (Problem(text, text, text, text, hint=text),),
        ),
        "damaged": Listing([Unreadable("dataset", "ab" * 32, text, text)]),
        "workloads": client.workloads.list(),
        "base models": client.base_models.list(),
        "models": client.models.list(),
        "bundles": client.bundles.list(),
        "panel": live.panel(second),
        "texts": run.texts(),
        "wide": WideFrame({"said": [text]}),
        "log": run.log,
    }  # fmt: skip
    parts = [client, client.training, client.training.runs, client.training.checkpoints]
    parts += [client.training.rewards, client.trajectories, client.workloads, client.datasets]
    parts += [client.base_models, client.models, client.bundles, client.known]
    return shown | {f"part {type(part).__name__}": part for part in parts}


def bundle(thing: Any) -> Mapping[str, Any]:
    """What a notebook keeps of it."""
    if isinstance(thing, Mapping):
        return thing
    data, _ = DisplayFormatter().format(thing)
    assert "text/plain" in data, f"{thing!r}"  # the formatter prints an error and goes on
    return dict(data)


Bundles = dict[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bundles, Bundles]]:
    """By name what everything shows, with plain words and with markup; and the things."""
    made = []
    for text, file in ((PLAIN, PLAIN_FILE), (HOSTILE, FILE)):
        folder = tmp_path_factory.mktemp("gallery")
        things = gallery(folder, text, file)
        things_made.update({name: type(thing) for name, thing in things.items()})
        made.append({name: bundle(thing) for name, thing in things.items()})
    yield made[0], made[1]
    ipywidgets.Widget.close_all()


things_made: dict[str, type] = {}


def elements(markup: Markup) -> set[tuple[str, frozenset[str]]]:
    return {(tag, frozenset(attrs)) for tag, attrs in markup.elements}


def in_html(shown: Bundles) -> dict[str, Markup]:
    return {n: Markup(b["text/html"]) for n, b in shown.items() if "text/html" in b}


SILENT = {"checkpoints", "options", "workloads", "base models", "models", "bundles", "panel"}
"""In which no text of a person or a model stands, or only a name."""


def test_markup_in_texts_is_shown_as_text(bundles: tuple[Bundles, Bundles]) -> None:
    plain, hostile = in_html(bundles[0]), in_html(bundles[1])
    assert plain.keys() == hostile.keys()
    shown_whole = " ".join(HOSTILE.split())
    for name, found in hostile.items():
        assert elements(found) <= elements(plain[name]), name
        assert not found.scripts.replace(plain[name].scripts, ""), name
        for _, attrs in found.elements:
            assert not [attr for attr in attrs if attr.startswith("on")], name
        for image in found.images:
            assert re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", image), name
    silent = SILENT | {"going", "runs", "estimate", "run's plan", "datasets", "descriptor"}
    silent |= {"damaged", "two runs"}
    for name in hostile.keys() - silent - {"texts"}:
        assert shown_whole in hostile[name].words, name
    for name in ("going", "runs", "panel", "run's plan", "descriptor", "damaged", "two runs"):
        assert "<script>alert(1)</script>" in hostile[name].words, name
    assert "<img src=x onerror=alert(1)>" in hostile["datasets"].words


def test_outputs_need_no_style_sheet_and_nothing_from_elsewhere(
    bundles: tuple[Bundles, Bundles],
) -> None:
    sheets = [*Path(nbtrain.__file__).parent.rglob("*.css")]
    styled = set(re.findall(r"\.(nbtrain-[\w-]+)", "".join(s.read_text("utf-8") for s in sheets)))
    for name, found in in_html(bundles[1]).items():
        if name in FRAMES:
            continue
        for tag, attrs in found.elements:
            assert tag in TAGS, (name, tag)
            assert attrs.keys() <= ATTRIBUTES, (name, tag, attrs)
            assert not styled & set(attrs.get("class", "").split()), (name, attrs)
            style = attrs.get("style", "")
            assert "url(" not in style, name
            assert "var(" not in style, name


def test_the_text_of_everything_can_be_read(bundles: tuple[Bundles, Bundles]) -> None:
    for shown in bundles:
        for name, data in shown.items():
            text = data["text/plain"]
            assert text.strip() or name == "log", name
            assert not ADDRESS.search(text), (name, text)
            assert "<div" not in text, name
    told = bundles[0]["part Client"]["text/plain"]
    assert "training" in told
    assert "evaluations" not in told, "what is refused is not offered"


def showing() -> set[type]:
    """Every class of the package that shows itself in a way of its own."""
    found: set[type] = set()
    for package in ("plan", "report", "client", "notebook"):
        top = importlib.import_module(f"nbtrain.{package}")
        for info in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
            for thing in vars(importlib.import_module(info.name)).values():
                own = vars(thing) if isinstance(thing, type) else {}
                if {"_repr_html_", "_repr_mimebundle_", "_ipython_display_"} & own.keys():
                    found.add(thing)
    return {thing for thing in found if thing.__module__.startswith("nbtrain.")}


def test_nothing_that_shows_itself_is_left_out(bundles: tuple[Bundles, Bundles]) -> None:
    seen = tuple(things_made.values())
    missing = {thing for thing in showing() if not any(issubclass(one, thing) for one in seen)}
    assert missing == {Form}, "the form has a test of its own"


def below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from below(child)


def test_the_form_shows_text_as_text(home: Path, launched: list[Run]) -> None:
    found = []
    for text in (PLAIN, HOSTILE):
        made = nbtrain.panel("sums", "nbtrain/tiny", name=text)
        made.set(lora_target_modules=text)
        for button in ("dry run",):
            made._button[button].click()
            found += [(text, w.value) for w in below(made.widget) if isinstance(w, ipywidgets.HTML)]
    assert any("&lt;script&gt;" in value for text, value in found if text == HOSTILE)
    plain, hostile = (
        {(tag, *sorted(attrs)) for one, value in found if one == text
         for tag, attrs in Markup(value).elements}
        for text in (PLAIN, HOSTILE)
    )  # fmt: skip
    assert hostile <= plain
    assert not {"script", "img", "iframe", "a"} & {tag for tag, *_ in hostile}
    ipywidgets.Widget.close_all()


def test_a_dry_run_shows_text_as_text(shell: Shell) -> None:
    shell.ns["name"] = HOSTILE
    shell.do("%%train --workload sums --dry-run --name $name\nnum_steps: 1\n")
    (data,) = shell.bundles
    found = Markup(data["text/html"])
    assert {tag for tag, _ in found.elements} <= TAGS - {"img"}
    assert "<script>alert(1)</script>" in found.words
    assert not ADDRESS.search(data["text/plain"])


def test_a_run_of_sixty_steps_is_kept_in_less_than_60_kb(home: Path) -> None:
    run = stored.create(Client(), num_steps=60, val_interval_steps=10)
    stored.train(run)
    for number in range(61):
        if number:
            stored.step(run, number, (number * 7919 % 101) / 202 + number / 120)
        if number % 10 == 0:
            stored.scored(run, number, [float(n * 60 < number * 20) for n in range(20)])
    stored.finish(run)
    data = bundle(run)
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert sum(map(len, data.values())) < 60_000


def test_the_small_picture_keeps_the_colours_of_a_dense_curve(home: Path) -> None:
    run = stored.create(Client(), num_steps=240)
    stored.train(run)
    for number in range(1, 241):
        stored.step(run, number, float(number % 2), text=False)
        if number % 40 == 0:
            stored.validate(run, number, number / 240)
    stored.finish(run)
    picture = base64.b64decode(bundle(run)["image/png"])
    colours = Image.open(io.BytesIO(picture)).convert("RGB").getcolors()
    for wanted in (REWARD, HELD_OUT):
        red, green, blue = (int(wanted[at : at + 2], 16) for at in (1, 3, 5))
        assert any(
            max(abs(r - red), abs(g - green), abs(b - blue)) < 30 for _, (r, g, b) in colours
        ), wanted
