"""What the wheel carries of the front end, and what its sources must never do."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FRONT_END = ROOT / "labextension"
SOURCES = sorted(
    path for path in (FRONT_END / "src").rglob("*.ts") if "__tests__" not in path.parts
)
# Text of models, tasks and people is shown as text: nothing may read it as markup or as code.
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|createContextualFragment|srcdoc"
    r"|document\.write|\beval\(|new Function"
)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_hook", FRONT_END / "build_hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    pytest.importorskip("hatchling")
    spec.loader.exec_module(module)
    return module


def test_what_is_built_comes_from_the_present_sources(hook: ModuleType) -> None:
    for name in hook.FILES:
        built = hook.BUILT / name
        assert built.is_file(), f"{name} is missing: cd labextension && jlpm && jlpm build"
        says = built.read_text(encoding="utf-8").partition("\n")[0]
        assert says == f"/* nbtrain {hook.sources_hash()} */", f"{name} is old: jlpm build"
    assert hook.is_built()


def test_a_changed_or_missing_source_or_file_asks_for_a_build(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, built = tmp_path / "labextension", tmp_path / "static"
    (here / "src" / "__tests__").mkdir(parents=True)
    built.mkdir()
    monkeypatch.setattr(hook, "HERE", here)
    monkeypatch.setattr(hook, "BUILT", built)
    for name in ("build.mjs", "package.json", "yarn.lock", "src/index.ts", "src/a.css"):
        (here / name).write_text(name, encoding="utf-8")
    assert not hook.is_built()
    for name in hook.FILES:
        (built / name).write_text(f"/* nbtrain {hook.sources_hash()} */\n", encoding="utf-8")
    assert hook.is_built()
    (here / "src" / "__tests__" / "index.spec.ts").write_text("a test", encoding="utf-8")
    assert hook.is_built(), "tests decide nothing of what is built"
    for name in ("src/a.css", "yarn.lock"):
        before = (here / name).read_text(encoding="utf-8")
        (here / name).write_text("changed", encoding="utf-8")
        assert not hook.is_built(), name
        (here / name).write_text(before, encoding="utf-8")
    (built / "panel.css").unlink()
    assert not hook.is_built()


def test_an_install_brings_only_what_its_build_needs(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = hook.FrontEnd.dependencies
    monkeypatch.setattr(hook, "is_built", lambda: True)
    assert needs(None) == []
    monkeypatch.setattr(hook, "is_built", lambda: False)
    for version, brought in ((22, 1), (20, 1), (18, 2), (None, 2)):
        monkeypatch.setattr(hook, "node_version", lambda version=version: version)
        assert needs(None) == [hook.JLPM, hook.NODE][:brought]


def test_a_saved_notebook_keeps_less_than_4_kb_of_program(hook: ModuleType) -> None:
    assert (hook.BUILT / "loader.js").stat().st_size < 4096


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(FRONT_END)))
def test_no_text_is_read_as_markup(source: Path) -> None:
    assert not MARKUP.findall(source.read_text(encoding="utf-8"))


def test_the_lock_file_names_no_address() -> None:
    lock = (FRONT_END / "yarn.lock").read_text(encoding="utf-8")
    assert "esbuild@npm:" in lock
    assert not re.findall(r"https?://", lock)
