"""Bundles: packed the same everywhere, checked all at once, kept whole, named by moving aliases."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.client.bundles import Bundles
from nbtrain.client.parts import Parts
from nbtrain.errors import AmbiguousReference, NotFound, Refused, StoreError
from nbtrain.rewards import archives, bundles
from nbtrain.rewards.bundles import BundleRegistry
from nbtrain.store import Store, open_store

GSM8K = '''"""The number after the last ####, as in GSM8K."""
import re

def number(text):
    found = re.findall(r"####\\s*(-?[\\d,.]+)", text)
    return found[-1].replace(",", "").rstrip(".") if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    wanted = number(ground_truth)
    return float(wanted is not None and number(solution_str) == wanted)
'''


def write(folder: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """A folder of files; None is an empty folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.mkdir()
        else:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return buffer.getvalue()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "home")


@pytest.fixture
def registry(store: Store) -> BundleRegistry:
    return BundleRegistry(store)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(
        tmp_path / "gsm8k",
        {
            "reward.py": GSM8K,
            "pkg/__init__.py": "",
            "pkg/inner.py": "",
            "data/table.json": "{}",
            ".hidden": "h",
            "empty": None,
        },
    )


def refusals(registry: BundleRegistry, path: object, name: str = "b") -> list[str]:
    with pytest.raises(Refused) as refused:
        registry.register(name, path)  # type: ignore[arg-type]
    return [str(problem) for problem in refused.value.problems]


# --- packing


def test_a_folder_packs_to_the_same_bytes_whatever_its_times_modes_and_bytecode(
    source: Path, tmp_path: Path
) -> None:
    data = archives.pack_path(source)
    other = tmp_path / "other"
    for path in sorted(source.rglob("*"), reverse=True):  # made in another order
        target = other / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            os.utime(target, (1, 1_000_000_000))
            target.chmod(0o700)
    write(other, {"__pycache__/reward.cpython-311.pyc": b"x", "pkg/old.pyc": b"x"})
    assert archives.pack_path(other) == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == sorted(archive.namelist())
        assert {".hidden", "empty/", "data/table.json"} < set(archive.namelist())
    # The hash is pinned: a bundle of today has to be the same bundle tomorrow and elsewhere.
    small = write(tmp_path / "small", {"reward.py": "x = 1\n", "d": None})
    assert hashlib.sha256(archives.pack_path(small)).hexdigest() == PINNED


PINNED = "8d0f541ea935ca6126e9c647e349d0ed783cfcdbbc5657fdbf3d65dba2f987ce"


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3), st.binary(max_size=40), min_size=1, max_size=5
    )
)
def test_what_is_packed_comes_out_again(files: dict[str, bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        source = write(Path(name, "in"), {f"{key}.py": data for key, data in files.items()})
        out = Path(name, "out")
        out.mkdir()
        data = archives.pack_path(source)
        assert not archives.is_unpacked(data, out)
        archives.unpack(data, out)
        assert archives.is_unpacked(data, out)
        assert {p.name: p.read_bytes() for p in out.iterdir()} == {
            f"{key}.py": data for key, data in files.items()
        }


def test_links_and_special_files_are_refused_together(
    source: Path, registry: BundleRegistry
) -> None:
    (source / "link.py").symlink_to("reward.py")
    (source / "pkg" / "away").symlink_to("/")
    os.mkfifo(source / "pipe")
    said = refusals(registry, source)
    assert len(said) == 3
    assert sum("is a symbolic link" in line for line in said) == 2
    assert any("pipe" in line and "neither a file nor a folder" in line for line in said)


def test_a_name_and_a_path_that_will_not_do_are_refused_at_once(
    registry: BundleRegistry, tmp_path: Path
) -> None:
    said = refusals(registry, tmp_path / "nothing", name="../up")
    assert [line.partition(";")[0] for line in said] == [
        "'../up' cannot be a bundle's name",
        f"there is no folder or zip {tmp_path / 'nothing'}",
    ]
    empty = write(tmp_path / "none", {"readme.txt": "no module"})
    assert "holds no Python module" in refusals(registry, empty)[0]
    assert "path is a int" in refusals(registry, 3)[0]
    for name in ("", "-a", "a b", "a" * 101, "ab12" * 4, "_/x"):
        assert "cannot be a bundle's name" in refusals(registry, empty, name)[0], name


# --- zips


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link.py")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info


BAD = {
    "/etc/passwd": (zipped(("/etc/passwd", b"x")), "leads outside"),
    "up": (zipped(("a/../../x.py", b"x")), "leads outside"),
    "drive": (zipped(("C:/x.py", b"x")), "leads outside"),
    "backslash": (zipped(("a\\x.py", b"x")), "no plain path"),
    "link": (zipped((link(), b"reward.py")), "a symbolic link"),
    "below a file": (zipped(("a", b"x"), ("a/b.py", b"x")), "which is a file"),
    "twice": (zipped(("a.py", b"x"), ("./a.py", b"x")), "there twice"),
    "no zip": (b"PK\x03\x04 and no more", "no zip that can be read"),
    "text": (b"def compute_score(): ...", "no zip that can be read"),
    "empty": (b"", "no zip that can be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_zip_is_refused(kind: str, registry: BundleRegistry, tmp_path: Path) -> None:
    data, clause = BAD[kind]
    file = tmp_path / "bundle.zip"
    file.write_bytes(data)
    (said,) = refusals(registry, file)
    assert clause in said
    assert not list((tmp_path / "home").glob("bundles/*"))


def test_a_zip_may_spell_its_paths_as_it_likes(registry: BundleRegistry, tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(zipped(("./reward.py", b"x = 1"), ("tools//more.py", b"y = 2")))
    bundle = registry.register("b", file)
    assert bundle.modules == ("reward", "tools.more")
    files = bundle.unpacked()
    before = (files / "reward.py").stat().st_ino
    assert (bundle.unpacked() / "tools" / "more.py").read_bytes() == b"y = 2"
    assert (files / "reward.py").stat().st_ino == before, "unpacked again"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_every_bad_entry_of_a_zip_is_named(registry: BundleRegistry, tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(zipped(("../a.py", b""), ("b.py", b""), ("b.py", b"1"), (link(), b"x")))
    said = refusals(registry, file)
    assert [line.partition(" in the bundle is ")[2].partition(";")[0] for line in said] == [
        "a path that leads outside",
        "a symbolic link",
        "there twice",
    ]


def test_an_encrypted_or_damaged_zip_is_refused(registry: BundleRegistry, tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    data = bytearray(zipped(("reward.py", b"x = 1")))
    central = data.index(b"PK\x01\x02")
    for place in (6, central + 8):
        data[place] |= 1
    file.write_bytes(data)
    assert "is encrypted" in refusals(registry, file)[0]
    data = bytearray(zipped(("reward.py", b"x = 1")))
    data[data.index(b"x = 1")] ^= 1
    file.write_bytes(data)
    assert "is damaged: Bad CRC-32" in refusals(registry, file)[0]


def test_a_zip_bomb_is_refused_by_what_it_would_unpack_to(
    registry: BundleRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_UNPACKED", 1 << 20)
    monkeypatch.setattr(archives, "MOST_ENTRIES", 3)
    file = tmp_path / "bundle.zip"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("reward.py", b"\0" * (2 << 20))
    file.write_bytes(buffer.getvalue())
    assert "the bundle's files have 2 MiB unpacked" in refusals(registry, file)[0]
    file.write_bytes(zipped(*[(f"m{n}.py", b"") for n in range(4)]))
    assert "the bundle has 4 entries; allowed: at most 3" in refusals(registry, file)[0]
    monkeypatch.setattr(archives, "SIZE_LIMIT", 1 << 20)
    folder = write(tmp_path / "big", {"reward.py": b"#" * (2 << 20)})
    assert "the bundle has 2 MiB" in refusals(registry, folder)[0]


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "a\0b", "x" * 5000, ""])
def test_a_path_that_is_none_is_refused(registry: BundleRegistry, path: str) -> None:
    (said,) = refusals(registry, path)
    assert "is no path that can be used" in said


@pytest.mark.parametrize("name", ["é" * 128, "d/" * 520 + "x"])
def test_paths_that_no_system_holds_are_refused(
    registry: BundleRegistry, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(zipped(("reward.py", b"x = 1"), (name, b"")))
    (said,) = refusals(registry, file)
    assert "a path of more than 1,024 bytes, or 255 in one name" in said
    fits = "/".join(["é" * 127, "d" * 255, "e" * 255, "f" * 255])
    file.write_bytes(zipped(("reward.py", b"x = 1"), (fits, b"y")))
    assert (registry.register("b", file).unpacked() / fits).read_bytes() == b"y"


def test_a_folder_of_names_that_cannot_travel_is_refused_by_all_of_them(
    registry: BundleRegistry, source: Path
) -> None:
    with (source / os.fsdecode(b"bad\xff.txt")).open("w"):
        pass
    (source / "b\\c.txt").write_text("x")
    said = refusals(registry, source)
    assert len(said) == 2
    assert all("no plain path" in one for one in said)


KINDS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def damaged(kind: int, place: int, value: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("reward.py", "x = 1\n" * 20)
        archive.writestr("dé/more.txt", "more" * 50)
    data = bytearray(buffer.getvalue())
    data[place % len(data)] = value
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 10_000), st.integers(0, 255))
def test_a_zip_with_any_byte_changed_is_packed_or_refused(
    kind: int, place: int, value: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bundle.zip"
        file.write_bytes(damaged(kind, place, value))
        try:
            data = archives.pack_path(file)
        except Refused:
            return
        out = Path(folder) / "out"
        out.mkdir()
        archives.unpack(data, out)
        assert archives.is_unpacked(data, out)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressors_that_may_need_any_memory_are_refused(
    registry: BundleRegistry, tmp_path: Path, kind: int
) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(damaged(kind, 0, ord("P")))
    said = refusals(registry, file)
    assert len(said) == 2
    assert "compressed in another way than deflate" in said[0]


def test_an_entry_without_a_name_is_refused(registry: BundleRegistry, tmp_path: Path) -> None:
    data = zipped(("a", b""), ("reward.py", b"x = 1"))
    data = data.replace(b"\x01\x00\x00\x00a", b"\x00\x00\x01\x00a")
    central = data.index(b"PK\x01\x02")
    data = data[: central + 28] + b"\0\0\1\0" + data[central + 32 :]
    file = tmp_path / "bundle.zip"
    file.write_bytes(data)
    assert refusals(registry, file)


def test_a_zip_whose_sizes_lie_is_refused_without_being_unpacked(
    registry: BundleRegistry, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("reward.py", b"\0" * (64 << 20))
    data = buffer.getvalue()
    size = (64 << 20).to_bytes(4, "little")
    assert data.count(size) == 2
    file = tmp_path / "bundle.zip"
    file.write_bytes(data.replace(size, (10).to_bytes(4, "little")))
    del data, buffer
    tracemalloc.start()
    (said,) = refusals(registry, file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "is damaged: Bad CRC-32" in said
    assert peak < 8 << 20


def test_a_zip_that_says_it_holds_more_than_it_does_is_refused(
    registry: BundleRegistry, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("reward.py", b"#" * 777)
    size, more = (777).to_bytes(4, "little"), (888).to_bytes(4, "little")
    file = tmp_path / "bundle.zip"
    file.write_bytes(buffer.getvalue().replace(size, more))
    (said,) = refusals(registry, file)
    assert "shorter than it says" in said


def test_a_zip_in_the_form_of_big_ones_is_taken(registry: BundleRegistry, tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    with (
        zipfile.ZipFile(file, "w") as archive,
        archive.open("reward.py", "w", force_zip64=True) as entry,
    ):
        entry.write(b"x = 1")
    assert (registry.register("b", file).unpacked() / "reward.py").read_bytes() == b"x = 1"


def test_ten_thousand_entries_are_taken_and_one_more_is_not(
    registry: BundleRegistry, tmp_path: Path
) -> None:
    file = tmp_path / "bundle.zip"
    names = [f"f{n}" for n in range(9_999)]
    file.write_bytes(zipped(("reward.py", b"x = 1"), *((name, b"") for name in names)))
    assert len(registry.register("b", file).files) == 10_000
    file.write_bytes(zipped(("reward.py", b""), ("g", b""), *((name, b"") for name in names)))
    assert "the bundle has 10,001 entries" in refusals(registry, file)[0]


def test_a_folder_of_too_many_files_is_not_read(
    registry: BundleRegistry, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_ENTRIES", 2)
    (said,) = refusals(registry, source)
    assert "the bundle has more than 2 entries" in said


def test_files_that_cannot_be_unpacked_are_told(
    registry: BundleRegistry, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = registry.register("b", source)

    def full(data: bytes, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundles, "unpack", full)
    with pytest.raises(StoreError, match=r"cannot be unpacked into .*: No space left on device"):
        bundle.unpacked()


def test_a_zip_is_kept_byte_by_byte(registry: BundleRegistry, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("reward.py", GSM8K)
        archive.writestr("docs/", b"")
    file.write_bytes(buffer.getvalue())
    bundle = registry.register("mine", file)
    assert bundle.bundle_id == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (bundle.folder / "bundle.zip").read_bytes() == file.read_bytes()
    assert (bundle.unpacked() / "docs").is_dir()


# --- the registry


def test_what_is_registered_is_found_again(
    registry: BundleRegistry, source: Path, store: Store
) -> None:
    made = registry.register("gsm8k-scoring", source)
    assert made.modules == ("pkg", "pkg.inner", "reward")
    assert made.files == (
        *(".hidden", "data/table.json", "pkg/__init__.py", "pkg/inner.py", "reward.py"),
    )
    assert made.size == len((made.folder / "bundle.zip").read_bytes())
    for ref in ("gsm8k-scoring", made.bundle_id, made.bundle_id[:8], made):
        found = registry.get(ref)
        assert (found.bundle_id, found.name) == (made.bundle_id, "gsm8k-scoring")
    assert made.folder == store.home / "bundles" / made.bundle_id
    with pytest.raises(NotFound, match=r"no bundle is called 'gsm8k-scorin'; did you mean"):
        registry.get("gsm8k-scorin")
    with pytest.raises(NotFound, match="3 is no bundle"):
        registry.get(3)


def test_the_same_bytes_are_one_bundle_and_names_move(
    registry: BundleRegistry, source: Path
) -> None:
    first = registry.register("a", source)
    assert registry.register("b", source).bundle_id == first.bundle_id
    (source / "reward.py").write_text(GSM8K + "\n")
    second = registry.register("a", source)
    assert second.bundle_id != first.bundle_id == registry.get("b").bundle_id
    assert registry.get("a").bundle_id == second.bundle_id
    assert [(b.bundle_id, b.name) for b in registry.list()] == [
        (second.bundle_id, "a"),
        (first.bundle_id, "b"),
    ]


def test_a_prefix_of_two_ids_is_ambiguous(registry: BundleRegistry, store: Store) -> None:
    for end in "01":
        about = {"modules": ["m"], "size": 1}
        store.put_content("bundle", "ab" * 31 + "0" + end, spec=about, path="x", name=None)
    with pytest.raises(AmbiguousReference, match="fits several bundles"):
        registry.get("abab")


def test_only_the_owner_can_read_what_is_kept(registry: BundleRegistry, source: Path) -> None:
    bundle = registry.register("a", source)
    files = bundle.unpacked()
    for path in [bundle.folder, files, *bundle.folder.rglob("*")]:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


# --- damage


def overwrite(files: Path) -> None:
    (files / "reward.py").write_text("def compute_score(**kw): return 1")


def remove(files: Path) -> None:
    (files / "data" / "table.json").unlink()


def shadow(files: Path) -> None:
    write(files, {"reward/__init__.py": "raise SystemExit"})


def swap_for_a_link(files: Path) -> None:
    (files / "reward.py").rename(files.parent / "elsewhere.py")
    (files / "reward.py").symlink_to(files.parent / "elsewhere.py")


def take_all(files: Path) -> None:
    shutil.rmtree(files)


def put_a_file_there(files: Path) -> None:
    shutil.rmtree(files)
    files.write_text("x")


@pytest.mark.parametrize(
    "harm", [overwrite, remove, shadow, swap_for_a_link, take_all, put_a_file_there]
)
def test_a_damaged_unpacked_copy_is_made_anew(
    harm: Any, registry: BundleRegistry, source: Path
) -> None:
    bundle = registry.register("a", source)
    files = bundle.unpacked()
    harm(files)
    assert bundle.unpacked() == files
    assert (files / "reward.py").read_text() == GSM8K
    assert not (files / "reward.py").is_symlink()
    assert not (files / "reward").exists()
    assert (files / "data" / "table.json").read_text() == "{}"
    left = {p.name for p in bundle.folder.iterdir()} - {"elsewhere.py"}
    assert left == {"bundle.zip", "files"}


def test_a_file_that_a_reward_keeps_beside_its_code_stays(
    registry: BundleRegistry, source: Path
) -> None:
    bundle = registry.register("a", source)
    write(bundle.unpacked(), {"cache.db": b"kept"})
    assert (bundle.unpacked() / "cache.db").read_bytes() == b"kept"


def test_a_damaged_zip_asks_to_register_again(registry: BundleRegistry, source: Path) -> None:
    bundle = registry.register("a", source)
    bundle.unpacked()
    file = bundle.folder / "bundle.zip"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    for read in (bundle.unpacked, lambda: registry.get("a").files):
        with pytest.raises(NotFound, match="gone or damaged; register it again"):
            read()
    registry.register("a", source)
    assert registry.get("a").unpacked().is_dir()


# --- the client


def test_the_client_registers_lists_and_shows_bundles(tmp_path: Path, source: Path) -> None:
    bundles = Bundles(Parts(tmp_path / "home", None))
    assert list(bundles.list().to_frame().columns) == ["name", "bundle_id", "modules", "size"]
    first = bundles.register("gsm8k", source)
    assert first.note is None
    (source / "reward.py").write_text("x = 1")
    second = bundles.register("gsm8k", source)
    assert repr(second) == (
        f"<Bundle gsm8k {second.id[:12]}: modules pkg, pkg.inner, reward, {second.size:,} bytes>\n"
        f"gsm8k now means {second.id[:12]}; before {first.id[:12]}"
    )
    assert bundles.get("gsm8k") == second == bundles.get(second) != first
    frame = bundles.list().to_frame()
    assert frame["bundle_id"].tolist() == [second.id, first.id]
    assert frame["name"].fillna("").tolist() == ["gsm8k", ""]
    assert "reward.py" in second.files
    with pytest.raises(Refused):
        bundles.register(3, source)  # type: ignore[arg-type]


def test_registering_runs_nothing_of_the_bundle(registry: BundleRegistry, tmp_path: Path) -> None:
    folder = write(tmp_path / "bomb", {"reward.py": "raise SystemExit('imported')"})
    bundle = registry.register("bomb", folder)
    bundle.unpacked()
    assert not [name for name in sys.modules if bundle.bundle_id in name]
