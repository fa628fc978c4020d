"""From the resolved plan to what each part of the job needs: the only place that reads both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nbtrain.plan import defaults
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.admission import AdmissionRules
from nbtrain.rollout.budgets import Budgets
from nbtrain.rollout.collector import CollectorSettings
from nbtrain.rollout.generate import GenerateSampler
from nbtrain.rollout.limits import Sampling, with_model_defaults
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.types import Sampler
from nbtrain.training.loop import LoopSettings
from nbtrain.training.policy import Policy
from nbtrain.training.update import UpdateSettings
from nbtrain.training.validation import ValidationSettings


def load_policy(plan: ResolvedPlan, folder: Path, device: torch.device) -> Policy:
    """The base model with a fresh adapter, as the plan says."""
    return Policy.load(
        folder,
        precision=plan["precision"],
        lora_rank=plan["lora_rank"],
        lora_alpha=plan["lora_alpha"],
        target_modules=plan["lora_target_modules"],
        seed=plan["seed"],
        device=device,
        max_context=plan.base_model.max_context,
    )


def load_sampler(
    plan: ResolvedPlan,
    policy: Policy,
    *,
    ends: Sequence[int],
    pad_id: int | None,
    kv_budget_bytes: int,
    ranks: int,
) -> Sampler:
    """What decodes the replies of one of ``ranks`` ranks, except for vLLM.

    A model whose configuration promises a cache that the ragged decoder can hold, and which then
    turns out to be another, is sampled by the plain one, unless the plan states ``ragged``.

    Raises ``ValueError`` for a model that it cannot sample.
    """
    arguments: dict[str, Any] = {
        "slots": _slots(plan, ranks),
        "eos_ids": ends,
        "pad_id": pad_id,
        "max_context": plan.base_model.max_context,
        "kv_budget_bytes": kv_budget_bytes,
    }
    if plan["sampler"] == "generate":
        return GenerateSampler(policy.model, **arguments)
    try:
        return RaggedSampler(policy.model, **arguments)
    except ValueError:
        if plan.settings["sampler"].origin == "stated":
            raise
        return GenerateSampler(policy.model, **arguments)


def load_vllm(
    plan: ResolvedPlan,
    policy: Policy,
    folder: Path,
    *,
    ends: Sequence[int],
    longest: int,
    kv_budget_bytes: int,
    scratch: Path,
) -> Sampler:
    """The sampler that is vLLM, with the base model in ``folder``; adapters go through ``scratch``.

    ``longest`` are the most tokens that prompt and replies can come to.

    Raises :class:`StartChecksFailed` for settings whose log-probs it cannot give, ``ValueError``
    for a model that it does not take.
    """
    from nbtrain.rollout.vllm import VllmSampler
    from nbtrain.rollout.vllm_engine import VllmEngine, prepare_process

    on_cpu = policy.device.type == "cpu"
    prepare_process(cpu=on_cpu)
    drawings = [training_sampling(plan, policy)]
    if plan["val_enabled"]:
        drawings.append(validation_settings(plan, policy).sampling)
    engine = VllmEngine(
        folder,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[plan["precision"]],
        slots=_slots(plan, 1),
        max_context=longest,
        kv_budget_bytes=kv_budget_bytes,
        lora_rank=plan["lora_rank"],
        max_versions=plan["max_staleness"] + 1,
        drawings=drawings,
        seed=plan["seed"],
        eager=on_cpu,
    )
    return VllmSampler(
        engine, eos_ids=ends, save_adapter=policy.save_adapter, adapter_folder=scratch
    )


def _slots(plan: ResolvedPlan, ranks: int) -> int:
    """Replies that a rank decodes at a time."""
    training: int = max(1, plan["max_concurrent_trajectories"] // ranks)
    if not plan["val_enabled"]:
        return training
    held_out: int = max(1, plan["val_max_concurrent_trajectories"] // ranks)
    # Ahead of training, a round of validation comes beside what is in flight
    return training + held_out if plan["max_staleness"] else max(training, held_out)


def budgets(plan: ResolvedPlan) -> Budgets:
    """The run's hard budgets."""
    return Budgets(
        plan["max_total_trajectories"],
        plan["max_total_output_tokens"],
        plan["max_wall_clock_seconds"],
    )


def training_sampling(plan: ResolvedPlan, policy: Policy) -> Sampling:
    """How training trajectories are sampled."""
    return _sampling(plan, policy, prefix="")


def collector_settings(plan: ResolvedPlan, policy: Policy) -> CollectorSettings:
    """Batch, group and filters."""
    return CollectorSettings(
        batch_size=plan["batch_size"],
        group_size=plan["group_size"],
        max_in_flight=plan["max_concurrent_trajectories"],
        batch_timeout=float(plan["batch_timeout_seconds"]),
        seed=plan["seed"],
        rules=AdmissionRules(
            min_trajectories=plan["min_trajectories_per_group"],
            train_on_truncation=plan["train_on_truncation"],
            train_on_timeout=plan["train_on_timeout"],
            train_on_error=plan["train_on_error"],
            train_on_all_fail=plan["train_on_all_fail"],
            train_on_all_pass=plan["train_on_all_pass"],
            train_on_zero_advantage=plan["train_on_zero_advantage"],
        ),
        sampling=training_sampling(plan, policy),
        max_staleness=plan["max_staleness"],
        budgets=_token_budgets(plan),
        most_ungraded=_most_ungraded(plan),
    )


def _token_budgets(plan: ResolvedPlan) -> tuple[int, ...]:
    if not plan["density_aware_training"]:
        return ()
    return defaults.budgets(plan["max_output_tokens_per_trajectory"])


def _most_ungraded(plan: ResolvedPlan) -> int:
    """Groups that may wait for their grades: what slow rewards could still bring in time."""
    if plan["max_staleness"] == 0:
        return 512
    at_work = -(-(plan["reward_workers"] or defaults.MOST_REWARD_WORKERS) // plan["group_size"])
    return int((plan["max_staleness"] + 1) * plan["batch_size"] + at_work)


def validation_settings(plan: ResolvedPlan, policy: Policy) -> ValidationSettings:
    """The held-out selection and how it is sampled."""
    return ValidationSettings(
        num_tasks=plan["val_num_tasks"],
        trajectories_per_task=plan["val_trajectories_per_task"],
        max_in_flight=plan["val_max_concurrent_trajectories"],
        seed=plan["seed"],
        sampling=_sampling(plan, policy, prefix="val_"),
    )


def update_settings(plan: ResolvedPlan) -> UpdateSettings:
    """The loss."""
    return UpdateSettings(
        level="sequence" if plan["algorithm"] == "gspo" else "token",
        clip_low=plan["clip_low"],
        clip_high=plan["clip_high"],
        kl_beta=plan["kl_beta"],
        temperature=plan["temperature"],
        max_grad_norm=plan["max_grad_norm"],
    )


def loop_settings(plan: ResolvedPlan) -> LoopSettings:
    """Schedule and cadence."""
    return LoopSettings(
        start_step=plan.start_step,
        total_steps=plan.total_steps,
        learning_rate=plan["learning_rate"],
        lr_warmup_steps=plan["lr_warmup_steps"],
        lr_hold_steps=plan["lr_hold_steps"],
        lr_min_ratio=plan["lr_min_ratio"],
        val_enabled=plan["val_enabled"],
        val_interval=plan["val_interval_steps"],
        checkpoint_interval=plan["checkpoint_interval_steps"],
        val_final_seconds=float(plan["val_final_wait_timeout_seconds"]),
    )


def _sampling(plan: ResolvedPlan, policy: Policy, *, prefix: str) -> Sampling:
    base = Sampling(
        max_new_tokens=plan[f"{prefix}max_output_tokens_per_turn"],
        max_trajectory_tokens=plan[f"{prefix}max_output_tokens_per_trajectory"],
        max_context=plan.base_model.max_context,
        temperature=float(plan[f"{prefix}temperature"]),
        timeout=float(plan[f"{prefix}trajectory_timeout_seconds"]),
        max_turns=plan[f"{prefix}max_turns_per_trajectory"],
    )
    return with_model_defaults(
        base,
        top_p=plan[f"{prefix}top_p"],
        top_k=plan[f"{prefix}top_k"],
        model=policy.generation_defaults,
    )
