"""What decodes a run's replies: chosen by its plan, and made."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.decoders import decoder
from nbtrain.rollout.types import Sampler
from nbtrain.training import setup
from nbtrain.training.partials import POLICIES
from nbtrain.training.policy import Policy

__all__ = ["Making"]


@dataclass(slots=True)
class Making:
    """Makes one rank's sampler. ``folder`` holds the base model, ``run_folder`` is the run's.

    ``ends`` are the ids that end a reply, ``kv_budget_bytes`` what keys and values may take. What
    is wrong is in ``problems``, what is only worth knowing in ``remarks``.
    """

    plan: ResolvedPlan
    policy: Policy
    folder: Path
    run_folder: Path
    ends: Sequence[int]
    pad_id: int | None
    kv_budget_bytes: int
    ranks: int
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def make(self, stack: ExitStack, *, prompt_tokens: int, turns: bool) -> Sampler | None:
        """The sampler, for prompts of so many tokens; ``None`` when nothing can decode this model.

        What it leaves on disk goes with ``stack``.
        """
        plan = self.plan
        try:
            if plan["sampler"] == "vllm":
                try:
                    return self._vllm(stack, _longest(plan, prompt_tokens, turns=turns))
                except StartChecksFailed as error:
                    if plan.settings["sampler"].origin == "stated":
                        raise
                    self.remarks.append(f"sampling without vLLM: {error.problems[0].message}")
            return self._own()
        except StartChecksFailed as error:
            self.problems += error.problems
        except ValueError as error:
            message = f"the model cannot be sampled: {error}"
            self.problems.append(Problem("base_model_slug", message))
        return None

    def _own(self) -> Sampler:
        """One of our own; what the plan states is not replaced by the other."""
        plan = self.plan
        stated = plan.settings["sampler"].origin == "stated"
        plain = plan["sampler"] == "generate"
        return decoder(
            self.policy.model,
            kind="generate" if plain else "ragged" if stated else "any",
            slots=_slots(plan, self.ranks),
            eos_ids=self.ends,
            pad_id=self.pad_id,
            max_context=setup.context_of(plan),
            kv_budget_bytes=self.kv_budget_bytes,
        )

    def _vllm(self, stack: ExitStack, longest: int) -> Sampler:
        """An engine of vLLM on the base model; adapters go to it through a folder of the run's.

        ``longest`` are the most tokens that prompt and replies can come to.

        Raises :class:`StartChecksFailed` for settings whose log-probs it cannot give,
        ``ValueError`` for a model that it does not take.
        """
        from nbtrain.rollout.vllm import VllmSampler
        from nbtrain.rollout.vllm_engine import VllmEngine, prepare_process

        plan, policy = self.plan, self.policy
        scratch = self.run_folder / POLICIES
        shutil.rmtree(scratch, ignore_errors=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        on_cpu = policy.device.type == "cpu"
        prepare_process(cpu=on_cpu)
        drawings = [setup.training_sampling(plan, policy)]
        if plan["val_enabled"]:
            drawings.append(setup.validation_settings(plan, policy).sampling)
        engine = VllmEngine(
            self.folder,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[plan["precision"]],
            slots=_slots(plan, 1),
            max_context=longest,
            kv_budget_bytes=self.kv_budget_bytes,
            lora_rank=plan["lora_rank"],
            max_versions=plan["max_staleness"] + 1,
            drawings=drawings,
            seed=plan["seed"],
            eager=on_cpu,
        )
        return VllmSampler(
            engine, eos_ids=self.ends, save_adapter=policy.save_adapter, adapter_folder=scratch
        )


def _longest(plan: ResolvedPlan, prompt: int, *, turns: bool) -> int:
    """Most tokens that a trajectory can come to, what its environment says included."""
    context = setup.context_of(plan)
    if turns:
        return context
    replies: list[int] = [
        min(
            plan[f"{prefix}max_output_tokens_per_turn"],
            plan[f"{prefix}max_output_tokens_per_trajectory"],
        )
        for prefix in ("", "val_")
    ]
    return min(context, prompt + max(replies))


def _slots(plan: ResolvedPlan, ranks: int) -> int:
    """Replies that a rank decodes at a time."""
    training: int = max(1, plan["max_concurrent_trajectories"] // ranks)
    if not plan["val_enabled"]:
        return training
    held_out: int = max(1, plan["val_max_concurrent_trajectories"] // ranks)
    # Ahead of training, a round of validation comes beside what is in flight
    return training + held_out if plan["max_staleness"] else max(training, held_out)
