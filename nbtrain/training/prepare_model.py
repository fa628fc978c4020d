"""Make a base model's weights local: ``python -m nbtrain.training.prepare_model --run RUN_ID``.

A repository is downloaded into the hub's own cache, a GGUF file is converted once into a folder
of bf16 safetensors. What is already there is left alone, so the command can be repeated.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.catalog.digests import FileDigests
from nbtrain.catalog.folders import tokenizer_problem, weight_files
from nbtrain.catalog.repositories import split_location
from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, first_line
from nbtrain.plan.resolved import BaseModelRef, ResolvedPlan
from nbtrain.store.home import sync

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["convert_gguf", "is_ready", "prepare", "weights_folder"]


def weights_folder(resolved: ResolvedPlan | BaseModelRef, home: Path) -> Path:
    """The local folder that ``AutoModelForCausalLM.from_pretrained`` loads for this plan.

    Raises ``NotFound`` when the weights are not local yet (see :func:`prepare`).
    """
    model = resolved.base_model if isinstance(resolved, ResolvedPlan) else resolved
    if model.kind == "repository":
        folder = _snapshot(model.location, local_only=True)
    elif model.kind == "gguf":
        folder = _converted(model, home)
    else:
        folder = Path(model.location)
    if folder is None or not (folder / "config.json").is_file():
        msg = f"the weights of {model.slug!r} are not on this machine yet ({model.location})"
        raise NotFound(msg)
    return folder


def is_ready(resolved: ResolvedPlan | BaseModelRef, home: Path) -> bool:
    """Whether :func:`weights_folder` would find the weights."""
    try:
        weights_folder(resolved, home)
    except NotFound:
        return False
    return True


def prepare(resolved: ResolvedPlan | BaseModelRef, home: Path) -> Path:
    """Make the weights local if they are not, and return their folder.

    Raises ``NotFound`` when the source is gone or the network cannot be reached.
    """
    model = resolved.base_model if isinstance(resolved, ResolvedPlan) else resolved
    if not is_ready(model, home):
        if model.kind == "repository":
            print(f"downloading {model.location}", flush=True)
            _snapshot(model.location, local_only=False)
        elif model.kind == "gguf":
            _check_unchanged(model, home)
            convert_gguf(Path(model.location), _converted(model, home))
    folder = weights_folder(model, home)
    print(f"{model.slug} is ready in {folder}", flush=True)
    return folder


def _check_unchanged(model: BaseModelRef, home: Path) -> None:
    source = Path(model.location)
    digests = FileDigests(home / "base_models" / "digests.json")
    if source.is_file() and digests.sha256(source) != model.fingerprint:
        msg = f"{source} has changed since the plan was made; start the run again"
        raise NotFound(msg)


def _converted(model: BaseModelRef, home: Path) -> Path:
    return home / "base_models" / model.fingerprint


def _snapshot(location: str, *, local_only: bool) -> Path | None:
    """The hub cache's folder of one commit, downloaded unless ``local_only``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, commit = split_location(location)
    try:
        folder = snapshot_download(
            repository,
            revision=commit,
            local_files_only=local_only,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
        )
    except LocalEntryNotFoundError as error:
        if local_only:
            return None
        msg = f"{location} cannot be downloaded: no network, or HF_HUB_OFFLINE is set"
        raise NotFound(msg) from error
    except (HfHubHTTPError, OSError) as error:
        msg = f"{location} cannot be downloaded: {first_line(error)}"
        raise NotFound(msg) from error
    # An earlier download may have stopped halfway, and offline the hub's client hands out what
    # there is: then some weights are missing.
    if _complete(Path(folder)):
        return Path(folder)
    if local_only:
        return None
    msg = f"{location} cannot be downloaded whole: no network, or HF_HUB_OFFLINE is set"
    raise NotFound(msg)


def _complete(folder: Path) -> bool:
    """Whether every weight file that the folder's index names, and a tokenizer, are there."""
    try:
        weights = weight_files(folder)
    except Refused:
        return False
    names = {entry.name for entry in folder.iterdir()}
    return bool(weights) and tokenizer_problem(names, folder.name) is None


def convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF file ``source`` as a folder of bf16 safetensors with tokenizer and template.

    Weights are dequantised. The folder appears whole or not at all: it is written beside
    ``target`` and renamed. A second process that wants the same folder waits for the first.
    Raises ``NotFound`` when ``source`` is gone, ``Refused`` when transformers cannot read it.
    """
    if not source.is_file():
        msg = f"the GGUF file {source} is gone"
        raise NotFound(msg)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    prefix = f".{target.name[:12]}-"
    with _alone(target.parent / f"{prefix}lock"):
        if (target / "config.json").is_file():
            return
        for left_over in target.parent.glob(f"{prefix}half-*"):  # of a killed conversion
            shutil.rmtree(left_over, ignore_errors=True)
        print(f"converting {source.name} to bf16 safetensors", flush=True)
        half = Path(tempfile.mkdtemp(prefix=f"{prefix}half-", dir=target.parent))
        try:
            _write_converted(source, half)
            _flush(half)
            half.rename(target)
        finally:
            shutil.rmtree(half, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that no other process holds; it ends with this process, however that ends."""
    # The file stays: removing it could let two in, one with the old file and one with a new one.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        sync(path)


def _write_converted(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # transformers raises what it comes across in the file
        reason = first_line(error)
        message = f"{source} cannot be converted: {reason}"
        raise Refused([Problem("base_model_slug", message)]) from error
    print(f"read {model.num_parameters():,} parameters", flush=True)
    _unquantised(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unquantised(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that can be saved.

    transformers leaves the GGUF's quantisation in the configuration although the weights are
    plain, and then refuses to save: so a plain configuration is built and the weights moved over.
    """
    settings: dict[str, Any] = model.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(model.config).from_dict(settings)
    clean: PreTrainedModel = type(model)._from_config(config, dtype=model.dtype)
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean


def main(arguments: list[str] | None = None) -> int:
    """Prepare the base model of one run or plan; exit status 1 with a sentence when that fails."""
    from nbtrain.processes import die_with_parent
    from nbtrain.store import open_store

    die_with_parent()
    parser = argparse.ArgumentParser(description=main.__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", help="run id")
    which.add_argument("--plan", type=Path, help="resolved plan as JSON")
    options = parser.parse_args(arguments)
    store = open_store()
    try:
        if options.plan is not None:
            resolved = json.loads(options.plan.read_text("utf-8"))
        else:
            resolved = store.find_run(options.run).resolved
        prepare(ResolvedPlan.from_json(resolved), store.home)
    except NbtrainError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
