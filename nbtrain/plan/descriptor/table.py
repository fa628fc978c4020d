"""The run descriptor, in one table: reading, checks, forms, completion, hash and docs read it.

It is a table like that of the options, on the same checker, and not a tree of model classes, so
that both documents speak one vocabulary of refusals.
"""

from __future__ import annotations

from typing import Any

from nbtrain.plan.descriptor.field import METHODS, REINFORCEMENT, SUPERVISED, Field, make
from nbtrain.plan.descriptor.hyperparams import HYPERPARAMS
from nbtrain.plan.fields import NO_BOUND
from nbtrain.plan.naming import ONE_LINE, not_one_line

__all__ = ["FIELDS", "METHODS", "Field", "fields_of", "named", "setting_names"]

_LONG = 4096
"""Sequences above this recompute activations, unless stated."""
_MOST_ROWS = 1_000_000
_REFERENCE_HINT = "A name, an id, or a prefix of an id"


def _one_line(value: str) -> str | None:
    broken = not_one_line(value)
    return broken and f"{broken} ({ONE_LINE} is allowed)"


def _some_text(value: str) -> str | None:
    return None if value.strip() and len(value) <= 4000 else "is text of 1 to 4,000 characters"


def _reference(path: str, text: str, part: Any = "reference", **more: Any) -> Field:
    return make(path, "text", text, "document", part=part, looked_up=True,
                hint=_REFERENCE_HINT, nullable=True, **more)  # fmt: skip


_TOP = (
    make("kind", "text", "Tells a run from other documents.", "document",
         part="reference", choices=("run",), later_choices=("pipeline",), hint="Write kind: run"),
    _reference("workload", "The workload that the run belongs to."),
    _reference("baseModel", "The base model; by default the workload's."),
    make("grader", "text", "Grader of the run's evaluations; by default the workload's.",
         "document", part="reference", nullable=True),
    _reference("warmStartModelId", "A registered adapter that a reinforcement run starts from.",
               methods=REINFORCEMENT),
    make("submissionId", "text", "An id of this attempt to start the run: the same one means the "
         "same run.", "document", part="annotation", nullable=True, complaint=_one_line),
    make("description", "text", "What the run is about.", "document", part="annotation",
         nullable=True, complaint=_some_text),
    make("configName", "text", "Label of the configuration in tables of scores.", "document",
         part="annotation", nullable=True, complaint=_one_line),
)  # fmt: skip


def _length(_: Any, model: Any) -> int:
    return 2048 if model is None else min(2048, model.max_context)


_CONFIG = (
    _reference("config.dataset", "The dataset that the run trains on.", "config",
               setting="dataset"),
    make("config.method", "text", "How the model learns: sft from answers, grpo and gspo from "
         "rewards.", "document", "sft", choices=METHODS, setting="algorithm",
         rl_setting="algorithm"),
    make("config.maxSeqLength", "integer", "Tokens of the longest example, of prompt and "
         "completion together in a reinforcement run; what is longer is never cut unasked.",
         "data", min=1, max=2_097_152, within_context=True, compute=_length,
         computed="2,048, or the base model's context where that is less",
         setting="max_seq_length", rl_setting="max_seq_length"),
    *HYPERPARAMS,
    make("config.warmStartConfigHash", "text", "Recipe of the model that the run starts from; "
         "set from warmStartModelId.", "document", nullable=True, methods=REINFORCEMENT,
         hint="Leave it out"),
    make("config.model.precision", "text", "How the base model's weights are held: BF16, or INT4, "
         "which is another model.", "model", "BF16", choices=("BF16", "INT4"),
         setting="precision"),
    make("config.model.gradientCheckpointing", "boolean", "Recompute activations in the backward "
         "pass instead of keeping them.", "model",
         compute=lambda values, _: values["method"] == "sft" and values["maxSeqLength"] > _LONG,
         computed="true where maxSeqLength is above 4,096 in a supervised run",
         setting="gradient_checkpointing"),
    make("config.model.attentionImplementation", "text", "What computes attention: PyTorch's "
         "fused sdpa, or the architecture's own eager.", "model", "sdpa",
         choices=("sdpa", "eager"), setting="attention_implementation"),
    make("config.model.weightPrecision", "text", "Precision of the trained model's weights under "
         "verl.", "model", choices=("fp32", "bf16"), nullable=True, by_verl=True),
    _reference("config.data.validationDataset", "A second dataset, evaluated on while training.",
               "config", setting="validation_dataset", methods=SUPERVISED),
    make("config.data.truncation", "text", "What happens to a row longer than maxSeqLength: error "
         "refuses it by its line; right drops tokens from its end, and refuses it where one of "
         "them would train.", "data", "error", choices=("error", "right"), setting="truncation",
         methods=SUPERVISED),
    make("config.data.packing", "boolean", "Put several short rows into one sequence.", "data",
         False, setting="packing", methods=SUPERVISED),
    make("config.data.shuffle", "boolean", "Shuffle the rows before the first epoch, by "
         "training.seed.", "data", True, setting="shuffle", methods=SUPERVISED),
    make("config.loss.assistantTurns", "text", "Which assistant messages train: all, or the last "
         "alone.", "loss", "last", choices=("last", "all"), setting="assistant_turns",
         methods=SUPERVISED),
    make("config.loss.trainOnToolCalls", "boolean", "Whether the tool calls of a selected message "
         "train.", "loss", True, setting="train_on_tool_calls", methods=SUPERVISED),
    make("config.loss.trainOnToolResults", "boolean", "Whether what a tool said trains.", "loss",
         False, setting="train_on_tool_results", methods=SUPERVISED),
    make("config.loss.explicitLossMaskColumn", "text", "A column that is the mask, in rows that "
         "have it; the rest of loss then does not count.", "loss", nullable=True,
         setting="explicit_loss_mask_column", methods=SUPERVISED),
    make("config.engineSettings.engine", "text", "The engine that the settings are for.",
         "engine", choices=("verl",), nullable=True, by_verl=True),
)  # fmt: skip


def _execution(key: str, kind: Any, text: str, default: Any = None, **more: Any) -> Field:
    return make(f"execution.{key}", kind, text, "execution", default, part="execution", **more)


_EXECUTION = (
    _execution("gpus", "integer", "Devices, a rank on each; on a machine without GPUs that many "
               "ranks on the CPU.", 1, min=1, max=64, setting="gpus", rl_setting="gpus"),
    _execution("rolloutGpus", "integer", "Only 0: rollouts are sampled on the training devices.",
               0, min=0, max=NO_BOUND),
    _execution("microBatchSequences", "integer", "Most sequences of a device's pass; changes only "
               "peak memory. Null is chosen by the job.", min=1, max=65_536, nullable=True,
               setting="micro_batch_sequences", rl_setting="micro_batch_sequences"),
    _execution("saveEvery", "integer", "Updates between checkpoints. Null is off: one at the end.",
               min=1, max=_MOST_ROWS, nullable=True, setting="save_every",
               rl_setting="checkpoint_interval_steps",
               hint="State 0 for no periodic checkpoint"),
    _execution("keepAdapters", "integer", "Adapter checkpoints that are kept besides those that "
               "something refers to.", 5, min=1, max=100_000, setting="keep_adapters",
               rl_setting="keep_checkpoints"),
    _execution("deviceProfile", "text", "The kind of device to train on; this machine has one.",
               nullable=True),
    _execution("engine", "text", "What executes the training.", "trl", choices=("trl",),
               later_choices=("verl",)),
    _execution("rollout.memoryShare", "number", "Share of a device that verl's rollout engine "
               "takes.", min=0, max=1, above_min=True, below_max=True, nullable=True,
               keeps_zero=True, by_verl=True),
    _execution("memory.offload.weights", "boolean", "Whether verl moves the weights to host "
               "memory between passes.", nullable=True, by_verl=True),
    _execution("hostMemoryGiB", "number", "Host memory that loading needs, checked against this "
               "machine's and not passed on.", min=0, above_min=True, max=NO_BOUND,
               nullable=True),
)  # fmt: skip

_SMOKE = (
    make("smoke.sliceSize", "integer", "Rows from the start of the dataset that a smoke check "
         "trains on and scores.", "smoke", 200, part="smoke", min=1, max=_MOST_ROWS,
         methods=SUPERVISED),
    make("smoke.maxSteps", "integer", "Cap on a smoke check's updates.", "smoke", 2000,
         part="smoke", min=1, max=_MOST_ROWS, methods=SUPERVISED),
    make("smoke.threshold", "number", "The reproduction score that a working run reaches.",
         "smoke", 0.98, part="smoke", min=0, max=1, above_min=True, methods=SUPERVISED),
)  # fmt: skip

FIELDS: dict[str, Field] = {field.path: field for field in (*_TOP, *_CONFIG, *_EXECUTION, *_SMOKE)}
"""Every field by its full dotted path. A computed default looks only at fields before it.

``config.reward`` and ``config.engineSettings.settings`` have tables of their own, in ``terms`` and
``verl_settings``.
"""


def fields_of(method: str) -> list[Field]:
    """The fields that a run of ``method`` has, in the order of the table.

    Raises ``ValueError`` for another method.
    """
    if method not in METHODS:
        msg = f"method is {', '.join(METHODS)}, found {method!r}"
        raise ValueError(msg)
    return [field for field in FIELDS.values() if method in field.methods]


def named(method: str) -> dict[str, Field]:
    """The fields of a method by what refusals call them."""
    return {field.name: field for field in fields_of(method)}


def setting_names(method: str) -> dict[str, str]:
    """What refusals call the field that becomes a setting of a run of ``method``, by setting."""
    names: dict[str, str] = {}
    for field in fields_of(method):
        setting = field.setting if method == "sft" else field.rl_setting
        if setting is not None:
            names[setting] = field.name
    return names
