"""From the resolved plan to what each part of the job needs: the only place that reads both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from nbtrain.plan import defaults
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.admission import AS_GRADED, AdmissionRules
from nbtrain.rollout.budgets import Budgets
from nbtrain.rollout.collector import CollectorSettings
from nbtrain.rollout.limits import Sampling, with_model_defaults
from nbtrain.training.loop import LoopSettings
from nbtrain.training.packing import DEFAULT
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


def context_of(plan: ResolvedPlan) -> int:
    """Most tokens of a trajectory, its prompt included: the model's, or the plan's own limit."""
    own: int | None = plan.options.get("max_seq_length")
    return min(plan.base_model.max_context, own or plan.base_model.max_context)


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
        rules=_rules(plan),
        sampling=training_sampling(plan, policy),
        max_staleness=plan["max_staleness"],
        budgets=_token_budgets(plan),
        most_ungraded=_most_ungraded(plan),
    )


def _rules(plan: ResolvedPlan) -> AdmissionRules:
    if plan.admission == "as_graded":
        return AS_GRADED
    return AdmissionRules(
        min_trajectories=plan["min_trajectories_per_group"],
        train_on_truncation=plan["train_on_truncation"],
        train_on_timeout=plan["train_on_timeout"],
        train_on_error=plan["train_on_error"],
        train_on_all_fail=plan["train_on_all_fail"],
        train_on_all_pass=plan["train_on_all_pass"],
        train_on_zero_advantage=plan["train_on_zero_advantage"],
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
        layout=replace(DEFAULT, sequences=plan.options.get("micro_batch_sequences")),
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
        door=plan.door,
    )


def _sampling(plan: ResolvedPlan, policy: Policy, *, prefix: str) -> Sampling:
    base = Sampling(
        max_new_tokens=plan[f"{prefix}max_output_tokens_per_turn"],
        max_trajectory_tokens=plan[f"{prefix}max_output_tokens_per_trajectory"],
        max_context=context_of(plan),
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
