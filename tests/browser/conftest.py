"""A real Jupyter server and a real browser; a test brings the cells and looks at the page.

Which application is shown is a parameter: ``lab`` unless a test says otherwise, with
``@pytest.mark.parametrize("app", ["lab", "notebook"], indirect=True)``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
import pytest

App = Literal["lab", "notebook"]

_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
}
_COMMANDS: dict[App, list[str]] = {
    "lab": ["jupyterlab", "--LabApp.expose_app_in_browser=True"],
    "notebook": ["notebook", "--JupyterNotebookApp.expose_app_in_browser=True"],
}
_PAGES: dict[App, str] = {"lab": "lab/tree", "notebook": "notebooks"}
_THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
_IDLE = (
    "window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status"
    " === 'idle'"
)
_STARTS_SECONDS = 90


@dataclass(frozen=True)
class Server:
    """A running server: its address, its application and the folder that it shows."""

    url: str
    app: App
    folder: Path

    def address(self, path: str) -> str:
        """Where the browser opens a file of the folder."""
        return f"{self.url}/{_PAGES[self.app]}/{path}?token=secret"


@pytest.fixture
def app(request: pytest.FixtureRequest) -> App:
    """The application of the test's server."""
    chosen: App = getattr(request, "param", "lab")
    return chosen


@pytest.fixture
def server(home: Path, tmp_path: Path, app: App) -> Iterator[Server]:
    """A server of its own with settings, data and runtime folders of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    _settle(tmp_path / "settings")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            *_COMMANDS[app],
            "--no-browser",
            "--allow-root",
            f"--port={port}",
            "--IdentityProvider.token=secret",
            f"--ServerApp.root_dir={folder}",
        ],
        env=os.environ | {name: str(tmp_path / part) for name, part in _FOLDERS.items()},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _STARTS_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/status?token=secret", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
                assert time.monotonic() < end, "the server did not answer"
                time.sleep(0.3)
        yield Server(url, app, folder)
    finally:
        process.terminate()
        process.wait(timeout=20)
        log.close()


def _settle(settings: Path) -> None:
    """No question about news; both applications read the same folder."""
    news = settings / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


class NotebookPage:
    """A notebook in the browser. ``page`` is Playwright's."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.path = path

    def cell(self, index: int) -> Any:
        """The cell at ``index``."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def outputs(self, index: int) -> Any:
        """The outputs of the cell at ``index``; a cell's source is not among them."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def run_all(self) -> None:
        """Run every cell; returns at once."""
        self.command("notebook:run-all-cells")

    def run_cell(self, index: int) -> None:
        """Run one cell; returns at once."""
        self.page.evaluate(
            "index => { const { content } = window.jupyterapp.shell.currentWidget;"
            " content.deselectAll(); content.activeCellIndex = index; }",
            index,
        )
        self.command("notebook:run-cell")

    def save(self) -> None:
        """Save the notebook and wait until it is saved."""
        self.command("docmanager:save")
        self.page.wait_for_function(
            "window.jupyterapp.shell.currentWidget.context.model.dirty === false"
        )

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Execute a command of the application."""
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args); }",
            [name, arguments or {}],
        )

    def wait_idle(self, seconds: float = 90) -> None:
        """Wait until the kernel is there and idle."""
        self.page.wait_for_function(_IDLE, timeout=seconds * 1000)

    def wait_text(self, index: int, text: str, seconds: float = 60) -> None:
        """Wait until an output of the cell at ``index`` shows ``text``."""
        shown = (
            "([index, text]) => [...(document.querySelectorAll('.jp-Notebook .jp-Cell')[index]"
            "?.querySelectorAll('.jp-OutputArea-output') ?? [])]"
            ".some(output => output.innerText.includes(text))"
        )
        self.page.wait_for_function(shown, arg=[index, text], timeout=seconds * 1000)

    def theme(self, which: Literal["light", "dark"]) -> None:
        """Switch the application's theme and wait until the page has it."""
        self.command("apputils:change-theme", {"theme": _THEMES[which]})
        light = str(which == "light").lower()
        self.page.wait_for_function(f"document.body.dataset.jpThemeLight === '{light}'")

    def screenshot(self, path: Path) -> Path:
        """A picture of what the window shows."""
        self.page.screenshot(path=str(path))
        return path


Open = Callable[..., NotebookPage]
"""``open_notebook(cells, name="run.ipynb", width=1100, height=1400)``."""


@pytest.fixture
def open_notebook(browser: Any, server: Server, tmp_path: Path) -> Iterator[Open]:
    """Opens a notebook made of code cells and waits until its kernel is idle.

    How each page looked at the end stays in the test's folder.
    """
    pages: list[Any] = []

    def open_one(
        cells: Sequence[str], name: str = "run.ipynb", width: int = 1100, height: int = 1400
    ) -> NotebookPage:
        code = [nbformat.v4.new_code_cell(cell) for cell in cells]
        notebook = nbformat.v4.new_notebook(cells=code)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, server.folder / name)
        page = browser.new_page(viewport={"width": width, "height": height})
        pages.append(page)
        page.goto(server.address(name))
        opened = NotebookPage(page, server.folder / name)
        opened.wait_idle()
        return opened

    yield open_one
    for number, page in enumerate(pages):
        page.screenshot(path=str(tmp_path / f"last-{number}.png"))
        page.close()
