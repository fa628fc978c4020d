"""Models by repository (``owner/name``): the hub's cache first, then its index over the network.

At plan time at most ``config.json`` and the small files of tokenizer and generation settings are
downloaded; the digests of big files come from the cache or from the hub's own file list, so a
repository has the same fingerprint before and after download.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.catalog.digests import BESIDE_WEIGHTS
from nbtrain.catalog.folders import INDEX, WEIGHTS, parse_config, read_folder, tokenizer_problem
from nbtrain.errors import NbtrainError, NotFound, Problem, first_line

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from nbtrain.catalog.digests import FileDigests

__all__ = [
    "RepositoryContents",
    "cached_files",
    "is_repository",
    "read_repository",
    "split_location",
]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RepositoryContents:
    """What a repository holds at one commit.

    ``weights`` and ``beside`` map file names to SHA-256 digests.
    """

    location: str
    config: dict[str, Any]
    config_bytes: bytes
    weights: dict[str, str]
    beside: dict[str, str]
    parameters: int | None
    problems: tuple[Problem, ...]


def is_repository(ref: str) -> bool:
    """Whether ``ref`` is written like a repository: ``owner/name`` or ``owner/name@revision``."""
    return _NAME.fullmatch(ref) is not None


def split_location(location: str) -> tuple[str, str | None]:
    """Repository and revision of ``owner/name@revision``, ``None`` where none is stated."""
    repository, _, revision = location.partition("@")
    return repository, revision or None


def cached_files(location: str) -> dict[str, Path]:
    """Tokenizer, template and settings of ``owner/name@commit`` that the cache holds, by name."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = split_location(location)
    found = {
        name: try_to_load_from_cache(repository, name, revision=revision) for name in BESIDE_WEIGHTS
    }
    return {name: Path(path) for name, path in found.items() if isinstance(path, str)}


def read_repository(ref: str, digests: FileDigests) -> RepositoryContents:
    """Configuration and digests of ``owner/name[@revision]``, the newest ``main`` if not stated.

    What the cache holds completely is not looked up again. Raises ``NotFound`` when the
    repository is neither cached nor reachable.
    """
    cached = _cached_folder(ref)
    if cached is not None:
        contents = _from_cache(ref, cached, digests)
        if contents is not None:
            return contents
    return _from_hub(ref, cached)


def _cached_folder(ref: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    repository, revision = split_location(ref)
    path = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(path).parent if isinstance(path, str) else None


def _from_cache(ref: str, folder: Path, digests: FileDigests) -> RepositoryContents | None:
    """The cached snapshot; ``None`` when its weights or tokenizer are not all there."""
    contents = read_folder(folder, ref)
    if contents.problems:
        return None
    return RepositoryContents(
        location=f"{split_location(ref)[0]}@{folder.name}",
        config=contents.config,
        config_bytes=contents.config_bytes,
        weights={path.name: _blob_digest(path, digests) for path in contents.weights},
        beside={path.name: _blob_digest(path, digests) for path in contents.beside},
        parameters=contents.parameters,
        problems=(),
    )


def _blob_digest(path: Path, digests: FileDigests) -> str:
    # The cache names a big file's content by its SHA-256.
    name = path.resolve().name
    return name if _DIGEST.fullmatch(name) else digests.sha256(path)


def _from_hub(ref: str, cached: Path | None) -> RepositoryContents:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = split_location(ref)
    if cached is not None:
        revision = cached.name
    try:
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=_SECONDS
        )
        path = hf_hub_download(repository, "config.json", revision=info.sha)
        beside = _beside(repository, info)
    except OfflineModeIsEnabled as error:
        raise _not_found(ref, cached, "HF_HUB_OFFLINE is set") from error
    except GatedRepoError as error:
        msg = f"the repository {repository!r} is gated: accept its terms and log in to the hub"
        raise NotFound(msg) from error
    except RevisionNotFoundError as error:
        msg = f"the repository {repository!r} has no revision {revision!r}"
        raise NotFound(msg) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        msg = f"there is no repository {repository!r} (or it is private and you are not logged in)"
        raise NotFound(msg) from error
    except LocalEntryNotFoundError as error:
        raise _not_found(ref, cached, "the hub cannot be reached") from error
    except EntryNotFoundError as error:
        msg = f"the repository {repository!r} holds no config.json, so it is no model that loads"
        raise NotFound(msg) from error
    except NbtrainError:
        raise
    except Exception as error:  # the network's own errors have no common root
        raise _not_found(ref, cached, f"the hub cannot be reached ({first_line(error)})") from error
    return _from_info(ref, info, Path(path).read_bytes(), beside)


def _beside(repository: str, info: ModelInfo) -> dict[str, str]:
    """Digests of the files beside the weights; of small ones the hub tells none: fetched."""
    from huggingface_hub import hf_hub_download

    found: dict[str, str] = {}
    for file in info.siblings or []:
        if file.rfilename not in BESIDE_WEIGHTS:
            continue
        if file.lfs:
            found[file.rfilename] = file.lfs.sha256
        else:
            path = Path(hf_hub_download(repository, file.rfilename, revision=info.sha))
            found[file.rfilename] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _from_info(ref: str, info: ModelInfo, raw: bytes, beside: dict[str, str]) -> RepositoryContents:
    files = info.siblings or []
    names = {file.rfilename for file in files}
    weights = {
        file.rfilename: (file.lfs.sha256 if file.lfs else str(file.blob_id))
        for file in files
        if _SHARD.fullmatch(file.rfilename)
    }
    # A repository may hold both; transformers takes the single file.
    if WEIGHTS in weights:
        weights = {WEIGHTS: weights[WEIGHTS]}
    problems = []
    if not weights or (WEIGHTS not in weights and INDEX not in names):
        gguf = next((name for name in sorted(names) if name.endswith(".gguf")), None)
        hint = f"Download {gguf} and select it as a file" if gguf else None
        problems.append(
            Problem(
                "base_model_slug",
                f"the repository {ref!r} holds no safetensors weights",
                allowed=WEIGHTS,
                hint=hint,
            )
        )
    missing = tokenizer_problem(names, ref)
    if missing is not None:
        problems.append(missing)
    return RepositoryContents(
        location=f"{split_location(ref)[0]}@{info.sha}",
        config=parse_config(raw, ref),
        config_bytes=raw,
        weights=weights,
        beside=beside,
        parameters=info.safetensors.total if info.safetensors else None,
        problems=tuple(problems),
    )


def _not_found(ref: str, cached: Path | None, why: str) -> NotFound:
    if cached is not None:
        return NotFound(
            f"the repository {ref!r} is cached without all its weights, and {why}; "
            "download it while online"
        )
    hint = f"; a folder is written ./{ref}" if Path(ref).is_dir() else ""
    return NotFound(f"the repository {ref!r} is not in the local cache, and {why}{hint}")
