"""A run in a real JupyterLab in a real browser: the cell's output follows it and stays."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CELLS = [
    "%load_ext nbtrain",
    "%%train --workload sums --model nbtrain/tiny --name lab --into run\n"
    "num_steps: 4\nbatch_size: 2\ngroup_size: 4\nlr_warmup_steps: 0\n"
    "val_interval_steps: 2\nval_num_tasks: 4",
    "6 * 7",
    "%%train --workload sums\nstesp: 5\nbatch_size: 1000",
]

pytestmark = pytest.mark.browser


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium. Where there is none the test skips, unless it is demanded."""
    if CHROMIUM is None:
        if os.environ.get("NBTRAIN_DEMAND_BROWSER"):
            pytest.fail("Chromium is not installed, and the browser tests are demanded")
        pytest.skip("Chromium is not installed: the browser tests need it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def lab(home: Path, tmp_path: Path) -> Iterator[str]:
    """A JupyterLab server of its own, serving a folder with one notebook; its URL."""
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "run.ipynb")
    names = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    env = os.environ | {name: str(tmp_path / part) for name, part in names.items()}
    news = tmp_path / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path / "lab.log").open("w")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--port={port}",
            "--IdentityProvider.token=secret",
            "--LabApp.expose_app_in_browser=True",
            f"--ServerApp.root_dir={folder}",
        ],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/status?token=secret", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "lab.log").read_text()[-2000:]
                assert time.monotonic() < end, "JupyterLab did not answer"
                time.sleep(0.3)
        yield f"{url}/lab/tree/run.ipynb?token=secret"
    finally:
        server.terminate()
        server.wait(timeout=20)
        log.close()


def test_a_cell_returns_at_once_and_its_output_follows_the_run(
    browser: Any, lab: str, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 1400})
    page.goto(lab)
    idle = (
        "window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status"
        " === 'idle'"
    )
    page.wait_for_function(idle, timeout=90_000)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    outputs = page.locator(".jp-Cell").nth(1).locator(".jp-OutputArea-output")
    after = page.locator(".jp-Cell").nth(2).locator(".jp-OutputArea-output")
    after.first.wait_for(timeout=60_000)
    assert after.first.inner_text().strip() == "42"
    assert (
        "COMPLETED" not in outputs.first.inner_text()
    )  # the kernel was free before the run was done

    refusal = page.locator(".jp-Cell").nth(3).locator(".jp-OutputArea-output").first.inner_text()
    assert "stesp" in refusal
    assert "num_steps" in refusal
    assert "batch_size" in refusal
    assert "^" in refusal
    assert "Traceback" not in refusal

    page.wait_for_function(
        "document.querySelectorAll('.jp-Cell')[1].innerText.includes('COMPLETED')", timeout=120_000
    )
    text = outputs.first.inner_text()
    assert "step 4 of 4" in text
    assert "held-out" in text
    picture = outputs.first.locator("img")
    assert picture.count() == 1
    assert picture.first.evaluate("image => image.naturalWidth") > 300
    page.screenshot(path=str(tmp_path / "lab.png"))
    assert page.locator(".jp-Cell").nth(2).inner_text().count("COMPLETED") == 0
