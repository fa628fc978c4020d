"""The side process: what a notebook needs of a tokenizer, without importing one.

``python -m nbtrain.data.side`` answers as :mod:`nbtrain.data.serving` says. A request is
``{"id", "op", "dataset": {"folder", "name"}, "model": {"kind", "location"}, "rules": {…}, …}``
with an ``op`` of ``analyze`` (``max_length``), ``rows`` (``offset``, ``limit``) or ``preview``
(``row``, from 0); progress is in rows done.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbtrain.data.analysis import analyze, preview_row, rows_page
from nbtrain.data.dataset import Dataset, load_dataset
from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import Renderer, end_ids_in
from nbtrain.data.serving import Teller, serve
from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, first_line

__all__ = ["Server", "model_folder"]

_TOKENIZERS_KEPT = 4


class Server:
    """Answers requests, with the tokenizers and datasets of the last ones kept open."""

    def __init__(self) -> None:
        self._renderer = lru_cache(_TOKENIZERS_KEPT)(_load_renderer)

    def answer(self, request: Mapping[str, Any], tell: Teller) -> Any:
        """The result of one request, as plain values. Raises what stops it."""
        op = request.get("op")
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
        return served(request, dataset, renderer, LossRules(**request.get("rules", {})), tell)

    def _analyze(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        tell: Teller,
    ) -> Any:
        found = analyze(
            dataset,
            renderer.tokenizer,
            rules,
            int(request["max_length"]),
            ends=renderer.ends,
            progress=tell,
        )
        return found.to_json()

    def _rows(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        tell: Teller,
    ) -> Any:
        page = int(request.get("offset", 0)), int(request.get("limit", 25))
        return rows_page(dataset, renderer, rules, *page, tell)

    def _preview(
        self,
        request: Mapping[str, Any],
        dataset: Dataset,
        renderer: Renderer,
        rules: LossRules,
        tell: Teller,
    ) -> Any:
        del tell
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


if __name__ == "__main__":
    serve(Server().answer)
