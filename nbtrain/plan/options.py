"""The run options, in one table: forms, completion, checks, listing, hash and docs read it."""

from __future__ import annotations

from typing import Any

from nbtrain.plan import defaults
from nbtrain.plan.fields import NO_BOUND, Mode, Option

_EVERYWHERE: tuple[Mode, ...] = ("training", "evaluation")
_MAX_STEPS = 1_000_000
_MAX_TOKENS = 2_097_152
_SAME_UPDATE = (
    "At max_staleness 0 every ratio is 1, so that both algorithms, and every clip range, give the "
    "same update."
)
_STALE_CLIP = (
    "Above max_staleness 0 gspo's published range (3e-4, 4e-4) clips most sequences, since their "
    "tokens come from older policies; hence its wider default there."
)


def _as_training(name: str, kind: Any, text: str, **more: Any) -> Option:
    """A validation option that is as in training unless stated."""
    return Option(
        f"val_{name}", kind, text, "validation", compute=defaults.like(name),
        computed="as in training", note="as in training", hashed="never", **more,
    )  # fmt: skip


_OPTIMIZATION = (
    Option("num_steps", "integer", "Training steps to run. With a parent checkpoint these are "
           "further steps.", "optimization", 100, min=1, max=100_000, inherited=False),
    Option("algorithm", "text", "How the update is taken: gspo clips the ratio of whole "
           f"sequences, grpo that of tokens. {_SAME_UPDATE}", "optimization", "gspo",
           choices=("gspo", "grpo")),
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
    Option("lr_min_ratio", "number", "The rate at the final step as a fraction of the base rate; 0 "
           "would be reached one step after it.", "optimization", 0.1, min=0, max=1),
    Option("max_staleness", "integer", "Updates that the policy a trajectory started from may "
           "trail; older ones are cancelled, or discarded when they are finished. At 0 every step "
           "is sampled by the policy it updates, and a run repeats bit for bit.",
           "optimization", 3, min=0, max=100),
    Option("load_weights_only", "boolean", "Start from the parent checkpoint's weights with "
           "fresh training state, at step 0; otherwise optimizer, schedule, data position and "
           "global step are restored. Says how this run starts, so it is not inherited.",
           "optimization", False, inherited=False),
    Option("density_aware_training", "boolean", "Train each task at four output-token budgets: "
           "1/8, 1/4, 1/2 and all of max_output_tokens_per_trajectory, rounded up, each a group "
           "of its own. Turns on train_on_truncation.", "optimization", False),
)  # fmt: skip

_FILTERS = (
    Option("train_on_truncation", "boolean", "Train on trajectories that hit a token or turn "
           "limit, with reward 0. Stays true with density_aware_training, except when a run "
           "resumes with training state.", "filters",
           compute=lambda values, _: values["density_aware_training"],
           computed="true with density_aware_training, else false"),
    *(Option(f"train_on_{name}", "boolean", text, "filters", False)
    for name, text in (
        ("timeout", "Train on timed-out trajectories, with reward 0."),
        ("error", "Train on trajectories whose execution or grading failed or that got no grade, "
         "with reward 0."),
        ("all_fail", "Train on groups whose eligible rewards are all at or below 0."),
        ("all_pass", "Train on groups whose eligible rewards are all at or above 1."),
        ("zero_advantage", "Train on groups whose eligible rewards are identical."),
    )),
)  # fmt: skip

_TRAJECTORIES = (
    Option("max_concurrent_trajectories", "integer", "Training trajectories in flight, at "
           "most; above batch_size x group_size they run on while the policy is updated. At "
           "max_staleness 0 no more than batch_size x group_size are sampled at a time anyway, so "
           "that a higher value changes nothing.", "trajectories", min=1,
           max=defaults.MAX_CONCURRENT, hashed="with staleness",
           compute=defaults.twice_a_batch,
           computed="batch_size x group_size x 2, at most 1,024"),
    Option("max_turns_per_trajectory", "integer", "Agent and environment turns of a trajectory.",
           "trajectories", 200, min=1, max=500, modes=_EVERYWHERE),
    Option("max_output_tokens_per_turn", "integer", "Tokens of one reply; the context that is "
           "left bounds it too.", "trajectories", min=1, max=_MAX_TOKENS, within_context=True,
           compute=defaults.context, computed="the base model's context", modes=_EVERYWHERE),
    Option("max_output_tokens_per_trajectory", "integer", "Output tokens of one trajectory, all "
           "turns together.", "trajectories", min=1, max=_MAX_TOKENS, compute=defaults.context,
           computed="the base model's context", modes=_EVERYWHERE),
    Option("trajectory_timeout_seconds", "integer", "Seconds of execution of a trajectory, "
           "grading included; queueing, construction and reset of its environment excluded.",
           "trajectories", 7200, min=1, max=36_000, modes=_EVERYWHERE, hashed="never"),
    Option("batch_timeout_seconds", "integer", "Seconds to assemble one batch, from the start of "
           "collection; then the step trains on the eligible groups at hand. At least "
           "trajectory_timeout_seconds.", "trajectories", 9600, min=1, max=38_400,
           hashed="never"),
)  # fmt: skip

_SAMPLING = (
    Option("reasoning_effort", "text", "How much the model thinks, where its chat template has "
           "levels; off where it can be turned off.", "sampling", choices=defaults.EFFORTS,
           choices_of=defaults.levels, compute=defaults.lowest_effort, modes=_EVERYWHERE,
           computed="the lowest level that thinks; null for a model without levels"),
    Option("temperature", "number", "Sampling temperature; 0 is greedy, and then every group "
           "ties.", "sampling", 1.0, min=0, max=2, complaint=defaults.too_cold, modes=_EVERYWHERE),
    Option("top_p", "number", "Sample from the smallest set of tokens whose probabilities sum to "
           "this, above 0; null keeps the model's own.", "sampling", 1.0,
           min=0, max=1, above_min=True, nullable=True, modes=_EVERYWHERE),
    Option("top_k", "integer", "Sample from the k likeliest tokens; -1 is no limit, null keeps "
           "the model's own.", "sampling", -1, min=-1, max=_MAX_TOKENS, nullable=True,
           complaint=defaults.no_zero, modes=_EVERYWHERE),
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
           "most.", "validation", 50, min=1, max=defaults.MAX_CONCURRENT, hashed="never",
           modes=_EVERYWHERE),
    Option("val_final_wait_timeout_seconds", "integer", "Seconds that the final round may "
           "take. Rounds run in step with training, so that no other is outstanding at the end; "
           "what the final one has by then is kept, as not completed. 0 stops at once.",
           "validation", 7200, min=0, max=_MAX_STEPS, hashed="never"),
    _as_training("reasoning_effort", "text", "Reasoning effort in validation.",
                 choices=defaults.EFFORTS, choices_of=defaults.levels),
    _as_training("temperature", "number", "Sampling temperature in validation.", min=0, max=2,
                 complaint=defaults.too_cold),
    _as_training("top_p", "number", "Nucleus probability in validation, above 0.", min=0, max=1,
                 above_min=True),
    _as_training("top_k", "integer", "Top-k limit in validation; -1 is no limit.", min=-1,
                 max=_MAX_TOKENS, complaint=defaults.no_zero),
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
           f"{_SAME_UPDATE} {_STALE_CLIP}",
           "optimization", min=0, max=1, compute=defaults.clip_default(0),
           computed=defaults.clip_words(0), origin="extension"),
    Option("clip_high", "number", "How far above 1 a ratio may rise before it is clipped. "
           f"{_SAME_UPDATE} {_STALE_CLIP}",
           "optimization", min=0, max=10, compute=defaults.clip_default(1),
           computed=defaults.clip_words(1), origin="extension"),
    Option("lora_rank", "integer", "Rank of the adapter.", "adapter", 16, min=1, max=512,
           origin="extension"),
    Option("lora_alpha", "number", "Scale of the adapter: alpha / rank.", "adapter", min=0.01,
           max=65_536, compute=lambda values, _: 2.0 * values["lora_rank"],
           computed="2 x lora_rank", origin="extension"),
    Option("lora_target_modules", "text", "Which linear modules get an adapter: a regular "
           "expression matched against whole module paths; default is every linear module of the "
           "language backbone.", "adapter", "default", complaint=defaults.pattern, hint=_REGEX_HINT,
           origin="extension"),
    Option("seed", "integer", "Initialises the adapter, orders the tasks and drives sampling.",
           "run", 42, min=0, max=2**32 - 1, modes=_EVERYWHERE, origin="extension"),
    Option("precision", "text", "Precision of the frozen weights; adapters are always fp32.",
           "run", choices=("fp32", "bf16"), compute=defaults.precision,
           computed="from the base model's catalog entry", modes=_EVERYWHERE, origin="extension"),
    Option("sampler", "text", "What decodes the replies: ragged is nbtrain's own decoder, generate "
           "the slower one for architectures whose cache ragged cannot hold, vllm needs the extra "
           "of that name. auto takes vllm where a GPU is there and it is installed, else ragged, "
           "or generate where the model needs it.", "run", "auto",
           choices=("auto", *defaults.SAMPLERS), hashed="never", modes=_EVERYWHERE,
           origin="extension"),
    Option("gpus", "integer", "Ranks, one to a GPU; on a machine without GPUs that many ranks on "
           "the CPU.", "run", 1, min=1, max=64, hashed="never", modes=_EVERYWHERE,
           origin="extension"),
    Option("reward_workers", "integer", "Processes that score replies; null is one to a core, at "
           "most 4.", "run", min=1, max=256, nullable=True, hashed="never", modes=_EVERYWHERE,
           origin="extension"),
    Option("environment_workers", "integer", "Processes that run environments; null is one to a "
           "trajectory in flight, at most 64.", "run", min=1, max=1024, nullable=True,
           hashed="never", modes=_EVERYWHERE, origin="extension"),
    Option("reward_timeout_seconds", "number", "Seconds that one call of a reward may take before "
           "its worker is killed and the trajectories count as ungraded.", "run", 60.0, min=0.1,
           max=36_000, hashed="never", modes=_EVERYWHERE, origin="extension"),
    Option("checkpoint_interval_steps", "integer", "A checkpoint is saved when the global step is "
           "a multiple of this, besides the start and the end.", "run", min=1, max=100_000,
           compute=defaults.interval, hashed="never", origin="extension",
           computed="num_steps / 20, rounded up, then lined up with validation: raised to a "
           "multiple of val_interval_steps or, when that is larger, to a divisor of it"),
    Option("keep_checkpoints", "integer", "How many of the newest checkpoints are kept, besides "
           "the start, the best, the last and those that something refers to; null keeps every "
           "adapter. Training state is kept of the last two either way.", "run", min=1,
           max=100_000, nullable=True, hashed="never", origin="extension"),
    *(
        Option(name, "integer", f"{text} after which the run ends, with a checkpoint; null is no "
               "limit.", "budgets", min=1, max=NO_BOUND, nullable=True, hashed="never",
               origin="extension")
        for name, text in (
            ("max_total_trajectories", "Trajectories"),
            ("max_total_output_tokens", "Output tokens"),
            ("max_wall_clock_seconds", "Seconds"),
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
