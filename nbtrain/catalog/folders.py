"""A model's folder: configuration, safetensors weights and tokenizer, checked by their headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.catalog.digests import BESIDE_WEIGHTS
from nbtrain.errors import NotFound, Problem, Refused

__all__ = ["FolderContents", "parse_config", "read_folder", "tokenizer_problem", "weight_files"]

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# Any one of these sets makes a tokenizer.
TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What a model's folder holds. ``parameters`` is counted from the weight files' headers.

    ``beside`` are the tokenizer, the chat template and the generation settings.
    """

    config: dict[str, Any]
    config_bytes: bytes
    weights: tuple[Path, ...]
    beside: tuple[Path, ...]
    parameters: int
    problems: tuple[Problem, ...]


def read_folder(folder: Path, slug: str) -> FolderContents:
    """Read configuration and headers of ``folder``; missing parts are listed as problems.

    Raises ``NotFound`` when there is no folder or no ``config.json`` in it, ``Refused`` when the
    configuration cannot be read.
    """
    if not folder.is_dir():
        msg = f"there is no folder {folder}"
        raise NotFound(msg)
    path = folder / "config.json"
    if not path.is_file():
        msg = f"the folder {folder} holds no config.json, so it is no model's folder"
        raise NotFound(msg)
    raw = path.read_bytes()
    config = parse_config(raw, slug)
    problems: list[Problem] = []
    weights: tuple[Path, ...] = ()
    parameters = 0
    try:
        weights = weight_files(folder)
        parameters = sum(map(count_parameters, weights))
    except Refused as error:
        problems += error.problems
    missing = tokenizer_problem({entry.name for entry in folder.iterdir()}, slug)
    if missing is not None:
        problems.append(missing)
    beside = tuple(folder / name for name in BESIDE_WEIGHTS if (folder / name).is_file())
    return FolderContents(config, raw, weights, beside, parameters, tuple(problems))


def parse_config(raw: bytes, slug: str) -> dict[str, Any]:
    """The configuration as a mapping. Raises ``Refused`` when it is not a JSON object."""
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise Refused([_problem(f"the config.json of {slug!r} is not JSON ({error})")]) from error
    if not isinstance(config, dict):
        raise Refused([_problem(f"the config.json of {slug!r} holds no JSON object")])
    return config


def tokenizer_problem(names: set[str], slug: str) -> Problem | None:
    """The problem that no tokenizer is among the file ``names``, or ``None``."""
    if any(names.issuperset(files) for files in TOKENIZERS):
        return None
    return Problem(
        "base_model_slug",
        f"the model {slug!r} has no tokenizer",
        allowed=" or ".join(" with ".join(files) for files in TOKENIZERS),
        hint="Save the tokenizer into the same folder with tokenizer.save_pretrained",
    )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model's weights, in order of name.

    Raises ``Refused`` when there are none, when one that the index names is missing, or when a
    file is cut short.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():  # the order in which transformers looks
        names = [WEIGHTS]
    elif index.is_file():
        names = index_names(index)
    else:
        pickled = [name for name in _PICKLED if (folder / name).is_file()]
        hint = (
            f"{pickled[0]} is a pickle, which is not loaded: save the model as safetensors"
            if pickled
            else "Save it with model.save_pretrained"
        )
        raise Refused(
            [
                _problem(
                    f"the folder {folder} holds no safetensors weights", allowed=WEIGHTS, hint=hint
                )
            ]
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise Refused(
            [
                _problem(
                    f"the folder {folder} lacks {len(missing)} of {len(names)} weight files "
                    f"({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''})",
                    hint="The download or copy may have stopped halfway",
                )
            ]
        )
    return tuple(folder / name for name in names)


def index_names(index: Path) -> list[str]:
    """File names that a safetensors index names. Raises ``Refused`` when it cannot be read."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Refused([_problem(f"the weights' index {index} cannot be read")]) from error
    if any(not isinstance(name, str) or "/" in name for name in names):
        raise Refused([_problem(f"the weights' index {index} names files outside its folder")])
    return sorted(names)


def count_parameters(path: Path) -> int:
    """Number of parameters that a safetensors file holds, from its header alone.

    Raises ``Refused`` when the file is cut short or is no safetensors file.
    """
    header, start = _header(path)
    tensors: Mapping[str, Any] = {k: v for k, v in header.items() if k != "__metadata__"}
    try:
        end = max((t["data_offsets"][1] for t in tensors.values()), default=0)
        count = sum(int(math.prod(t["shape"])) for t in tensors.values())
    except (TypeError, KeyError, IndexError) as error:
        raise Refused([_problem(f"{path} is no safetensors file")]) from error
    size = path.stat().st_size
    if size < start + end:
        raise Refused(
            [
                _problem(
                    f"{path} is cut short: {size:,} bytes of {start + end:,}",
                    hint="The download or copy may have stopped halfway",
                )
            ]
        )
    return count


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        first = file.read(8)
        if first == _LFS_POINTER[:8]:
            raise Refused(
                [
                    _problem(
                        f"{path} is a pointer to large-file storage, not the weights",
                        hint="Fetch the file itself (git lfs pull)",
                    )
                ]
            )
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        text = file.read(size) if 0 < size <= path.stat().st_size else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise Refused([_problem(f"{path} is no safetensors file, or is cut short")]) from error
    if not isinstance(header, dict):
        raise Refused([_problem(f"{path} is no safetensors file")])
    return header, 8 + size


def _problem(message: str, *, allowed: str | None = None, hint: str | None = None) -> Problem:
    return Problem("base_model_slug", message, allowed=allowed, hint=hint)
