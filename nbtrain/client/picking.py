"""A run's checkpoints in the order of their rank, and an adapter taken out of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import tables
from nbtrain.client.listing import Listing
from nbtrain.client.new_folder import NewFolder
from nbtrain.client.records import Checkpoint
from nbtrain.errors import Problem, Refused, StoreError
from nbtrain.plan.fields import counted
from nbtrain.report import checkpoint_table
from nbtrain.report.checkpoint_table import CheckpointLine, more_told

if TYPE_CHECKING:
    from nbtrain.client.run import Run

__all__ = ["CheckpointListing", "checkpoint_line", "export_adapter", "ranked", "standings"]

_WEIGHTS, _CONFIG, _MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"
_ABOUT = "nbtrain.json"
_SHOWN = 20


def ranked(run: Run) -> list[Checkpoint]:
    """The checkpoints of a run, the best first, then those of complete rounds by their score, the
    earliest of equals first, then the others by step.
    """
    found = run.checkpoint_list().items
    return in_order(found, tables.best(found))


def in_order(found: list[Checkpoint], best: Checkpoint | None) -> list[Checkpoint]:
    def place(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        cost = tables.cost(checkpoint)
        return checkpoint is not best, float("inf") if cost is None else cost, checkpoint.step_index

    return sorted(found, key=place)


def standings(found: Sequence[Checkpoint]) -> tuple[list[int | None], list[str]]:
    """The ranks of a run's ranked checkpoints, and what each is: best, highest or a tie."""
    best = tables.best(found)
    top = None if best is None else best.ties_with
    ranks = [
        None if tables.cost(each) is None else rank for rank, each in enumerate(found, start=1)
    ]
    marks = [
        checkpoint_table.mark(
            best=each is best,
            tie=each.ties_with,
            highest=rank is not None and each.step_index == top,
            loss=each.validation_loss is not None,
        )
        for rank, each in zip(ranks, found, strict=True)
    ]
    return ranks, marks


def checkpoint_line(checkpoint: Checkpoint, best: Checkpoint | None) -> CheckpointLine:
    """A checkpoint as a table shows it."""
    return CheckpointLine(
        checkpoint_id=checkpoint.checkpoint_id,
        step=checkpoint.step_index,
        held_out=checkpoint.held_out_reward,
        complete=checkpoint.round_completed,
        best=checkpoint is best,
        kind=checkpoint.kind,
        loss=checkpoint.validation_loss,
        low=checkpoint.held_out_low,
        high=checkpoint.held_out_high,
        tie=checkpoint.ties_with,
        size_bytes=checkpoint.size_bytes,
        weights=checkpoint.has_weights,
    )


class CheckpointListing(Listing[Checkpoint]):
    """The checkpoints of a run by step, shown in this order with the rank of each."""

    def __init__(self, items: list[Checkpoint]) -> None:
        super().__init__(items, Checkpoint.columns())

    def _told(self) -> tuple[list[CheckpointLine], str, int]:
        """The lines to show, what their score is called, and how many are left out."""
        best = tables.best(self.items)
        placed = checkpoint_table.ranked(checkpoint_line(c, best) for c in self.items)
        found = {(line.checkpoint_id, line.step): line for line in placed}
        lines = [found[c.checkpoint_id, c.step_index] for c in self.items[:_SHOWN]]
        supervised = any(c.validation_loss is not None for c in self.items)
        return lines, "validation loss" if supervised else "held-out", len(self) - len(lines)

    def _head(self) -> str:
        """How many there are, and where the best one stands."""
        count = counted(len(self), "checkpoint")
        best = tables.best(self.items)
        at = next((n for n, each in enumerate(self.items) if each is best), None)
        return count if at is None else f"{count} by step, the best is [{at}]"

    def __repr__(self) -> str:
        lines, what, more = self._told()
        rest = [more_told(more)] if more else []
        shown = checkpoint_table.as_lines(lines, what, numbered=True)
        return "\n".join([self._head(), *shown, *rest])

    def _repr_html_(self) -> str:
        lines, what, more = self._told()
        rest = f"<div>{more_told(more)}</div>" if more else ""
        table = checkpoint_table.as_html(lines, what, sizes=True, numbered=True)
        return f"<div>{self._head()}</div>{table}{rest}"


def export_adapter(checkpoint: Checkpoint, folder: str | Path) -> Path:
    """Copy a checkpoint's adapter into a new or empty folder and return the folder.

    It holds what ``PeftModel.from_pretrained(base, folder)`` loads, ``adapter_model.safetensors``
    and ``adapter_config.json`` with the base model's name in it, and ``nbtrain.json``: run, step,
    base model, score and hashes. They are there whole or not at all.

    Raises
    ------
    Refused
        When the folder holds anything, the checkpoint has no weights, or its files are gone or
        are no longer those that were saved.
    NotWritten
        (an ``OSError``) Where the folder cannot be written.
    """
    place = NewFolder(folder, "an adapter")
    problems = [*place.problems, *_without_weights(checkpoint)]
    if problems:
        raise Refused(problems)
    weights, config, manifest = _files(checkpoint)
    base = _base_model(checkpoint)
    config |= {"base_model_name_or_path": base["name_or_path"], "revision": base["revision"]}
    with place.filled(_ABOUT) as half:
        (half / _WEIGHTS).write_bytes(weights)
        for name, data in ((_CONFIG, config), (_ABOUT, _about(checkpoint, base, manifest))):
            (half / name).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", "utf-8")
    return place.path


def _without_weights(checkpoint: Checkpoint) -> list[Problem]:
    if checkpoint.has_weights:
        return []
    message = f"checkpoint {checkpoint.checkpoint_id[:12]} holds no weights, only {checkpoint.kind}"
    return [Problem("checkpoint", message, checkpoint.checkpoint_id)]


def _files(checkpoint: Checkpoint) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Weights, PEFT's configuration and the manifest, each of them as it was saved."""
    path = Path(checkpoint.path)

    def refused(what: str) -> Refused:
        message = f"checkpoint {checkpoint.checkpoint_id[:12]} cannot be exported: {what}"
        return Refused([Problem("checkpoint", message, checkpoint.checkpoint_id)])

    try:
        found = {name: (path / name).read_bytes() for name in (_WEIGHTS, _CONFIG, _MANIFEST)}
    except OSError as error:
        msg = f"{error.filename}: {error.strerror}"
        raise refused(msg) from error
    told = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    if told[_MANIFEST] != checkpoint.checkpoint_id:
        msg = f"{path / _MANIFEST} is not the one that was saved"
        raise refused(msg)
    manifest = json.loads(found[_MANIFEST])
    for name in (_WEIGHTS, _CONFIG):
        if told[name] != manifest["weights"][name]:
            msg = f"{path / name} is not what was saved"
            raise refused(msg)
    return found[_WEIGHTS], json.loads(found[_CONFIG]), manifest


def _base_model(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Slug, fingerprint, and what transformers loads the base model by."""
    if checkpoint._store is None:
        msg = f"checkpoint {checkpoint.checkpoint_id[:12]} was read without its store"
        raise StoreError(msg)
    model: Mapping[str, Any] = checkpoint._store.find_run(checkpoint.run_id).resolved["base_model"]
    name, revision = model["location"] or model["slug"], None
    if model["kind"] == "repository":
        name, _, revision = name.partition("@")
    return {
        "slug": model["slug"],
        "fingerprint": model["fingerprint"],
        "name_or_path": name,
        "revision": revision or None,
    }


def _about(
    checkpoint: Checkpoint, base: Mapping[str, str | None], manifest: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "run_id": checkpoint.run_id,
        "step": checkpoint.step_index,
        "base_model": dict(base),
        "tokenizer_fingerprint": manifest["identity"]["tokenizer_fingerprint"],
        "config_hash": manifest["identity"]["config_hash"],
        "workload_id": manifest["identity"]["workload_id"],
        "held_out_reward": checkpoint.held_out_reward,
        "held_out_low": checkpoint.held_out_low,
        "held_out_high": checkpoint.held_out_high,
        "validation_loss": checkpoint.validation_loss,
        "round_completed": checkpoint.round_completed,
        # Of the weights: adapter_config.json got the base model's name since
        "sha256": {_WEIGHTS: manifest["weights"][_WEIGHTS]},
    }
