"""The run options, in one table: forms, completion, checks, listing, hash and docs read it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nbtrain.plan.fields import Compute, Mode, Option
from nbtrain.plan.registry import BaseModelInfo

MAX_CONCURRENT = 1024
_EVERYWHERE: tuple[Mode, ...] = ("training", "evaluation")
_MAX_STEPS = 1_000_000
_MAX_TOKENS = 2_097_152
_SAME_UPDATE = (
    "At max_staleness 0 every ratio is 1, so that both algorithms, and every clip range, give the "
    "same update."
)
_CLIP = {"gspo": (3e-4, 4e-4), "grpo": (0.2, 0.2)}  # the ranges their authors publish


def validation_on(values: Mapping[str, Any]) -> bool:
    """Whether a run with these options validates."""
    return bool(values["val_enabled"]) and values["val_interval_steps"] > 0


def concurrency(batch_size: int, group_size: int) -> int:
    """The default of ``max_concurrent_trajectories``: twice a batch, clamped to its bound."""
    return min(MAX_CONCURRENT, batch_size * group_size * 2)


def checkpoint_interval(num_steps: int, val_interval: int | None) -> int:
    """The default of ``checkpoint_interval_steps``.

    ``val_interval`` is ``None`` without validation. At most 20 checkpoints over the run, lined up
    with validation: every checkpoint falls on a validated step or, when validation is the rarer,
    every validated step has its checkpoint, so that the best validated step can be picked.
    """
    base = math.ceil(num_steps / 20)
    if val_interval is None:
        return base
    if val_interval <= base:
        return math.ceil(base / val_interval) * val_interval
    return next(d for d in range(base, val_interval + 1) if val_interval % d == 0)


def _context(_: Mapping[str, Any], model: BaseModelInfo | None) -> int | None:
    return model.max_context if model else None


def _precision(_: Mapping[str, Any], model: BaseModelInfo | None) -> str | None:
    return model.precision if model else None


def _like(name: str) -> Compute:
    return lambda values, _: values[name]


def _clip(side: int) -> Compute:
    return lambda values, _: _CLIP[values["algorithm"]][side]


def _interval(values: Mapping[str, Any], _: BaseModelInfo | None) -> int:
    on = validation_on(values)
    return checkpoint_interval(values["num_steps"], values["val_interval_steps"] if on else None)


def _no_zero(value: int) -> str | None:
    return "is -1 (no limit) or at least 1" if value == 0 else None


def _too_cold(value: float) -> str | None:
    # Logits divided by less overflow; nothing but the likeliest token would be sampled anyway
    return "is 0 (greedy) or at least 0.01" if 0 < value < 0.01 else None


def _pattern(value: str) -> str | None:
    if not value.strip():
        return 'is a regular expression or "default"'
    try:
        re.compile(value)
    except re.error as error:
        return f"is no valid regular expression ({error})"
    return None


def _as_training(name: str, kind: Any, text: str, **more: Any) -> Option:
    """A validation option that is as in training unless stated."""
    return Option(
        f"val_{name}", kind, text, "validation", compute=_like(name), computed="as in training",
        note="as in training", hashed="never", built=False, **more,
    )  # fmt: skip


_OPTIMIZATION = (
    Option("num_steps", "integer", "Training steps to run. With a parent checkpoint these are "
           "further steps.", "optimization", 100, min=1, max=100_000, inherited=False),
    Option("algorithm", "text", "How the update is taken: gspo clips the ratio of whole "
           f"sequences, grpo that of tokens. {_SAME_UPDATE}", "optimization", "gspo",
           choices=("gspo", "grpo"), later_choices=("sft",)),
    Option("batch_size", "integer", "Eligible groups per optimizer update.", "optimization", 32,
           min=1, max=256),
    Option("group_size", "integer", "Trajectories sampled for the same task; the advantage "
           "compares them.", "optimization", 8, min=2, max=32),
    Option("min_trajectories_per_group", "integer", "Eligible trajectories that a group needs "
           "to be used; at most group_size.", "optimization", min=1, max=32,
           compute=lambda values, _: values["group_size"] // 2,
           computed="half of group_size, rounded down"),
    Option("learning_rate", "number", "Base learning rate.", "optimization", 1e-4, min=1e-8,
           max=1e-2),
    Option("lr_warmup_steps", "integer", "Steps over which the rate rises linearly to the base "
           "rate; skipped updates count.", "optimization", 15, min=0, max=_MAX_STEPS),
    Option("lr_hold_steps", "integer", "Steps at the base rate after warm-up, before the cosine "
           "decay to the final step; skipped updates count. With the defaults decay starts after "
           "step 150.", "optimization", 135, min=0, max=_MAX_STEPS),
    Option("lr_min_ratio", "number", "The rate at the final step as a fraction of the base rate.",
           "optimization", 0.1, min=0, max=1),
    Option("max_staleness", "integer", "Updates that the policy a trajectory started from may "
           "trail. This version samples on-policy: 3 (the default) and 0 are accepted, both train "
           "at 0.", "optimization", 3, min=0, max=100, built_values=(3, 0)),
    Option("load_weights_only", "boolean", "Start from the parent checkpoint's weights with "
           "fresh training state, at step 0; otherwise optimizer, schedule, data position and "
           "global step are restored. Says how this run starts, so it is not inherited.",
           "optimization", False, inherited=False),
    Option("density_aware_training", "boolean", "Train each task at four output-token budgets, "
           "each a group of its own.", "optimization", False, built=False),
)  # fmt: skip

_FILTERS = tuple(
    Option(f"train_on_{name}", "boolean", text, "filters", False)
    for name, text in (
        ("truncation", "Train on trajectories that hit a token or turn limit, with reward 0; "
         "true with density_aware_training."),
        ("timeout", "Train on timed-out trajectories, with reward 0."),
        ("error", "Train on trajectories whose execution or grading failed or that got no grade, "
         "with reward 0."),
        ("all_fail", "Train on groups whose eligible rewards are all at or below 0."),
        ("all_pass", "Train on groups whose eligible rewards are all at or above 1."),
        ("zero_advantage", "Train on groups whose eligible rewards are identical."),
    )
)  # fmt: skip

_TRAJECTORIES = (
    Option("max_concurrent_trajectories", "integer", "Training trajectories sampled at a time, "
           "at most. At max_staleness 0 no more than batch_size x group_size are sampled at a "
           "time anyway, so that a higher value changes nothing.", "trajectories", min=1,
           max=MAX_CONCURRENT, hashed="with staleness",
           compute=lambda values, _: concurrency(values["batch_size"], values["group_size"]),
           computed="batch_size x group_size x 2, at most 1,024"),
    Option("max_turns_per_trajectory", "integer", "Agent and environment turns of a trajectory.",
           "trajectories", 200, min=1, max=500, modes=_EVERYWHERE, built=False),
    Option("max_output_tokens_per_turn", "integer", "Tokens of one reply; the context that is "
           "left bounds it too.", "trajectories", min=1, max=_MAX_TOKENS, within_context=True,
           compute=_context, computed="the base model's context", modes=_EVERYWHERE),
    Option("max_output_tokens_per_trajectory", "integer", "Output tokens of one trajectory, all "
           "turns together.", "trajectories", min=1, max=_MAX_TOKENS, compute=_context,
           computed="the base model's context", modes=_EVERYWHERE),
    Option("trajectory_timeout_seconds", "integer", "Seconds of execution of a trajectory, "
           "grading included, queueing excluded.", "trajectories", 7200, min=1, max=36_000,
           modes=_EVERYWHERE, hashed="never", built=False),
    Option("batch_timeout_seconds", "integer", "Seconds to assemble one batch, from the start of "
           "collection; at least trajectory_timeout_seconds.", "trajectories", 9600, min=1,
           max=38_400, hashed="never", built=False),
)  # fmt: skip

_SAMPLING = (
    Option("reasoning_effort", "text", "How much the model thinks, where its template has levels.",
           "sampling", compute=lambda *_: None, modes=_EVERYWHERE, built=False,
           computed="the lowest level that thinks; null for a model without levels"),
    Option("temperature", "number", "Sampling temperature; 0 is greedy, and then every group "
           "ties.", "sampling", 1.0, min=0, max=2, complaint=_too_cold, modes=_EVERYWHERE),
    Option("top_p", "number", "Sample from the smallest set of tokens with this probability, "
           "above 0, which would keep no token; null keeps the model's own.", "sampling", 1.0,
           min=0, max=1, above_min=True, nullable=True, modes=_EVERYWHERE),
    Option("top_k", "integer", "Sample from the k likeliest tokens; -1 is no limit, null keeps "
           "the model's own.", "sampling", -1, min=-1, max=_MAX_TOKENS, nullable=True,
           complaint=_no_zero, modes=_EVERYWHERE),
)  # fmt: skip

_VALIDATION = (
    Option("val_enabled", "boolean", "Validate on held-out tasks: the starting policy, every "
           "val_interval_steps, and the final policy. Leave it out when val_interval_steps is 0.",
           "validation", True, hashed="never"),
    Option("val_interval_steps", "integer", "Validate when the global step is a multiple of "
           "this; 0 turns validation off.", "validation", 1, min=0, max=100, hashed="never"),
    Option("val_num_tasks", "integer", "Distinct held-out tasks of a round at most; the same ones "
           "in every round.", "validation", 50, min=1, max=_MAX_STEPS, hashed="never",
           modes=_EVERYWHERE, evaluation_default="every task in scope"),
    Option("val_trajectories_per_task", "integer", "Trajectories per task of a round.",
           "validation", 1, min=1, max=1024, hashed="never", modes=_EVERYWHERE),
    Option("val_max_concurrent_trajectories", "integer", "Validation trajectories in flight at "
           "most.", "validation", 50, min=1, max=MAX_CONCURRENT, hashed="never",
           modes=_EVERYWHERE),
    Option("val_final_wait_timeout_seconds", "integer", "Seconds to wait at the end for "
           "outstanding rounds; 0 stops at once.", "validation", 7200, min=0, max=_MAX_STEPS,
           hashed="never", built=False),
    _as_training("reasoning_effort", "text", "Reasoning effort in validation."),
    _as_training("temperature", "number", "Sampling temperature in validation.", min=0, max=2,
                 complaint=_too_cold),
    _as_training("top_p", "number", "Nucleus probability in validation, above 0.", min=0, max=1,
                 above_min=True),
    _as_training("top_k", "integer", "Top-k limit in validation; -1 is no limit.", min=-1,
                 max=_MAX_TOKENS, complaint=_no_zero),
    _as_training("max_output_tokens_per_turn", "integer", "Tokens of one reply in validation.",
                 min=1, max=_MAX_TOKENS, within_context=True),
    _as_training("max_output_tokens_per_trajectory", "integer", "Output tokens of one validation "
                 "trajectory.", min=1, max=_MAX_TOKENS),
    _as_training("max_turns_per_trajectory", "integer", "Turns of one validation trajectory.",
                 min=1, max=500),
    _as_training("trajectory_timeout_seconds", "integer", "Seconds of execution of one "
                 "validation trajectory, grading included.", min=1, max=36_000),
)  # fmt: skip

_REGEX_HINT = (
    "It is one regular expression matched against the whole module path, "
    'such as .*\\.(q_proj|v_proj), or "default"'
)

_EXTENSIONS = (
    Option("kl_beta", "number", "Weight of the KL penalty to the base model; 0 is none.",
           "optimization", 0.0, min=0, max=1, origin="extension"),
    Option("weight_decay", "number", "Decoupled weight decay of the optimizer.", "optimization",
           0.01, min=0, max=1, origin="extension"),
    Option("max_grad_norm", "number", "The gradient is scaled down to this norm before an update.",
           "optimization", 1.0, min=1e-6, max=1e6, origin="extension"),
    Option("clip_low", "number", "How far below 1 a ratio may fall before it is clipped. "
           f"{_SAME_UPDATE}",
           "optimization", min=0, max=1, compute=_clip(0),
           computed="by algorithm: 3e-4 for gspo, 0.2 for grpo", origin="extension"),
    Option("clip_high", "number", "How far above 1 a ratio may rise before it is clipped. "
           f"{_SAME_UPDATE}",
           "optimization", min=0, max=10, compute=_clip(1),
           computed="by algorithm: 4e-4 for gspo, 0.2 for grpo", origin="extension"),
    Option("lora_rank", "integer", "Rank of the adapter.", "adapter", 16, min=1, max=512,
           origin="extension"),
    Option("lora_alpha", "number", "Scale of the adapter: alpha / rank.", "adapter", min=0.01,
           max=65_536, compute=lambda values, _: 2.0 * values["lora_rank"],
           computed="2 x lora_rank", origin="extension"),
    Option("lora_target_modules", "text", "Which linear modules get an adapter: a regular "
           "expression matched against whole module paths; default is every linear module of the "
           "language backbone.", "adapter", "default", complaint=_pattern, hint=_REGEX_HINT,
           origin="extension"),
    Option("seed", "integer", "Initialises the adapter, orders the tasks and drives sampling.",
           "run", 42, min=0, max=2**32 - 1, modes=_EVERYWHERE, origin="extension"),
    Option("precision", "text", "Precision of the frozen weights; adapters are always fp32.",
           "run", choices=("fp32", "bf16"), compute=_precision,
           computed="from the base model's catalog entry", modes=_EVERYWHERE, origin="extension"),
    Option("sampler", "text", "What decodes the replies. This version has the ragged decoder, "
           "which auto chooses.", "run", "auto", choices=("auto", "ragged"),
           later_choices=("vllm", "generate"), hashed="never", modes=_EVERYWHERE,
           origin="extension"),
    Option("reward_timeout_seconds", "number", "Seconds that one call of a reward may take before "
           "its worker is killed and the trajectories count as ungraded.", "run", 60.0, min=0.1,
           max=36_000, hashed="never", modes=_EVERYWHERE, origin="extension"),
    Option("checkpoint_interval_steps", "integer", "A checkpoint is saved when the global step is "
           "a multiple of this, besides the start and the end.", "run", min=1, max=100_000,
           compute=_interval, hashed="never", origin="extension",
           computed="num_steps / 20, rounded up, then lined up with validation: raised to a "
           "multiple of val_interval_steps or, when that is larger, to a divisor of it"),
    Option("keep_checkpoints", "integer", "Unreferenced checkpoints to keep; null keeps every "
           "adapter, and the training state of the last two.", "run", min=1, max=100_000,
           nullable=True, hashed="never", built=False, origin="extension"),
    *(
        Option(name, "integer", text, "budgets", min=1, max=10**12, nullable=True, hashed="never",
               built=False, origin="extension")
        for name, text in (
            ("max_total_trajectories", "Trajectories after which the run ends; null is no limit."),
            ("max_total_output_tokens", "Output tokens after which the run ends; null is no "
             "limit."),
            ("max_wall_clock_seconds", "Seconds after which the run ends; null is no limit."),
        )
    ),
)  # fmt: skip

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        *_OPTIMIZATION, *_FILTERS, *_TRAJECTORIES, *_SAMPLING, *_VALIDATION, *_EXTENSIONS,
    )
}  # fmt: skip
"""Every option by name. A computed default looks only at options that stand before it."""
