"""The form in a real kernel: what it states is trained, and its place shows the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_kernels import Kernel, kernel


@pytest.fixture
def notebook(home: Path) -> Iterator[Kernel]:
    with kernel() as started:
        yield started


def test_a_form_launches_a_run_of_the_embedded_model(notebook: Kernel) -> None:
    notebook.run(
        "form = nbtrain.panel('sums', 'nbtrain/tiny', 'gspo', name='formed', options={\n"
        "    'num_steps': 4, 'batch_size': 2, 'group_size': 4, 'lr_warmup_steps': 0,\n"
        "    'val_interval_steps': 2, 'val_num_tasks': 4})\nform"
    )
    shown = [m["content"] for m in notebook.messages if m["msg_type"] == "display_data"]
    view, waiting = [c for c in shown if c["data"].get("text/plain")]
    assert "application/vnd.jupyter.widget-view+json" in view["data"]
    assert "no run was launched" in waiting["data"]["text/plain"]
    opened = [m["content"] for m in notebook.messages if m["msg_type"] == "comm_open"]
    assert any(c["data"]["state"].get("description") == "batch_size" for c in opened)

    # the button's own handler, as the page's click calls it
    notebook.run("form._button['launch'].click()")
    assert notebook.run("print(form.run.wait(120).status)").strip() == "succeeded"
    assert notebook.run("print(len(form.run.metrics))").strip() == "4"
    place = waiting["transient"]["display_id"]
    notebook.run("time.sleep(3)")
    updates = [
        m["content"]["data"]
        for m in notebook.messages
        if m["msg_type"] == "update_display_data"
        and m["content"]["transient"]["display_id"] == place
    ]
    assert "COMPLETED" in updates[-1]["text/plain"]
    assert "image/png" in updates[-1]

    # the same name and plan again is the same run, unless it is asked to train again
    assert notebook.run("print(form.launch() == form.run, form.launch().status)").split() == [
        "True",
        "succeeded",
    ]
