"""One attempt of a supervised run, from its resolved plan to its ending."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from transformers.utils import logging as transformers_logging

from nbtrain.errors import NbtrainError, StartChecksFailed
from nbtrain.plan.phases import Phase
from nbtrain.plan.supervised_memory import SupervisedMemory
from nbtrain.rollout.ranks import Ranks
from nbtrain.store import Store, StoredRun
from nbtrain.training.base_job import BaseJob
from nbtrain.training.control import Control, FollowerControl
from nbtrain.training.environment import describe
from nbtrain.training.exhausted import is_exhausted
from nbtrain.training.loop import Ending
from nbtrain.training.models import register_newest
from nbtrain.training.outcome import attempt_folder
from nbtrain.training.partials import ROWS, TRAINER, clear_scratch
from nbtrain.training.ranks import join_ranks
from nbtrain.training.record import insist
from nbtrain.training.supervised.exhausted import sentence
from nbtrain.training.supervised.loop import SupervisedLoop
from nbtrain.training.supervised.preparing import Preparation, Prepared, naming
from nbtrain.training.supervised.recording import SupervisedRecorder
from nbtrain.training.supervised.restoring import restore, total_steps
from nbtrain.training.supervised.smoke import SmokeCheck, ending_of, without_validation

__all__ = ["SupervisedJob"]

log = logging.getLogger("nbtrain.training")


class SupervisedJob(BaseJob):
    """Tokenizes, checks, trains and records; rank 0 alone moves phases and writes."""

    def __init__(self, store: Store, run: StoredRun, attempt: int) -> None:
        super().__init__(store, run, attempt)
        self._plan = without_validation(self._plan)

    def run(self) -> Ending:
        """Start up, check, train. Raises :class:`Cancelled` when stopped."""
        transformers_logging.disable_progress_bar()
        ranks, device = join_ranks(self._folder, self._attempt)
        control = self._control(ranks)
        own = attempt_folder(self._folder, self._attempt)
        try:
            return self._start(ranks, device, control, own)
        finally:
            if ranks.rank == 0:
                clear_scratch(self._folder, self._attempt)

    def _start(
        self,
        ranks: Ranks,
        device: torch.device,
        control: Control | FollowerControl,
        own: Path,
    ) -> Ending:
        self._move(ranks, Phase.PREPARING, "reading the dataset")
        ready = self._prepare(ranks, device, control, own / ROWS)
        with closing(ready):
            return self._train(ready, ranks, device, control, own / TRAINER)

    def _train(
        self,
        ready: Prepared,
        ranks: Ranks,
        device: torch.device,
        control: Control | FollowerControl,
        folder: Path,
    ) -> Ending:
        environment = self._environment(device, ranks)
        total = total_steps(self._plan, ready)
        with self._memory_told(lambda: ready.memory):
            restored, optimizer = restore(
                *(self._store, self._plan, ready),
                total=total,
                ranks=ranks.size,
                environment=environment,
            )
        if ready.problems:
            raise StartChecksFailed(ready.problems)
        if total != self._plan.total_steps and ranks.rank == 0:
            insist(lambda: self._store.set_total_steps(self._run.key, total))
        smoke = self._smoke(ready, ranks, device, control)
        loop = SupervisedLoop(
            self._plan,
            ready,
            total_steps=total,
            folder=folder,
            recorder=None if ranks.rank else self._recorder(ready),
            ranks=ranks,
            environment=environment,
            tick=control,
            optimizer=optimizer,
            until=smoke.until if smoke is not None else lambda step: False,
        )
        control.listen_for_sigterm()
        self._move(ranks, Phase.TRAINING, "; ".join(filter(None, [restored, *ready.remarks])))
        gc.collect()
        gc.freeze()
        control.activity = lambda: (smoke and smoke.activity) or loop.activity()
        ending = loop.run()
        self._move(ranks, Phase.RECORDING)
        if ranks.rank == 0 and ending.failure is None:
            insist(lambda: register_newest(self._store, self._run, self._plan))
        return ending if smoke is None else self._judged(smoke, ending, ranks)

    def _smoke(
        self,
        ready: Prepared,
        ranks: Ranks,
        device: torch.device,
        control: Control | FollowerControl,
    ) -> SmokeCheck | None:
        if self._plan.smoke is None:
            return None
        return SmokeCheck(self._store, self._plan, ready, ranks=ranks, device=device, tick=control)

    def _judged(self, smoke: SmokeCheck, ending: Ending, ranks: Ranks) -> Ending:
        """The ending with the verdict, which is kept."""
        verdict = smoke.verdict()
        if ranks.rank == 0:
            insist(lambda: self._store.put_verdict(self._run.key, verdict))
        return ending if ending.failure is not None else Ending(ended=ending_of(verdict))

    def _prepare(
        self,
        ranks: Ranks,
        device: torch.device,
        control: Control | FollowerControl,
        scratch: Path,
    ) -> Prepared:
        preparation = Preparation(
            self._store,
            self._plan,
            scratch,
            ranks=ranks,
            device=device,
            says=control.doing,
            tick=control,
        )
        with self._memory_told(lambda: preparation.memory):
            ready = preparation.run()
        self._keep(ready.checks, ranks)
        for check in ready.checks:
            log.info("start check %s %s: %s", check.name, check.verdict, check.said)
            if check.verdict == "warned":
                ready.remarks.append(f"{check.name}: {check.said}")
        return ready

    @contextmanager
    def _memory_told(self, expected: Callable[[], SupervisedMemory | None]) -> Iterator[None]:
        """Say what to lower where memory runs out before the first update."""
        try:
            yield
        except Exception as error:
            if not is_exhausted(error):
                raise
            said = sentence(
                error,
                part="preparation",
                step=0,
                plan=self._plan,
                expected=expected(),
                saved=None,
                name=naming(self._plan),
            )
            raise NbtrainError(said) from error

    def _environment(self, device: torch.device, ranks: Ranks) -> dict[str, Any]:
        found = describe(
            device, precision=self._plan["precision"], kv_budget_bytes=0, ranks=ranks.size
        )
        return found | {"trl": trl.__version__}

    def _recorder(self, ready: Prepared) -> SupervisedRecorder:
        plan = self._plan
        assert ready.model is not None
        return SupervisedRecorder(
            self._store,
            self._writer,
            self._folder,
            ready.model,
            keep=plan["keep_adapters"],
            identity={
                "run_id": self._run.run_id,
                "attempt": self._attempt,
                "base_model_slug": plan.base_model.slug,
                "base_fingerprint": plan.base_model.fingerprint,
                "tokenizer_fingerprint": ready.tokenizer_fingerprint,
                "workload_id": plan.workload.workload_id,
                "config_hash": plan.config_hash,
            },
        )
