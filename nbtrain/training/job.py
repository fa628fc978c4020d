"""One attempt of a run, from its resolved plan to its outcome."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtrain.catalog import Catalog, Workload, tokenizer_digest
from nbtrain.errors import NbtrainError, Problem, StartChecksFailed
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rewards.contract import GradeRequest
from nbtrain.rewards.pool import RewardPool
from nbtrain.rewards.trials import trial
from nbtrain.rollout.collector import Collector
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.rollouts import Rollouts
from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt
from nbtrain.rollout.types import Group, TaskView
from nbtrain.store import RunWriter, Store, StoredRun, open_store
from nbtrain.training import checkpoints, setup
from nbtrain.training.certificate import certificate
from nbtrain.training.control import Cancelled, Control
from nbtrain.training.environment import describe, emulated, kv_budget, rank_device
from nbtrain.training.lock import sole_writer
from nbtrain.training.loop import Ending, Loop, LoopState
from nbtrain.training.outcome import Outcome, outcome_path
from nbtrain.training.policy import Policy, load_tokenizer
from nbtrain.training.prepare_model import weights_folder
from nbtrain.training.record import StoreRecorder, insist
from nbtrain.training.start_checks import overlap, view_tasks
from nbtrain.training.update import Updater
from nbtrain.training.validation import Validator

log = logging.getLogger("nbtrain.training")

TRIAL_STREAM = 2
"""Random streams of the start check's trial group, apart from training and validation."""


def run_attempt(run_id: str, attempt: int) -> int:
    """Train, and leave an outcome for the host whatever happens. Returns the exit code."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    store = open_store()
    run = store.find_run(run_id)
    folder = store.run_folder(run.run_id)
    path = outcome_path(folder, attempt)
    try:
        with sole_writer(folder):
            ending = Job(store, run, attempt).run()
        if ending.failure is not None:
            outcome = Outcome("failed", failure=ending.failure)
        else:
            outcome = Outcome("completed", ended=ending.ended)
    except Cancelled as stop:
        outcome = Outcome("cancelled", ended=str(stop))
    except StartChecksFailed as error:
        outcome = Outcome("failed", failure=str(error))
    except Exception as error:
        outcome = Outcome("failed", failure=_sentence(error))
        with suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
    log.info("attempt %d %s: %s", attempt, outcome.result, outcome.failure or outcome.ended or "")
    insist(lambda: outcome.write(path))
    return 1 if outcome.result == "failed" else 0


@dataclass(slots=True)
class _Parts:
    """What start-up made ready."""

    policy: Policy
    sampler: RaggedSampler
    rollouts: Rollouts
    train: list[TaskView]
    held_out: list[TaskView]
    tokenizer_fingerprint: str
    environment: dict[str, Any]


class Job:
    """Puts a run together and runs its loop."""

    def __init__(self, store: Store, run: StoredRun, attempt: int) -> None:
        self._store = store
        self._run = run
        self._attempt = attempt
        self._plan = ResolvedPlan.from_json(run.resolved)
        self._folder = store.run_folder(run.run_id)
        self._writer = RunWriter(store, run.key, attempt)
        self._remarks: list[str] = []
        self._control = Control(
            self._writer.unhandled_commands,
            self._writer.handled,
            lambda: store.heartbeat(run.key, attempt, "rank"),
        )

    def run(self) -> Ending:
        """Start up, check, train. Raises :class:`Cancelled` when stopped."""
        self._control.listen_for_sigterm()
        device = rank_device()
        with ExitStack() as stack:
            parts = self._start(device, stack)
            loop = self._loop(parts)
            restored = self._restore(loop, parts)
            self._move(Phase.TRAINING, "; ".join([*filter(None, [restored]), *self._remarks]))
            ending = loop.run()
            self._move(Phase.RECORDING)
        return ending

    def _move(self, phase: Phase, message: str = "") -> None:
        """Enter a phase. An attempt that may not has been stopped or replaced meanwhile."""
        moved = self._store.move_phase(
            self._run.key, phase, attempt=self._attempt, message=message or None
        )
        if not moved:
            msg = f"the run may not enter {phase}: it has been stopped"
            raise Cancelled(msg)

    def _start(self, device: torch.device, stack: ExitStack) -> _Parts:
        """Load everything and run the start checks; all that is wrong is raised at once."""
        plan = self._plan
        folder = weights_folder(plan, self._store.home)
        problems = self._same_model(folder)
        tokenizer = load_tokenizer(folder)
        workload = Catalog(self._store).workload(plan.workload.workload_id)
        train, held_out = self._views(workload, tokenizer, problems)
        rewards = stack.enter_context(
            RewardPool(
                workload.rewards_path,
                workers=min(os.cpu_count() or 1, 4),
                timeout_seconds=plan["reward_timeout_seconds"],
                log_path=self._folder / "logs" / "rewards.log",
            )
        )
        budget = kv_budget(device, self._parent_environment())
        ready = self._model(folder, tokenizer, device, budget, problems)
        if ready is None or not train:
            raise StartChecksFailed(problems)
        policy, sampler, stops = ready
        chat = not workload.raw and tokenizer.chat_template is not None
        rollouts = Rollouts(
            sampler,
            rewards,
            lambda ids: decode_completion(tokenizer, ids, stops),
            chat=chat,
            tick=self._control,
        )
        problems += self._try_reward(policy, rollouts, rewards, train[0], chat=chat)
        if problems:
            raise StartChecksFailed(problems)
        return _Parts(
            policy,
            sampler,
            rollouts,
            train,
            held_out,
            tokenizer_digest(folder),
            describe(device, precision=plan["precision"], kv_budget_bytes=budget),
        )

    def _same_model(self, folder: Path) -> list[Problem]:
        """The folder's files are still those that the plan was checked with."""
        planned = self._plan.base_model
        if planned.kind not in ("embedded", "folder"):
            return []  # converted or downloaded under its fingerprint
        found = Catalog(self._store).base_model(planned.location).fingerprint
        if found == planned.fingerprint:
            return []
        message = f"the base model's files have changed since the plan was checked: {folder}"
        allowed = f"fingerprint {planned.fingerprint[:12]}"
        return [Problem("base_model_slug", message, found=found[:12], allowed=allowed)]

    def _views(
        self, workload: Workload, tokenizer: Any, problems: list[Problem]
    ) -> tuple[list[TaskView], list[TaskView]]:
        """Both sides' tasks as ids; adds what is wrong with them to ``problems``."""
        split = workload.split(validation=self._plan["val_enabled"])
        if split.train_digest != self._plan.workload.train_digest:
            message = "the workload's tasks are not those that the plan was checked with"
            problems.append(Problem("workload", message))

        def render(prompt: Any) -> tuple[int, ...]:
            return tuple(render_prompt(tokenizer, prompt, raw=workload.raw))

        context = self._plan.base_model.max_context
        sides = []
        for side, tasks in (("training", split.train_tasks), ("held-out", split.held_out_tasks)):
            views, more = view_tasks(tasks, render, max_context=context, side=side)
            problems += more
            sides.append(views)
        problems += overlap(*sides)
        return sides[0], sides[1]

    def _model(
        self,
        folder: Path,
        tokenizer: Any,
        device: torch.device,
        budget: int,
        problems: list[Problem],
    ) -> tuple[Policy, RaggedSampler, tuple[int, ...]] | None:
        """Policy, sampler and end ids; ``None`` with what is wrong added to ``problems``."""
        plan = self._plan
        try:
            policy = setup.load_policy(plan, folder, device)
            stops = tuple(end_ids(policy.model.generation_config, tokenizer))
            sampler = RaggedSampler(
                policy.model,
                slots=max(
                    plan["max_concurrent_trajectories"], plan["val_max_concurrent_trajectories"]
                ),
                eos_ids=stops,
                pad_id=tokenizer.pad_token_id,
                max_context=plan.base_model.max_context,
                kv_budget_bytes=budget,
            )
        except StartChecksFailed as error:
            problems += error.problems
            return None
        except ValueError as error:
            problems.append(Problem("base_model_slug", f"the model cannot be sampled: {error}"))
            return None
        remark = emulated(plan["precision"], device)
        if remark is not None:
            self._remark(remark)
        return policy, sampler, stops

    def _try_reward(
        self,
        policy: Policy,
        rollouts: Rollouts,
        rewards: RewardPool,
        task: TaskView,
        *,
        chat: bool,
    ) -> list[Problem]:
        """Sample one group and score it in the real worker process."""
        group = Group(0, 0, task.task_id, 0)
        streams = [(self._plan["seed"], TRIAL_STREAM, k) for k in range(self._plan["group_size"])]
        sampling = setup.training_sampling(self._plan, policy)
        request = GradeRequest(
            prompt=task.prompt,
            completions=rollouts.sample_only(group, task, streams, sampling),
            columns=task.columns,
            raw=not chat,
            task_id=task.task_id,
        )
        tried = trial(rewards, request)
        for warning in tried.warnings:
            self._remark(warning)
        return tried

    def _remark(self, text: str) -> None:
        log.warning("start check: %s", text)
        self._remarks.append(text)

    def _loop(self, parts: _Parts) -> Loop:
        plan = self._plan
        updater = Updater(
            parts.policy,
            setup.update_settings(plan),
            weight_decay=plan["weight_decay"],
            tick=self._control,
        )
        collector = Collector(
            parts.train, parts.rollouts, setup.collector_settings(plan, parts.policy)
        )
        validator = None
        if plan["val_enabled"] and parts.held_out:
            validator = Validator(
                parts.held_out, parts.rollouts, setup.validation_settings(plan, parts.policy)
            )
        recorder = StoreRecorder(
            self._store,
            self._writer,
            self._folder,
            parts.policy,
            identity={
                "run_id": self._run.run_id,
                "attempt": self._attempt,
                "base_model_slug": plan.base_model.slug,
                "base_fingerprint": plan.base_model.fingerprint,
                "tokenizer_fingerprint": parts.tokenizer_fingerprint,
                "workload_id": plan.workload.workload_id,
                "config_hash": plan.config_hash,
            },
        )
        return Loop(
            setup.loop_settings(plan),
            policy=parts.policy,
            updater=updater,
            sampler=parts.sampler,
            collector=collector,
            validator=validator,
            recorder=recorder,
            tasks=parts.train,
            environment=parts.environment,
        )

    def _restore(self, loop: Loop, parts: _Parts) -> str | None:
        """Go on from the parent checkpoint; says what was restored."""
        parent = self._plan.parent
        if parent is None:
            return None
        loaded = checkpoints.load(
            Path(parent.path),
            checkpoint_id=parent.checkpoint_id,
            base_fingerprint=self._plan.base_model.fingerprint,
            tokenizer_fingerprint=parts.tokenizer_fingerprint,
            training_state=not self._plan["load_weights_only"],
        )
        if loaded.state is None or loaded.optimizer is None:
            loop.load_weights(loaded.adapter)
            return "restored weights only: fresh optimizer, schedule and data order"
        loop.load_state_dict(LoopState(loaded.state, loaded.adapter, loaded.optimizer))
        before = ResolvedPlan.from_json(self._store.find_run(parent.run_id).resolved)
        return certificate(
            loaded.state,
            total_steps=self._plan.total_steps,
            rate_after=loop.settings.rate(loop.step + 1),
            environment=parts.environment,
            options=self._plan.options,
            parent_options=before.options,
        )

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


def _sentence(error: Exception) -> str:
    """The first line of a failure, for the person who started the run."""
    if isinstance(error, NbtrainError):
        return str(error)
    if "os error 28" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return f"the disk is full: {error}"
    return f"{type(error).__name__}: {error}"
