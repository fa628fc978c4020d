"""One attempt of a run, from its resolved plan to its outcome."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from accelerate import Accelerator

from nbtrain.catalog import Catalog, tokenizer_digest
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
from nbtrain.training.control import Cancelled, Control
from nbtrain.training.loop import Ending, Loop, LoopState, environment
from nbtrain.training.outcome import Outcome, outcome_path
from nbtrain.training.policy import Policy, load_tokenizer
from nbtrain.training.prepare_model import weights_folder
from nbtrain.training.record import StoreRecorder
from nbtrain.training.start_checks import view_tasks
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
        with _sole_writer(folder):
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
        traceback.print_exc()
        outcome = Outcome("failed", failure=_sentence(error))
    log.info("attempt %d: %s", attempt, outcome)
    outcome.write(path)
    return 1 if outcome.result == "failed" else 0


@dataclass(slots=True)
class _Parts:
    """What start-up made ready."""

    policy: Policy
    sampler: RaggedSampler
    rollouts: Rollouts
    train: list[TaskView]
    held_out: list[TaskView]


class Job:
    """Puts a run together and runs its loop."""

    def __init__(self, store: Store, run: StoredRun, attempt: int) -> None:
        self._store = store
        self._run = run
        self._attempt = attempt
        self._plan = ResolvedPlan.from_json(run.resolved)
        self._folder = store.run_folder(run.run_id)
        self._writer = RunWriter(store, run.key, attempt)
        self._tokenizer_fingerprint = ""
        self._control = Control(
            self._writer.unhandled_commands,
            self._writer.handled,
            lambda: store.heartbeat(run.key, attempt, "rank"),
        )

    def run(self) -> Ending:
        """Start up, check, train. Raises :class:`Cancelled` when stopped."""
        self._control.listen_for_sigterm()
        device = _device()
        with ExitStack() as stack:
            parts = self._start(device, stack)
            loop = self._loop(parts)
            self._move(Phase.TRAINING, self._restore(loop))
            ending = loop.run()
            self._move(Phase.RECORDING)
        return ending

    def _move(self, phase: Phase, message: str | None = None) -> None:
        """Enter a phase. An attempt that may not has been stopped or replaced meanwhile."""
        moved = self._store.move_phase(self._run.key, phase, attempt=self._attempt, message=message)
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
        split = workload.split(validation=plan["val_enabled"])

        def render(prompt: Any) -> tuple[int, ...]:
            return render_prompt(tokenizer, prompt, raw=workload.raw)

        context = plan.base_model.max_context
        train, more = view_tasks(split.train_tasks, render, max_context=context, side="training")
        problems += more
        held_out, more = view_tasks(
            split.held_out_tasks, render, max_context=context, side="held-out"
        )
        problems += more
        rewards = stack.enter_context(
            RewardPool(
                workload.rewards_path,
                workers=min(os.cpu_count() or 1, 4),
                timeout_seconds=plan["reward_timeout_seconds"],
                log_path=self._folder / "logs" / "rewards.log",
            )
        )
        policy = setup.load_policy(plan, folder, device)
        stops = end_ids(policy.model.generation_config, tokenizer)
        sampler = RaggedSampler(
            policy.model,
            slots=max(plan["max_concurrent_trajectories"], plan["val_max_concurrent_trajectories"]),
            eos_ids=stops,
            pad_id=tokenizer.pad_token_id,
            max_context=context,
            kv_budget_bytes=_kv_budget(device),
        )
        chat = not workload.raw and tokenizer.chat_template is not None
        rollouts = Rollouts(
            sampler,
            rewards,
            lambda ids: decode_completion(tokenizer, ids, stops),
            chat=chat,
            tick=self._control,
        )
        parts = _Parts(policy, sampler, rollouts, train, held_out)
        if train:
            problems += self._try_reward(parts, rewards, chat=chat)
        if problems:
            raise StartChecksFailed(problems)
        return parts

    def _same_model(self, folder: Path) -> list[Problem]:
        """The folder's files are still those that the plan was checked with."""
        planned = self._plan.base_model
        self._tokenizer_fingerprint = tokenizer_digest(folder)
        if planned.kind not in ("embedded", "folder"):
            return []  # converted or downloaded under its fingerprint
        found = Catalog(self._store).base_model(planned.location).fingerprint
        if found == planned.fingerprint:
            return []
        message = f"the base model's files have changed since the plan was checked: {folder}"
        allowed = f"fingerprint {planned.fingerprint[:12]}"
        return [Problem("base_model_slug", message, found=found[:12], allowed=allowed)]

    def _try_reward(self, parts: _Parts, rewards: RewardPool, *, chat: bool) -> list[Problem]:
        """Sample one group and score it in the real worker process."""
        task = parts.train[0]
        group = Group(0, 0, task.task_id, 0)
        streams = [(self._plan["seed"], TRIAL_STREAM, k) for k in range(self._plan["group_size"])]
        sampling = setup.training_sampling(self._plan, parts.policy)
        texts = parts.rollouts.sample_only(group, task, streams, sampling)
        request = GradeRequest(
            prompt=task.prompt,
            completions=texts,
            columns=task.columns,
            raw=not chat,
            task_id=task.task_id,
        )
        tried = trial(rewards, request)
        for warning in tried.warnings:
            log.warning("start check: %s", warning)
        return tried

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
            run_key=self._run.key,
            identity={
                "run_id": self._run.run_id,
                "attempt": self._attempt,
                "base_model_slug": plan.base_model.slug,
                "base_fingerprint": plan.base_model.fingerprint,
                "tokenizer_fingerprint": self._tokenizer_fingerprint,
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
        )

    def _restore(self, loop: Loop) -> str | None:
        """Go on from the parent checkpoint; says what was restored."""
        parent = self._plan.parent
        if parent is None:
            return None
        weights_only = self._plan["load_weights_only"]
        loaded = checkpoints.load(
            Path(parent.path),
            base_fingerprint=self._plan.base_model.fingerprint,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            training_state=not weights_only,
        )
        if loaded.state is None or loaded.optimizer is None:
            loop.load_weights(loaded.adapter)
            return "restored weights only: fresh optimizer, schedule and data order"
        loop.load_state_dict(LoopState(loaded.state, loaded.adapter, loaded.optimizer))
        return certificate(loop, loaded.state)


def certificate(loop: Loop, state: dict[str, Any]) -> str:
    """What a resume restored, from where to where, and the rate before and after."""
    settings = loop.settings
    before = state["schedule"]["learning_rate"]
    after = settings.rate(loop.step + 1)
    changed = [
        f"{name} {state['environment'].get(name)} -> {value}"
        for name, value in environment().items()
        if state["environment"].get(name) != value
    ]
    text = (
        f"restored adapter, optimizer ({loop.updates} updates), schedule, random state and data "
        f"position: step {loop.step} to {settings.total_steps}, "
        f"{settings.total_steps - loop.step} updates, learning rate {before:.3g} -> {after:.3g}"
    )
    return f"{text}; not exact: {', '.join(changed)}" if changed else f"{text}; exact"


def _device() -> torch.device:
    """The rank's device, by Accelerate; several ranks are refused until they are built."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected or expected != 1:
        raise StartChecksFailed(
            [
                Problem(
                    field="world size",
                    message=f"{accelerator.num_processes} processes started, {expected} expected",
                    found=accelerator.num_processes,
                    allowed="1 (several ranks are not built yet)",
                )
            ]
        )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device(accelerator.device)


def _kv_budget(device: torch.device) -> int:
    """Bytes that keys and values may take: a third of what is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 3
    return int(psutil.virtual_memory().available) // 3


class _sole_writer:  # noqa: N801
    """Holds the run folder's lock: one writer per run folder, for as long as it writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "writer.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        for _ in range(50):  # a killed predecessor's children may take a moment to go
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return
        msg = f"another process is writing to {self._path.parent.name}"
        raise NbtrainError(msg)

    def __exit__(self, *exc: object) -> None:
        assert self._file is not None
        self._file.close()


def _sentence(error: Exception) -> str:
    """The first line of a failure, for the person who started the run."""
    if isinstance(error, NbtrainError):
        return str(error)
    if isinstance(error, OSError) and error.errno == 28:
        return f"the disk is full: {error}"
    return f"{type(error).__name__}: {error}"
