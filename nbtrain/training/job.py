"""One attempt of a run, from its resolved plan to its ending."""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack
from pathlib import Path

from nbtrain.errors import NbtrainError
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.collector import Collector
from nbtrain.rollout.ranks import Ranks
from nbtrain.training import checkpoints, setup
from nbtrain.training.base_job import BaseJob
from nbtrain.training.certificate import certificate, counted
from nbtrain.training.control import Control, FollowerControl
from nbtrain.training.exhausted import is_exhausted, sentence
from nbtrain.training.history import AdapterHistory
from nbtrain.training.loop import Ending, Loop, LoopState
from nbtrain.training.models import register_newest
from nbtrain.training.ranks import join_ranks
from nbtrain.training.record import StoreRecorder, insist
from nbtrain.training.starting import Parts, Starter
from nbtrain.training.update import Updater
from nbtrain.training.validation import Validator
from nbtrain.training.warm_start import starts_warm

__all__ = ["Job"]

log = logging.getLogger("nbtrain.training")


class Job(BaseJob):
    """Puts a run together and runs its loop; rank 0 alone moves phases and records."""

    def run(self) -> Ending:
        """Start up, check, train. Raises :class:`Cancelled` when stopped."""
        ranks, device = join_ranks(self._folder, self._attempt)
        control = self._control(ranks)
        with ExitStack() as stack:
            starter = Starter(
                self._store, self._plan, self._folder, ranks=ranks, device=device, control=control
            )
            try:
                parts = starter.start(stack)
            except Exception as error:
                if not is_exhausted(error):
                    raise
                door = self._plan.door
                said = sentence(
                    error, part="start-up", step=0, expected=None, saved=None, door=door
                )
                raise NbtrainError(said) from error
            finally:
                self._keep(starter.checks, ranks)
            loop = self._loop(parts, ranks, control)
            restored = self._restore(loop, parts)
            before = loop.updates
            control.listen_for_sigterm()
            self._move(ranks, Phase.TRAINING, "; ".join(filter(None, [restored, *parts.remarks])))
            # What start-up made stays: looking through it again and again costs 0.2 s each time
            gc.collect()
            gc.freeze()
            parts.flight.budgets = setup.budgets(self._plan)
            parts.flight.budgets.start()
            control.activity = loop.activity
            ending = loop.run()
            self._move(ranks, Phase.RECORDING)
            if ending.failure is None and loop.updates > before and not ranks.rank:
                insist(lambda: register_newest(self._store, self._run, self._plan))
        return ending

    def _loop(self, parts: Parts, ranks: Ranks, control: Control | FollowerControl) -> Loop:
        plan, policy = self._plan, parts.policy
        stale = plan["max_staleness"]
        # In fp32 the sampler's own log-probs are good enough: nothing is scored by older adapters
        keeps = stale > 0 and not policy.exact
        updater = Updater(
            policy,
            setup.update_settings(plan),
            weight_decay=plan["weight_decay"],
            tick=control,
            ranks=ranks,
            history=AdapterHistory(policy.trainable, stale + 1) if keeps else None,
        )
        if starts_warm(plan) is not None:
            updater.refer_to()
        collector = Collector(
            parts.train, parts.flight, setup.collector_settings(plan, policy), ranks=ranks
        )
        validator = None
        if plan["val_enabled"] and parts.held_out:
            validator = Validator(
                parts.held_out,
                parts.flight,
                setup.validation_settings(plan, policy),
                ranks=ranks,
                conversation=parts.held_out_conversation,
            )
        return Loop(
            setup.loop_settings(plan),
            policy=policy,
            updater=updater,
            collector=collector,
            validator=validator,
            recorder=None if ranks.rank else self._recorder(parts),
            tasks=parts.train,
            ranks=ranks,
            environment=parts.environment,
            memory=parts.memory,
        )

    def _recorder(self, parts: Parts) -> StoreRecorder:
        plan = self._plan
        return StoreRecorder(
            self._store,
            self._writer,
            self._folder,
            parts.policy,
            keep=plan["keep_checkpoints"],
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

    def _restore(self, loop: Loop, parts: Parts) -> str | None:
        """Go on from the parent checkpoint; says what was restored."""
        parent = self._plan.parent
        if parent is None:
            model = starts_warm(self._plan)
            if model is None:
                return None
            return f"started from the model {model.name or model.model_id[:12]}"
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
            before=counted(before, before.total_steps),
            after=counted(self._plan, self._plan.total_steps),
            stale=bool(self._plan["max_staleness"]),
        )
