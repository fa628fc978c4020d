"""Starting a run up: load everything, run the start checks, say all that is wrong at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from nbtrain.catalog import Catalog, tokenizer_digest
from nbtrain.catalog.thinking import template_arguments
from nbtrain.environments import EnvironmentPool
from nbtrain.errors import Problem, Refused, StartChecksFailed
from nbtrain.plan import defaults
from nbtrain.plan.checks import Check
from nbtrain.plan.memory import PROMPT_TOKENS, Memory, memory_of, memory_problem
from nbtrain.plan.preflight import longest_reply
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rewards.pool import RewardPool
from nbtrain.rollout.conversation import ChatConversation, tool_schemas
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.ranks import Ranks
from nbtrain.rollout.tokens import decode_completion, end_ids
from nbtrain.rollout.types import Conversation, TaskView
from nbtrain.store import Store
from nbtrain.training import checkpoints, setup
from nbtrain.training.base_files import base_folder, loading
from nbtrain.training.control import Control, FollowerControl
from nbtrain.training.environment import (
    describe,
    emulated,
    free_memory,
    kv_budget,
    worker_count,
)
from nbtrain.training.policy import Policy, load_tokenizer
from nbtrain.training.samplers import Making
from nbtrain.training.start_checks import (
    adapter_check,
    memory_checks,
    overlap,
    prompt_check,
    read_back_check,
    view_tasks,
)
from nbtrain.training.trial import Trial
from nbtrain.training.warm_start import load_warm_start, starts_warm
from nbtrain.training.work import Tasks, Work, work_of

__all__ = ["Parts", "Starter"]

log = logging.getLogger("nbtrain.training")

_HELD_OUT = "longest_held_out_prompt"
TRIAL_STREAM = 2
"""Random streams of the start check's trial group, apart from training and validation."""


@dataclass(slots=True)
class Parts:
    """What start-up made ready. ``remarks`` are what it has to say that stops nothing."""

    policy: Policy
    flight: Flight
    train: list[TaskView]
    held_out: list[TaskView]
    held_out_conversation: Conversation | None
    tokenizer_fingerprint: str
    environment: dict[str, Any]
    memory: Memory | None = None
    remarks: list[str] = field(default_factory=list)


class Starter:
    """Makes the parts of a run in this rank.

    ``control`` raises when the run is to stop, and is told what is being done. ``checks`` are
    what the start checks have measured so far, whether they let the run start or not.
    """

    def __init__(
        self,
        store: Store,
        plan: ResolvedPlan,
        folder: Path,
        *,
        ranks: Ranks,
        device: torch.device,
        control: Control | FollowerControl,
    ) -> None:
        self._store = store
        self._plan = plan
        self._folder = folder
        self._ranks = ranks
        self._device = device
        self._control = control
        self.checks: list[Check] = []
        self._problems: list[Problem] = []
        self._remarks: list[str] = []

    def start(self, stack: ExitStack) -> Parts:
        """Load everything and run the start checks.

        Worker processes are closed with ``stack``. Raises :class:`StartChecksFailed` with all
        that is wrong, on every rank alike.
        """
        plan = self._plan
        self._doing("loading the tasks and what is called on them")
        folder, self._problems = base_folder(self._store, plan)
        try:
            work = work_of(self._store, plan, self._folder, rank=self._ranks.rank)
        except Refused as error:
            raise StartChecksFailed([*self._problems, *error.problems]) from error
        workload = work.tasks
        if folder is None or self._problems:
            self._without_model(folder, work)
        budget = kv_budget(self._device, self._parent_environment(), ranks=self._ranks.size)
        memory = self._check_memory(budget, turns=workload.environment_path is not None)
        with loading(plan, "the tokenizer"):
            tokenizer = load_tokenizer(folder)
        rewards = stack.enter_context(self._rewards(workload))
        environments = self._environments(workload, stack)
        self._doing("loading the model")
        ready = self._model(folder, tokenizer)
        self._control()
        if ready is None:
            self._without_model(folder, work)
        policy, ends = ready
        self._doing("rendering the prompts")
        talks = self._talks(workload, tokenizer, environments, ends, policy.model.config.model_type)
        train, held_out = self._views(work, talks)
        self.checks.append(read_back_check(train, tokenizer.decode))
        if not train:
            raise StartChecksFailed(self._problems)
        self._control()
        prompts = max(len(view.prompt_ids) for view in [*train, *held_out])
        self._doing("starting the sampler")
        making = Making(
            plan,
            policy,
            folder,
            self._folder,
            ends,
            tokenizer.pad_token_id,
            kv_budget_bytes=budget,
            ranks=self._ranks.size,
        )
        sampler = making.make(stack, prompt_tokens=prompts, turns=environments is not None)
        self._problems += making.problems
        for remark in making.remarks:
            self._remark(remark)
        if sampler is None or (environments is not None and self._problems):
            raise StartChecksFailed(self._problems)
        flight = Flight(
            sampler,
            rewards,
            lambda ids: decode_completion(tokenizer, ids, ends),
            chat=not workload.raw and tokenizer.chat_template is not None,
            environments=environments,
            conversation=talks[0],
            tick=self._control,
        )
        self._try(
            lambda: Trial(flight, rewards, environments, talks[0], self._says, self._control),
            policy,
            train,
        )
        self._control.activity = lambda: None
        problems = [p for one in self._ranks.gather(self._problems) for p in one]
        if problems:
            raise StartChecksFailed(list(dict.fromkeys(problems)))
        return Parts(
            policy,
            flight,
            train,
            held_out,
            talks[1],
            tokenizer_digest(folder),
            describe(
                self._device,
                precision=plan["precision"],
                kv_budget_bytes=budget,
                ranks=self._ranks.size,
            ),
            memory,
            self._remarks,
        )

    def _rewards(self, workload: Tasks) -> RewardPool:
        return RewardPool(
            workload.rewards_path,
            workers=self._workers("reward_workers", defaults.MOST_REWARD_WORKERS),
            timeout_seconds=self._plan["reward_timeout_seconds"],
            log_path=self._folder / "logs" / self._log("rewards"),
        )

    def _workers(self, option: str, most: int) -> int:
        return worker_count(self._plan[option], most=most, ranks=self._ranks.size)

    def _check_memory(self, budget: int, *, turns: bool) -> Memory | None:
        """What the plan needs, compared with what is free before any of it is taken."""
        plan = self._plan
        model = Catalog(self._store).base_model(plan.base_model.slug)
        longest = longest_reply(plan, model, turns=turns)
        memory = memory_of(plan, model, longest=longest, prompt_tokens=PROMPT_TOKENS)
        free = free_memory(self._device, ranks=self._ranks.size)
        self.checks += memory_checks(memory, free)
        found = memory_problem(memory, free, kv_bytes=budget)
        if isinstance(found, Problem):
            raise StartChecksFailed([*self._problems, found])
        if found is not None:
            self._remark(found)
        return memory

    def _environments(self, workload: Tasks, stack: ExitStack) -> EnvironmentPool | None:
        """The tasks' environments, where they have any, after one of them has been made."""
        if workload.environment_path is None:
            return None
        plan = self._plan
        stated = plan["environment_workers"]
        total = stated or min(
            defaults.MOST_ENVIRONMENT_WORKERS, plan["max_concurrent_trajectories"]
        )
        pool = stack.enter_context(
            EnvironmentPool(
                workload.environment_path,
                workers=max(1, total // self._ranks.size),
                log_path=self._folder / "logs" / self._log("environments"),
            )
        )
        problem = pool.check_start()
        if problem is not None:
            raise StartChecksFailed([*self._problems, problem])
        return pool

    def _talks(
        self,
        workload: Tasks,
        tokenizer: Any,
        environments: EnvironmentPool | None,
        ends: Sequence[int],
        family: str,
    ) -> tuple[ChatConversation, ChatConversation]:
        """How messages become ids, in training and in validation."""
        tools: list[dict[str, Any]] = []
        if environments is not None:
            tools, problems = tool_schemas(environments.contract.tools)
            self._problems += problems
        template = tokenizer.chat_template
        talks = [
            ChatConversation(
                tokenizer,
                tools=tools,
                ends=ends,
                raw=workload.raw,
                template_kwargs=template_arguments(template, self._plan[effort], family),
            )
            for effort in ("reasoning_effort", "val_reasoning_effort")
        ]
        if environments is not None:
            problems, remarks = talks[0].check()
            self._problems += problems
            for remark in remarks:
                self._remark(remark)
        return talks[0], talks[1]

    def _log(self, name: str) -> str:
        return f"{name}{self._ranks.rank or ''}.log"

    def _without_model(self, folder: Path | None, work: Work) -> NoReturn:
        """All that can be said of the tasks where the model is not the plan's: its problems too."""
        if folder is not None:
            try:
                with loading(self._plan, "the tokenizer"):
                    tokenizer = load_tokenizer(folder)
            except StartChecksFailed as error:
                self._problems += error.problems
            else:
                self._views(work, self._talks(work.tasks, tokenizer, None, (), ""))
        raise StartChecksFailed(self._problems)

    def _views(
        self, work: Work, talks: tuple[ChatConversation, ChatConversation]
    ) -> tuple[list[TaskView], list[TaskView]]:
        """Both sides' tasks as ids."""
        plan, context = self._plan, setup.context_of(self._plan)
        try:
            split = work.tasks.split(validation=plan["val_enabled"])
        except Refused as error:
            self._problems += error.problems
            return [], []
        if split.train_digest != plan.workload.train_digest:
            message = "the tasks are not those that the plan was checked with"
            self._problems.append(Problem("workload", message))
        sides = []
        tasks = (("training", split.train_tasks), ("held-out", split.held_out_tasks))
        for (side, rows), talk in zip(tasks, talks, strict=True):
            views, more = view_tasks(
                rows,
                talk.prompt,
                max_context=context,
                side=side,
                least_reply=work.least_reply,
                field=work.field,
                place=work.place,
            )
            self._problems += more
            if rows:
                check = prompt_check(views, more, context - work.least_reply)
                self.checks.append(check if side == "training" else replace(check, name=_HELD_OUT))
            sides.append(views)
        self._problems += overlap(*sides)
        return sides[0], sides[1]

    def _model(self, folder: Path, tokenizer: Any) -> tuple[Policy, tuple[int, ...]] | None:
        """Policy and end ids; ``None`` when the model cannot be had, and that is noted."""
        try:
            with loading(self._plan, "the model"):
                policy = setup.load_policy(self._plan, folder, self._device)
            pattern = self._plan["lora_target_modules"]
            self.checks.append(adapter_check(policy.model, pattern))
            if (model := starts_warm(self._plan)) is not None:
                load_warm_start(self._store, self._plan, model, policy)
        except StartChecksFailed as error:
            self._problems += error.problems
            if any(problem.field == "lora_target_modules" for problem in error.problems):
                self.checks.append(adapter_check(None, self._plan["lora_target_modules"]))
            return None
        remark = emulated(self._plan["precision"], self._device)
        if remark is not None:
            self._remark(remark)
        return policy, tuple(end_ids(policy.model.generation_config, tokenizer))

    def _try(self, make: Callable[[], Trial], policy: Policy, tasks: Sequence[TaskView]) -> None:
        """One group, in the real processes of environments and rewards.

        A task that gets no grade may be a bad one: then another is tried, two more at most.
        """
        size, seed = self._plan["group_size"], self._plan["seed"]
        streams = [(seed, TRIAL_STREAM, sample) for sample in range(size)]
        for place in sorted({0, len(tasks) // 2, len(tasks) - 1}):
            trial = make()
            trial.run(tasks[place], streams, setup.training_sampling(self._plan, policy))
            if not trial.ungraded or self._problems:
                break
        self._problems += trial.problems
        self.checks += trial.checks
        for remark in trial.remarks:
            self._remark(remark)

    def _doing(self, what: str) -> None:
        self._control.doing(f"start checks: {what}", now=True)

    def _says(self, what: str) -> None:
        self._control.doing(f"start checks: {what}")

    def _remark(self, text: str) -> None:
        log.warning("start check: %s", text)
        self._remarks.append(text)

    def _parent_environment(self) -> dict[str, Any] | None:
        """Where the parent's checkpoint was saved; it is verified when it is loaded."""
        parent = self._plan.parent
        if parent is None or self._plan["load_weights_only"]:
            return None
        try:
            state = json.loads((Path(parent.path) / checkpoints.STATE).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        found: dict[str, Any] = state.get("environment", {})
        return found
