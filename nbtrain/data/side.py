"""The side process: what a notebook needs of a tokenizer, without importing one.

``python -m nbtrain.data.side`` reads one JSON request a line from stdin and writes one JSON
reply a line to stdout, in order; it ends with its stdin and with its parent. A request is
``{"id", "op", "dataset": {"folder", "name"}, "model": {"kind", "location"}, "rules": {…}, …}``
with an ``op`` of ``analyze`` (``max_length``), ``rows`` (``offset``, ``limit``), ``preview``
(``row``, from 0) or ``ping``; a reply is ``{"id", "result"}`` or ``{"id", "error"}``, after any
number of ``{"id", "progress"}`` with rows done.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from nbtrain.data.analysis import analyze, preview_row, rows_page
from nbtrain.data.dataset import Dataset, load_dataset
from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import Renderer, RowRefused, end_ids_in
from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, first_line
from nbtrain.processes import die_with_parent

__all__ = ["Server", "main"]

_TOKENIZERS_KEPT = 4

Progress = Callable[[int], None]


class Server:
    """Answers requests, with the tokenizers and datasets of the last ones kept open."""

    def __init__(self) -> None:
        self._renderer = lru_cache(_TOKENIZERS_KEPT)(_load_renderer)

    def answer(self, request: Mapping[str, Any], progress: Progress) -> Any:
        """The result of one request, as plain values. Raises what stops it."""
        op = request.get("op")
        if op == "ping":
            return os.getpid()
        served = {"analyze": self._analyze, "rows": self._rows, "preview": self._preview}.get(
            str(op)
        )
        if served is None:
            msg = f"the side process has no request {op!r}"
            raise NbtrainError(msg)
        model = request["model"]
        folder = model_folder(model["kind"], model["location"])
        renderer = self._renderer(model["kind"], str(folder), _changed_at(folder))
        told = request["dataset"]
        dataset = load_dataset(Path(told["folder"]), told.get("name"))
        return served(request, dataset, renderer, LossRules(**request.get("rules", {})), progress)

    def _analyze(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        progress: Progress,
    ) -> Any:
        found = analyze(
            dataset,
            renderer.tokenizer,
            rules,
            int(request["max_length"]),
            ends=renderer.ends,
            progress=progress,
        )
        return found.to_json()

    def _rows(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        progress: Progress,
    ) -> Any:
        page = int(request.get("offset", 0)), int(request.get("limit", 25))
        return rows_page(dataset, renderer, rules, *page, progress)

    def _preview(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        progress: Progress,
    ) -> Any:
        del progress
        return preview_row(dataset, renderer, rules, int(request["row"]))


def model_folder(kind: str, location: str) -> Path:
    """The folder (or GGUF file) on this machine that a base model's tokenizer lies in.

    Raises ``NotFound`` for a repository that was never fetched.
    """
    if kind != "repository":
        return Path(location)
    from huggingface_hub import try_to_load_from_cache

    name, _, commit = location.partition("@")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        found = try_to_load_from_cache(name, file, revision=commit or None)
        if isinstance(found, str):
            return Path(found).parent
    msg = f"the tokenizer of {name} is not on this machine yet; a run of the model fetches it"
    raise NotFound(msg)


def _load_renderer(kind: str, location: str, changed_at: tuple[float, ...]) -> Renderer:
    del changed_at  # only tells the kept ones apart
    from transformers import AutoTokenizer

    folder = Path(location)
    try:
        if kind == "gguf":
            tokenizer = AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises what it comes across in the files
        reason = first_line(error)
        message = f"the tokenizer in {folder} cannot be loaded: {reason}"
        raise Refused([Problem("baseModel", message)]) from error
    return Renderer(tokenizer, end_ids_in(folder, tokenizer))


def _changed_at(folder: Path) -> tuple[float, ...]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    paths = [folder / name for name in (*names, "generation_config.json")]
    if folder.is_file():
        paths = [folder]
    return tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)


def _error(error: BaseException) -> dict[str, Any]:
    """An error as plain values; the client makes the same one of it."""
    if isinstance(error, Refused):
        kind = "row" if isinstance(error, RowRefused) else "refused"
        problems = [asdict(problem) for problem in error.problems]
        for problem in problems:
            found = problem["found"]
            plain = found is None or isinstance(found, str | int | float)
            problem["found"] = found if plain else str(found)
        return {"kind": kind, "message": str(error), "problems": problems}
    if isinstance(error, NotFound):
        return {"kind": "not_found", "message": str(error)}
    if isinstance(error, IndexError):
        return {"kind": "index", "message": str(error)}
    if not isinstance(error, NbtrainError):
        traceback.print_exc()
    return {"kind": "error", "message": str(error) or type(error).__name__}


def serve(requests: Iterable[bytes], out: BinaryIO) -> None:
    """Answer requests until there are no more."""
    server = Server()

    def send(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode("ascii") + b"\n")
        out.flush()

    def progress(number: object, rows: int) -> None:
        send({"id": number, "progress": rows})

    for line in requests:
        number = None
        try:
            request = json.loads(line)
            number = request["id"]
            result = server.answer(request, partial(progress, number))
            send({"id": number, "result": result})
        except Exception as error:  # the next request may be better
            send({"id": number, "error": _error(error)})


def main() -> None:
    """Serve stdin and stdout until the parent closes them or dies."""
    die_with_parent()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Whatever a library prints goes to the log: stdout carries replies alone.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
