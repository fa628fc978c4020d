"""Keys that a descriptor does not have: which field was most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nbtrain.plan.descriptor.table import FIELDS, Field, named
from nbtrain.plan.options import OPTIONS

# what people write for a field that has another name here; "rl" in the second column
_OTHER_NAMES = {
    "learning_rate": "optimizer.learningRate", "lr": "optimizer.learningRate",
    "weight_decay": "optimizer.weightDecay", "optim": "optimizer.kind",
    "max_grad_norm": "optimizer.maxGradNorm", "clip_grad": "optimizer.maxGradNorm",
    "lora_rank": "lora.rank", "lora_r": "lora.rank", "r": "lora.rank",
    "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targetModules", "target_modules": "lora.targetModules",
    "lr_scheduler_type": "scheduler.kind", "lr_scheduler": "scheduler.kind",
    "warmup_ratio": "scheduler.warmupRatio", "warmup_steps": "scheduler.warmupRatio",
    "lr_min_ratio": "scheduler.minLearningRateRatio",
    "per_device_train_batch_size": "training.microBatchPerGpu",
    "batch_size": "training.microBatchPerGpu", "micro_batch_size": "training.microBatchPerGpu",
    "gradient_accumulation_steps": "training.gradientAccumulation",
    "eval_steps": "training.validationFrequencySteps", "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs", "num_steps": "training.maxSteps",
    "random_seed": "training.seed", "model": "baseModel", "model_name": "baseModel",
    "base_model": "baseModel", "base_model_slug": "baseModel", "bench_id": "workload",
    "model_name_or_path": "baseModel", "base": "baseModel", "name": "configName",
    "display_name": "configName", "warm_start": "warmStartModelId", "algorithm": "method",
    "train_dataset": "dataset", "train_file": "dataset", "dataset_name": "dataset",
    "eval_dataset": "data.validationDataset", "validation": "data.validationDataset",
    "max_length": "maxSeqLength", "max_seq_len": "maxSeqLength", "sequence_len": "maxSeqLength",
    "cutoff_len": "maxSeqLength", "num_gpus": "execution.gpus", "devices": "execution.gpus",
    "save_steps": "execution.saveEvery", "save_total_limit": "execution.keepAdapters",
    "checkpoint_interval_steps": "execution.saveEvery", "dtype": "model.precision",
    "keep_checkpoints": "execution.keepAdapters", "load_in_4bit": "model.precision",
    "torch_dtype": "model.precision", "attn_implementation": "model.attentionImplementation",
    "assistant_only_loss": "loss.assistantTurns", "sample_packing": "data.packing",
    "num_generations": "rlHyperparams.groupSize", "beta": "rlHyperparams.klBeta",
    "max_completion_length": "rlHyperparams.maxCompletionLength",
    "max_output_tokens_per_turn": "rlHyperparams.maxCompletionLength",
    "max_staleness": "rlHyperparams.stalenessThreshold",
}  # fmt: skip
_RL_NAMES = {
    "training.epochs": "rlHyperparams.epochs", "training.maxSteps": "rlHyperparams.maxSteps",
    "training.microBatchPerGpu": "rlHyperparams.promptsPerStep",
}  # fmt: skip

# what has no field: why, or what to state instead
_INSTEAD = {
    "format": "A dataset is chat JSONL: a line is {\"messages\": [...]}",
    "chat_template": "The template is the tokenizer's, under which the model will serve",
    "steps": "kind: pipeline is not built yet; updates are capped by maxSteps",
    "logging_steps": "Every update is recorded",
    "tasks": "A descriptor trains on a dataset: config.dataset",
    **dict.fromkeys(
        ("annotation", "annotations", "tag", "tags", "note", "notes", "comment", "comments",
         "metadata", "label", "labels"),
        "What a run is about goes into description, what its results are called into configName",
    ),
}  # fmt: skip
_FLAT = ("chat_template", "format", "logging_steps")  # what holds in the flat form too


def snake(key: str) -> str:
    """``learningRate`` and ``learning-rate`` as ``learning_rate``."""
    spaced = "".join(f"_{c.lower()}" if c.isupper() else c for c in key)
    return spaced.replace("-", "_").strip("_")


def instead(key: str, *, flat: bool = False) -> str | None:
    """Why there is no such field, or option with ``flat``, where that can be said."""
    return _INSTEAD.get(snake(key)) if not flat or snake(key) in _FLAT else None


def nearest(key: str, group: str, method: str) -> str | None:
    """The full path of the field or group that an unknown ``key`` of ``group`` most likely means.

    ``group`` is a dotted path, empty at the top. Fields of the same group come first.
    """
    paths = [field.path for field in named(method).values()] + ["config.reward"]
    paths += [path for path in FIELDS if path not in paths]
    groups = _groups(paths)
    prefix = f"{group}." if group else ""
    inside = [p for p in (*paths, *groups) if p.startswith(prefix) and "." not in p[len(prefix) :]]
    found = _alike(key, inside, cutoff=1.0) or _other(key, method)
    found = found or _alike(key, inside, cutoff=0.7) or _alike(key, [*paths, *groups], cutoff=1.0)
    return found or _alike(key, [*paths, *groups], cutoff=0.75)


def counterpart(option: str, method: str) -> Field | None:
    """The field that a flat option becomes."""
    for field in named(method).values():
        if option in (field.setting, field.rl_setting):
            return field
    other = _other(option, method)
    return FIELDS[other] if other else None


def is_option(key: str) -> bool:
    """Whether a key is an option's name that no descriptor uses."""
    return "_" in key and (key in OPTIONS or key in ("base_model_slug", "parent_checkpoint_id"))


def _other(key: str, method: str) -> str | None:
    name = _OTHER_NAMES.get(snake(key))
    if name is None:
        return None
    if method != "sft":
        name = _RL_NAMES.get(name, name)
    fields = named(method)
    if name not in fields:
        fields = named("sft") | named("grpo")
    return fields[name].path


def _groups(paths: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for path in paths:
        words = path.split(".")
        for count in range(1, len(words)):
            found.setdefault(".".join(words[:count]))
    return list(found)


def _alike(key: str, paths: list[str], *, cutoff: float) -> str | None:
    """The first path whose last word is like ``key``, whatever its case and underscores."""
    ends: dict[str, str] = {}
    for path in paths:
        ends.setdefault(path.rpartition(".")[2].lower(), path)
    plain = snake(key).replace("_", "")
    close = difflib.get_close_matches(plain, ends, n=1, cutoff=cutoff)
    return ends[close[0]] if close else None
