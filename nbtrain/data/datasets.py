"""The registry of datasets: immutable rows known by their content, and names that may move."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nbtrain.data.conversations import Conversations
from nbtrain.data.dataset import VERSION, Dataset, load_dataset
from nbtrain.data.findings import Findings
from nbtrain.data.folders import HalfFolder
from nbtrain.data.formats import Unreadable
from nbtrain.data.images import Images
from nbtrain.data.reader import Progress, read_jsonl, read_table
from nbtrain.data.rows import Row
from nbtrain.errors import NotFound, Problem, Refused, StoreError, Where
from nbtrain.plan.fields import describe
from nbtrain.store import Store, moved, name_problems, private_folder, unknown, usable_path

__all__ = ["Dataset", "DatasetRegistry"]


class DatasetRegistry:
    """The datasets of one store.

    ``samples`` maps names to functions that give rows: such a name is registered when it is first
    asked for, unless something else has been registered under it.
    """

    def __init__(
        self, store: Store, samples: Mapping[str, Callable[[], list[Row]]] | None = None
    ) -> None:
        self._store = store
        self._samples = dict(samples or {})

    def register(self, name: str, source: object, *, progress: Progress | None = None) -> Dataset:
        """Keep the rows of ``source`` and let ``name`` mean them.

        ``source`` is the path of a JSONL file, a DataFrame, or a list of dicts. The same examples
        are the same dataset, whatever file they come from. ``progress`` is called now and then
        with the rows read, and the bytes (of a table: rows) done and in all. Raises ``Refused``
        with everything that is wrong at once, ``NotFound`` when there is no such file,
        ``StoreError`` when the dataset cannot be written; then nothing is registered.
        """
        _check_name(name)
        path = _path(source)
        findings = Findings("line" if path else "row")
        parent = private_folder(self._store.home / "datasets")
        try:
            with HalfFolder(parent) as half:
                about, images = _fill(half, source, path, findings, progress)
                about["lines"] = half.finish(images.known)
                half.put(parent / about["dataset_id"], about)
        except OSError as error:
            why = error.strerror or error
            msg = f"the dataset cannot be written into {parent}: {why}; nothing was registered"
            raise StoreError(msg) from error
        return self._record(parent / about["dataset_id"], about, name)

    def _record(self, folder: Path, about: dict[str, Any], name: str) -> Dataset:
        before = self._store.alias("dataset", name)
        self._store.put_content(
            "dataset",
            about["dataset_id"],
            spec=about,
            path=str(folder.relative_to(self._store.home)),
            name=name,
        )
        return load_dataset(folder, name, moved(name, before, about["dataset_id"]))

    def get(self, ref: object) -> Dataset:
        """The dataset of a name, an id, an id prefix of at least 4 digits, or itself.

        One asked for by id gets the name that points at it, if there is one. Raises ``NotFound``
        naming what there is, ``AmbiguousReference`` when a prefix fits several.
        """
        if isinstance(ref, Dataset):
            return ref
        if not isinstance(ref, str) or not ref:
            msg = f"{describe(ref)} is no dataset: a name, an id or a dataset is expected"
            raise NotFound(msg)
        row = self._store.content("dataset", ref)
        if row is None and ref in self._samples:
            return self.register(ref, self._samples[ref]())
        if row is None:
            raise unknown(ref, "dataset", self.names())
        names = self._store.aliases("dataset")
        name = ref if ref in names else _name_of(row["dataset_id"], names)
        found = load_dataset(self._folder(row["dataset_id"]), name)
        if found.dataset_id != row["dataset_id"]:
            msg = f"the dataset in {found.folder} is not the one that was registered; "
            raise NotFound(msg + "register it again")
        return found

    def names(self) -> list[str]:
        """Every name that :meth:`get` knows, the one moved last first, samples last."""
        return list(dict.fromkeys([*self._store.aliases("dataset"), *self._samples]))

    def list(self) -> list[Dataset]:
        """Every dataset whose files are there, the one registered first last."""
        names = self._store.aliases("dataset")
        found = []
        for row in self._store.contents("dataset"):
            ident = row["dataset_id"]
            try:
                found.append(load_dataset(self._folder(ident), _name_of(ident, names)))
            except NotFound:  # named by get(); a list still shows the others
                continue
        return found

    def move(self, name: str, ref: object) -> Dataset:
        """Let ``name`` mean another dataset; what it meant before stands in ``.note``.

        Raises ``Refused`` for a name that cannot be one, and what :meth:`get` raises.
        """
        _check_name(name)
        found = self.get(ref)
        before = self._store.move_alias("dataset", name, found.dataset_id)
        return Dataset(found.folder, found.spec, name, moved(name, before, found.dataset_id))

    def _folder(self, dataset_id: str) -> Path:
        return self._store.home / "datasets" / dataset_id


def _fill(
    half: HalfFolder,
    source: object,
    path: Path | None,
    findings: Findings,
    progress: Progress | None,
) -> tuple[dict[str, Any], Images]:
    """Check every row and write it into ``half``; what the dataset says of itself.

    Raises ``Refused`` with everything that is wrong.
    """
    called = str(path) if path else None
    rules = Conversations(findings)
    images = Images(path.parent if path else None, findings)
    try:
        for line, row, data in _read(source, path, findings, progress):
            rules.check(row, line)
            if findings.refused:
                continue  # the other rows are looked at, but nothing is kept
            half.add(data, line)
            if "images" in rules.facts:
                images.add(row, line)
    except Unreadable as error:
        where = Where(source=called) if called else None
        raise Refused([Problem("source", error.message, where=where, hint=error.hint)]) from error
    if findings.refused:
        raise Refused(findings.problems(called))
    if not half.rows:
        where = Where(source=called) if called else None
        raise Refused([Problem("source", "there are no rows", allowed="a row", where=where)])
    return _about(half, source, called, rules, images, findings), images


def _about(
    half: HalfFolder,
    source: object,
    called: str | None,
    rules: Conversations,
    images: Images,
    findings: Findings,
) -> dict[str, Any]:
    rows = half.digest.hexdigest()
    half.digest.update(images.identity())
    return {
        "version": VERSION,
        "dataset_id": half.digest.hexdigest(),
        "rows": half.rows,
        "bytes": half.bytes,
        "rows_sha256": rows,
        "columns": sorted(rules.columns - {"messages"}),
        "facts": {name: list(fact) for name, fact in rules.facts.items()},
        "findings": [found.to_json() for found in findings.notes],
        "images": len(images.known),
        "source": called or ("a DataFrame" if hasattr(source, "iloc") else "a list"),
        "created_at": time.time(),
    }


def _read(
    source: object, path: Path | None, findings: Findings, progress: Progress | None
) -> Iterator[tuple[int, Row, bytes]]:
    if path is not None:
        return read_jsonl(path, findings, progress)
    return read_table(source, findings, progress)


def _path(source: object) -> Path | None:
    """The file that ``source`` names; ``None`` when it is a table."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = usable_path(source, "source")
    if path.is_dir():
        message = f"{path} is a folder"
        raise Refused([Problem("source", message, found=str(path), allowed="a JSONL file")])
    if not path.is_file():
        msg = f"there is no file {path}"
        raise NotFound(msg)
    return path


def _check_name(name: object) -> None:
    problems = name_problems("dataset", name)
    if problems:
        raise Refused(problems)


def _name_of(dataset_id: str, names: dict[str, str]) -> str | None:
    return next((name for name, target in names.items() if target == dataset_id), None)
