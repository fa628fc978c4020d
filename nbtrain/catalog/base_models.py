"""Base models, read from configuration files and headers alone: no torch, no transformers.

Four kinds: the embedded one, a local folder, a repository on the hub, a local GGUF file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nbtrain.catalog.architecture import (
    architecture_problems,
    max_context,
    model_kind,
    sampler_kind,
)
from nbtrain.catalog.digests import FileDigests, fingerprint
from nbtrain.catalog.folders import read_folder
from nbtrain.catalog.gguf_files import read_header
from nbtrain.catalog.repositories import cached_files, is_repository, read_repository
from nbtrain.catalog.sizes import model_sizes
from nbtrain.catalog.thinking import template_kind, templates_in, thinking
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.plan.registry import ModelSizes, Template
from nbtrain.store.home import usable_path
from nbtrain.store.names import unknown

__all__ = ["EMBEDDED", "BaseModel", "check_model_name", "embedded_folder", "read_base_model"]

EMBEDDED = "nbtrain/tiny"
_NAME = re.compile(r"\w[\w.-]{0,63}(/\w[\w.-]{0,63})?")
Kind = Literal["embedded", "folder", "repository", "gguf"]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model that can be trained.

    ``location`` is a folder, a GGUF file, or ``owner/name@commit`` for a repository.
    ``max_context`` counts the tokens of prompt and reply together; ``parameters`` is ``None``
    where no header states it. ``fingerprint`` changes with configuration, weights, tokenizer,
    chat template and generation settings. ``sampler`` is what decodes it without further
    packages, ``thinking`` the levels of ``reasoning_effort`` that its chat template has,
    ``template`` what that can do (``None``: cannot be told).
    """

    slug: str
    kind: Kind
    location: str
    fingerprint: str
    max_context: int
    precision: Literal["fp32", "bf16"]
    parameters: int | None
    architecture: str
    sampler: Literal["ragged", "generate"] = "ragged"
    thinking: tuple[str, ...] = ()
    template: Template | None = None
    sizes: ModelSizes = field(default_factory=ModelSizes)

    def __post_init__(self) -> None:
        # JSON knows neither tuples nor dataclasses
        object.__setattr__(self, "thinking", tuple(self.thinking))
        if isinstance(self.sizes, Mapping):
            object.__setattr__(self, "sizes", ModelSizes(**self.sizes))

    def to_json(self) -> dict[str, Any]:
        """A JSON mapping from which ``BaseModel(**data)`` rebuilds an equal one."""
        return asdict(self)


def embedded_folder() -> Path:
    """The folder of ``nbtrain/tiny``, which comes with the package."""
    return Path(__file__).parent / "embedded" / "tiny"


def is_path(ref: str) -> bool:
    """Whether ``ref`` is written like a path: from ``/``, ``~``, ``./`` or ``../``, or *.gguf."""
    return ref.startswith(("/", "~", "./", "../")) or ref in {".", ".."} or ref.endswith(".gguf")


def read_base_model(ref: str, digests: FileDigests, *, slug: str | None = None) -> BaseModel:
    """The model that ``ref`` names: ``nbtrain/tiny``, a path, or ``owner/name[@revision]``.

    ``slug`` is the name it goes by; by default ``ref`` itself, a path made absolute.
    Raises ``NotFound`` when there is nothing, ``Refused`` with every reason when it cannot be
    trained.
    """
    if ref == EMBEDDED:
        return _folder(embedded_folder(), EMBEDDED, "embedded", digests)
    if is_path(ref):
        path = Path(os.path.abspath(usable_path(ref, "baseModel")))
        if path.suffix == ".gguf":
            return _gguf(path, slug or str(path), digests)
        return _folder(path, slug or str(path), "folder", digests)
    if is_repository(ref):
        return _repository(ref, slug or ref, digests)
    msg = f"{ref!r} is no base model; a repository is written owner/name, a folder ./{ref}"
    raise NotFound(msg)


def unknown_model(ref: str, known: Mapping[str, object] | list[str]) -> NotFound:
    """The error for a name that nothing goes by, with the nearest known one."""
    besides = "; besides, any repository (owner/name), local folder (./folder) or .gguf file"
    return unknown(ref, "base model", sorted(known), besides)


def check_model_name(name: str) -> None:
    """Refuse a name under which no model can be selected. Raises ``Refused``."""
    allowed = "up to 64 letters, digits, '_', '-', '.', with at most one '/' between two such words"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(".gguf"):
        raise Refused([Problem("name", f"{name!r} cannot be a base model's name", name, allowed)])
    if name.split("/")[0] == "nbtrain":
        message = f"{name!r} is reserved: names under nbtrain/ belong to embedded models"
        raise Refused([Problem("name", message, name, allowed)])


def _folder(path: Path, slug: str, kind: Kind, digests: FileDigests) -> BaseModel:
    contents = read_folder(path, slug)
    _accept(contents.config, contents.problems, slug)
    templates = templates_in({file.name: file for file in contents.beside})
    weights = {file.name: digests.sha256(file) for file in contents.weights}
    beside = {file.name: digests.sha256(file) for file in contents.beside}
    return BaseModel(
        slug=slug,
        kind=kind,
        location=str(path),
        fingerprint=fingerprint(contents.config_bytes, weights, beside),
        max_context=_context(contents.config),
        precision="fp32" if kind == "embedded" else "bf16",
        parameters=contents.parameters,
        architecture=model_kind(contents.config),
        sampler=sampler_kind(contents.config),
        thinking=_levels(contents.config, templates),
        template=template_kind(templates),
        sizes=model_sizes(contents.config),
    )


def _gguf(path: Path, slug: str, digests: FileDigests) -> BaseModel:
    header = read_header(path)
    config = header.config()
    _accept(config, (), slug)
    stated = header.keys.get("tokenizer.chat_template")
    templates = {"default": stated} if isinstance(stated, str) else {}
    return BaseModel(
        slug=slug,
        kind="gguf",
        location=str(path),
        fingerprint=digests.sha256(path),
        max_context=_context(config),
        precision="bf16",
        parameters=header.parameters,
        architecture=header.architecture,
        sampler=sampler_kind(config),
        thinking=_levels(config, templates),
        template=template_kind(templates),
        sizes=model_sizes(config),
    )


def _repository(ref: str, slug: str, digests: FileDigests) -> BaseModel:
    contents = read_repository(ref, digests)
    _accept(contents.config, contents.problems, slug)
    templates = templates_in(cached_files(contents.location))
    return BaseModel(
        slug=slug,
        kind="repository",
        location=contents.location,
        fingerprint=fingerprint(contents.config_bytes, contents.weights, contents.beside),
        max_context=_context(contents.config),
        precision="bf16",
        parameters=contents.parameters,
        architecture=model_kind(contents.config),
        sampler=sampler_kind(contents.config),
        thinking=_levels(contents.config, templates),
        template=template_kind(templates),
        sizes=model_sizes(contents.config),
    )


def _levels(config: Mapping[str, Any], templates: Mapping[str, str] | None) -> tuple[str, ...]:
    return thinking((templates or {}).get("default"), model_kind(config)).levels


def _accept(config: Mapping[str, Any], found: tuple[Problem, ...], slug: str) -> None:
    problems = [*architecture_problems(config, slug), *found]
    if problems:
        raise Refused(problems)


def _context(config: Mapping[str, Any]) -> int:
    context = max_context(config)
    assert context is not None  # its absence is one of the architecture's problems
    return context
