"""The header of a GGUF file: architecture, context length and size, without its weights.

The header is parsed here because the ``gguf`` package's reader builds an array object for every
vocabulary entry: two CPU seconds for a file whose header this reads in a tenth of one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbtrain.errors import NotFound, Problem, Refused

__all__ = ["GgufHeader", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# struct's letters by GGUF value type; 8 and 9 are text and array.
_SCALARS = {n: f"<{c}" for n, c in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
# No key, array or tensor list of a real file comes near these; a damaged one does at once.
_MOST_ENTRIES = 1 << 24
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header states. ``keys`` leaves out arrays (the vocabulary is one)."""

    keys: dict[str, Any]
    parameters: int

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.keys.get("general.architecture", "unknown"))

    @property
    def name(self) -> str | None:
        """``general.name``, the model's own name."""
        name = self.keys.get("general.name")
        return None if name is None else str(name)

    @property
    def context_length(self) -> int | None:
        """Largest number of positions, prompt and reply together."""
        value = self.keys.get(f"{self.architecture}.context_length")
        return value if isinstance(value, int) and value > 0 else None

    def config(self) -> dict[str, Any]:
        """The same facts under the names that a ``config.json`` uses."""
        prefix = f"{self.architecture}."
        own = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        config: dict[str, Any] = {"model_type": self.architecture}
        for key, value in own.items():
            config[key.removeprefix("attention.").replace(".", "_")] = value
        config["max_position_embeddings"] = self.context_length
        if "decoder_start_token_id" in config:
            config["is_encoder_decoder"] = True
        if config.get("causal") is False:
            config["architectures"] = [f"{self.architecture} (not causal)"]
        return config


def read_header(path: Path) -> GgufHeader:
    """Read the header of the file at ``path``.

    Raises ``NotFound`` when there is no such file, when it is no GGUF file or is cut short, and
    ``Refused`` when it is one of several parts.
    """
    if not path.is_file():
        msg = f"there is no file {path}"
        raise NotFound(msg)
    try:
        with path.open("rb") as file:
            header, end = _parse(file, path)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        msg = f"{path} is cut short or damaged: its GGUF header ends too early"
        raise NotFound(msg) from error
    size = path.stat().st_size
    if size < end:
        msg = f"{path} is cut short: {size:,} bytes of {end:,}; copy or download it again"
        raise NotFound(msg)
    if int(header.keys.get("split.count", 1)) > 1:
        raise Refused(
            [
                Problem(
                    "base_model_slug",
                    f"{path} is one of {header.keys['split.count']} parts of a model",
                    allowed="a GGUF file that holds the whole model",
                    hint="Join the parts first (llama-gguf-split --merge)",
                )
            ]
        )
    return header


def _parse(file: BinaryIO, path: Path) -> tuple[GgufHeader, int]:
    if file.read(4) != _MAGIC:
        msg = f"{path} is no GGUF file"
        raise NotFound(msg)
    (version,) = _unpack(file, "<I")
    if version not in _VERSIONS:
        msg = f"{path} has GGUF version {version}; versions 2 and 3 can be read"
        raise NotFound(msg)
    tensors, count = _unpack(file, "<QQ")
    keys: dict[str, Any] = {}
    for _ in range(_sane(count)):
        key = _string(file)
        value = _value(file, _unpack(file, "<I")[0])
        if value is not None:
            keys[key] = value
    parameters, data = 0, 0
    for _ in range(_sane(tensors)):
        elements, end = _tensor(file)
        parameters += elements
        data = max(data, end)
    alignment = int(keys.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = math.ceil(file.tell() / alignment) * alignment
    return GgufHeader(keys, parameters), start + data


def _tensor(file: BinaryIO) -> tuple[int, int]:
    """Elements of a tensor, and where its data end, counted from the start of all data."""
    from gguf import GGML_QUANT_SIZES

    _string(file)
    (dimensions,) = _unpack(file, "<I")
    shape = _unpack(file, f"<{_sane(dimensions)}Q")
    kind, offset = _unpack(file, "<IQ")
    elements = math.prod(shape)
    block, size = GGML_QUANT_SIZES.get(kind, (1, 0))
    return elements, offset + elements // block * size


def _unpack(file: BinaryIO, pattern: str) -> tuple[Any, ...]:
    return struct.unpack(pattern, file.read(struct.calcsize(pattern)))


def _sane(count: int) -> int:
    if count > _MOST_ENTRIES:
        msg = "a count in the header is out of all bounds"
        raise ValueError(msg)
    return count


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _MOST_BYTES:
        msg = "a text in the header is out of all bounds"
        raise ValueError(msg)
    raw = file.read(length)
    if len(raw) < length:
        msg = "a text in the header is cut short"
        raise ValueError(msg)
    return raw.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """The value; ``None`` for an array, which is skipped."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, length = _unpack(file, "<IQ")
        _skip_array(file, inner, _sane(length))
        return None
    if kind not in _SCALARS:
        msg = f"unknown value type {kind}"
        raise ValueError(msg)
    return _unpack(file, _SCALARS[kind])[0]


def _skip_array(file: BinaryIO, kind: int, length: int) -> None:
    if kind in _SCALARS:
        _skip(file, struct.calcsize(_SCALARS[kind]) * length)
        return
    skip_one: Callable[[], object] = (
        (lambda: _skip(file, _unpack(file, "<Q")[0]))
        if kind == _STRING
        else (lambda: _value(file, kind))
    )
    for _ in range(length):
        skip_one()


def _skip(file: BinaryIO, size: int) -> None:
    if size > _MOST_BYTES * 16:
        msg = "a text in the header is out of all bounds"
        raise ValueError(msg)
    file.seek(size, 1)
