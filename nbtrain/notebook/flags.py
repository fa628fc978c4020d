"""The flags of ``%%train`` and what they stand for in the body."""

from __future__ import annotations

import textwrap

from nbtrain.notebook.line import Flag

__all__ = ["TRAIN", "help_text"]

TRAIN = (
    Flag("--workload", "W", "what to train on: a name, an id or $object", "workload"),
    Flag("--model", "M", "the base model: nbtrain/tiny, a repository, a folder", "base_model_slug"),
    Flag("--method", "gspo|grpo|sft", "how the model learns: from rewards, or from answers",
         "algorithm"),
    Flag("--from", "CHECKPOINT", "go on from it: an id, a prefix or $object; what is not stated "
         "is inherited", "parent_checkpoint_id"),
    Flag("--weights-only", None, "with --from: its weights, with fresh training state",
         "load_weights_only"),
    Flag("--name", "N", "the run's name; the same cell run again attaches to the newest run of "
         "this name if it has the same plan", "display_name"),
    Flag("--into", "VAR", "the variable that holds the run; without it the run is _"),
    Flag("--small", None, "a first look: smaller values for what is not stated of batch, group, "
         "length and validation, marked small in the plan", "small"),
    Flag("--smoke", None, "of a supervised run: learn the first rows by heart and tell whether "
         "that worked; no model is registered", "smoke"),
    Flag("--wait", None, "return when the run is over, and fail if it failed; an interrupt only "
         "stops the waiting"),
    Flag("--dry-run", None, "show the resolved plan and what it will take; nothing is started"),
    Flag("--check", None, "with --dry-run: the start checks alone, in a process of their own"),
    Flag("--new", None, "train again, even if a run of this name has the same plan"),
)  # fmt: skip


def help_text(flags: tuple[Flag, ...] = TRAIN) -> str:
    """The flags as lines of help."""
    names = [f"{flag.name} {flag.metavar}" if flag.metavar else flag.name for flag in flags]
    width = max(map(len, names)) + 2
    lines = []
    for name, flag in zip(names, flags, strict=True):
        head = f"    {name:<{width}}"
        lines.append(
            textwrap.fill(flag.help, 100, initial_indent=head, subsequent_indent=" " * len(head))
        )
    return "\n".join(lines)
