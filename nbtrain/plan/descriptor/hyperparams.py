"""The fields of ``hyperparams`` and ``rlHyperparams``, with each loop's own defaults."""

from __future__ import annotations

from typing import Any

from nbtrain.plan import defaults
from nbtrain.plan.descriptor import sizing
from nbtrain.plan.descriptor.field import REINFORCEMENT, SUPERVISED, Field, make
from nbtrain.plan.fields import NO_BOUND

_MOST_STEPS = 1_000_000
_MOST_TOKENS = 2_097_152
_REGEX_HINT = (
    "It is one regular expression matched against the whole module path, "
    'such as .*\\.(q_proj|v_proj), or "default"'
)


def _shared(methods: tuple[str, ...]) -> tuple[Field, ...]:
    """The groups ``lora``, ``optimizer`` and ``scheduler``, which both loops have."""
    rl = methods == REINFORCEMENT
    root = "config.rlHyperparams" if rl else "config.hyperparams"

    def one(path: str, kind: Any, text: str, group: Any, default: Any = None, *,
            setting: str, rl_setting: str | None = None, **more: Any) -> Field:  # fmt: skip
        return make(
            f"{root}.{path}", kind, text, group, default, setting=setting,
            rl_setting=rl_setting, methods=methods, **more,
        )  # fmt: skip

    return (
        one("lora.rank", "integer", "Rank of the adapter.", "adapter", 8, min=1, max=512,
            setting="lora_rank", rl_setting="lora_rank"),
        one("lora.alpha", "number", "Scale of the adapter: alpha / rank.", "adapter", min=0.01,
            max=65_536, compute=lambda values, _: 2.0 * values["lora.rank"],
            computed="2 x lora.rank", setting="lora_alpha", rl_setting="lora_alpha"),
        one("lora.dropout", "number", "Probability that an adapted activation is dropped in "
            "training." + (" Reinforcement runs train without." if rl else ""), "adapter", 0.0,
            min=0, max=1, below_max=True, setting="lora_dropout"),
        one("lora.targetModules", "text", "Which linear modules get an adapter: a regular "
            "expression matched against whole module paths; default is every linear module of "
            "the language backbone.", "adapter", "default", complaint=defaults.pattern,
            hint=_REGEX_HINT, setting="lora_target_modules", rl_setting="lora_target_modules"),
        one("optimizer.kind", "text", "What performs the update.", "optimization", "adamw",
            choices=("adamw",), setting="optimizer_kind"),
        one("optimizer.learningRate", "number", "Peak learning rate.", "optimization",
            1e-5 if rl else 1e-4, min=1e-8, max=1e-2 if rl else 1.0, setting="learning_rate",
            rl_setting="learning_rate"),
        one("optimizer.weightDecay", "number", "Decoupled decay of the adapted weights.",
            "optimization", 0.01 if rl else 0.0, min=0, max=1, setting="weight_decay",
            rl_setting="weight_decay"),
        one("optimizer.maxGradNorm", "number", "The gradient is scaled down to this norm before "
            "an update.", "optimization", 1.0, min=1e-6, max=1e6, setting="max_grad_norm",
            rl_setting="max_grad_norm"),
        one("scheduler.kind", "text", "How the rate goes on after warm-up: linear falls to zero "
            "just after the last update, cosine to the floor at the last one, constant stays.",
            "optimization", "constant" if rl else "linear",
            choices=("linear", "cosine", "constant"), setting="scheduler_kind"),
        one("scheduler.warmupRatio", "number", "Share of the updates over which the rate rises.",
            "optimization", 0.0, min=0, max=1, below_max=True, setting="warmup_ratio"),
        one("scheduler.minLearningRateRatio", "number", "The floor of a cosine as a fraction of "
            "the peak.", "optimization", 0.0, min=0, max=1, setting="min_learning_rate_ratio"),
    )  # fmt: skip


def _epochs(path: str, default: int, text: str, methods: tuple[str, ...]) -> Field:
    return make(
        path, "integer", text, "optimization", default, min=1, max=100_000, setting="epochs",
        methods=methods,
    )  # fmt: skip


_TRAINING = (
    _epochs("config.hyperparams.training.epochs", 3, "Passes over the dataset.", SUPERVISED),
    make("config.hyperparams.training.maxSteps", "integer", "Cap on updates; 0 is none.",
         "optimization", 0, min=0, max=_MOST_STEPS, setting="max_steps", methods=SUPERVISED,
         keeps_zero=True),
    make("config.hyperparams.training.microBatchPerGpu", "integer", "Sequences of one pass on "
         "one device; x maxSeqLength at most what the base model is qualified at.",
         "optimization", min=1, max=4096, setting="micro_batch_per_gpu", methods=SUPERVISED,
         compute=sizing.micro_batch, computed="the most whose tokens fit 4,096, so that an "
         "update keeps 8 sequences"),
    make("config.hyperparams.training.gradientAccumulation", "integer", "Passes summed into one "
         "update, over all devices; x microBatchPerGpu is the sequences of an update.",
         "optimization", min=1, max=65_536, setting="gradient_accumulation", methods=SUPERVISED,
         compute=sizing.accumulation, computed="as many as give an update 8 sequences"),
    make("config.hyperparams.training.validationFrequencySteps", "integer", "Updates between "
         "evaluations on the validation dataset; without one nothing is evaluated.",
         "validation", 100, min=1, max=_MOST_STEPS, setting="validation_frequency_steps",
         methods=SUPERVISED),
    make("config.hyperparams.training.seed", "integer", "Initialises the adapter, orders the "
         "rows and drives dropout.", "run", 42, min=1, max=2**32 - 1, setting="seed",
         methods=SUPERVISED),
)  # fmt: skip


def _reply(values: Any, _: Any) -> int:
    """256, or half of a ``maxSeqLength`` that is not longer than that."""
    longest: int = values["maxSeqLength"]
    return 256 if longest > 256 else max(1, longest // 2)


def _rl(key: str, kind: Any, text: str, default: Any = None, *, group: Any = "optimization",
        rl_setting: str | None = None, **more: Any) -> Field:  # fmt: skip
    return make(f"config.rlHyperparams.{key}", kind, text, group, default,
                rl_setting=rl_setting, methods=REINFORCEMENT, **more)  # fmt: skip


_REINFORCEMENT = (
    _epochs("config.rlHyperparams.epochs", 1, "Passes over the prompts.", REINFORCEMENT),
    _rl("maxSteps", "integer", "Cap on updates, which overrides epochs; 0 is none.", 0, min=0,
        max=100_000, keeps_zero=True),
    _rl("groupSize", "integer", "Completions sampled for each prompt; the advantage compares "
        "them.", 4, min=2, max=32, rl_setting="group_size",
        hint="Group-relative training needs at least two completions of a prompt"),
    _rl("promptsPerStep", "integer", "Prompts rolled out in a step; at least execution.gpus.", 8,
        min=1, max=256, rl_setting="batch_size"),
    _rl("klBeta", "number", "Weight of the KL penalty to the policy that the run starts from; 0 "
        "is none.", 0.04, min=0, max=1, rl_setting="kl_beta", keeps_zero=True),
    _rl("temperature", "number", "Sampling temperature; 0 is greedy, and then every group ties.",
        0.7, group="sampling", min=0, max=2, complaint=defaults.too_cold,
        rl_setting="temperature", keeps_zero=True),
    _rl("maxCompletionLength", "integer", "Tokens of the longest completion.",
        group="trajectories", min=1, max=_MOST_TOKENS, compute=_reply,
        computed="256, or half of a maxSeqLength that is not above that",
        rl_setting="max_output_tokens_per_turn"),
    _rl("stalenessThreshold", "integer", "Only 0: every step trains on rollouts of the current "
        "weights.", 0, min=0, max=NO_BOUND, keeps_zero=True),
)  # fmt: skip

HYPERPARAMS: tuple[Field, ...] = (
    *_shared(SUPERVISED), *_TRAINING, *_REINFORCEMENT, *_shared(REINFORCEMENT),
)  # fmt: skip
"""Every field of both groups, the supervised ones first."""
