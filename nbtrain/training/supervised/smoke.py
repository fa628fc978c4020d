"""The smoke check: train on a few rows until they are known by heart, then have them written.

A model that cannot reproduce rows it has seen many times has a problem in its data, its loss mask
or its template rather than a hard task. Everything but the rows and the number of updates is the
plan's own; its schedule is laid over ``maxSteps``, so when the check stops early the rate has
hardly decayed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.rendering import Renderer
from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.plan.resolved import ResolvedPlan, SmokeRef
from nbtrain.rollout.decoders import Decoder, decoder
from nbtrain.rollout.ranks import Ranks
from nbtrain.rollout.types import SampleRequest
from nbtrain.store import Store
from nbtrain.training.environment import kv_budget
from nbtrain.training.supervised.answers import read_answers
from nbtrain.training.supervised.collate import collate
from nbtrain.training.supervised.preparing import Prepared, loss_rules
from nbtrain.training.supervised.scores import RowScores
from nbtrain.training.supervised.suspects import Layer, Scored, attainable, matching, suspect

__all__ = ["SmokeCheck", "ending_of", "without_validation"]

log = logging.getLogger("nbtrain.training")

SLOTS = 32
"""Replies decoded at a time."""
MARGIN = 8
"""Tokens that a reply may go on beyond the answer, to show how it does."""
EVERY_UPDATES, EVERY_EPOCHS = 10, 2
"""Updates between two measurements: the larger of so many updates and so many epochs."""
PATIENCE = 3
"""Measurements without a better score after which rows are given up that something about them
keeps from being reproduced: more updates would not change that."""
WORST_ROWS = 5
_CHARACTERS = 300


def without_validation(plan: ResolvedPlan) -> ResolvedPlan:
    """The plan as a smoke check trains it: nothing is validated. Other plans stay as they are."""
    return plan if plan.smoke is None else replace(plan, validation_dataset=None)


@dataclass(slots=True)
class _Reply:
    """What was written for a row: each of its stretches."""

    row: int
    written: list[list[int]]


class SmokeCheck:
    """Measures during training and judges at the end; :meth:`until` is asked after every update.

    ``ready`` is what was prepared, ``ranks`` that train together: each measures its share of the
    rows and all know the result. ``tick`` is called often and may raise to stop.

    Raises :class:`StartChecksFailed` for a model that cannot be sampled.
    """

    def __init__(
        self,
        store: Store,
        plan: ResolvedPlan,
        ready: Prepared,
        *,
        ranks: Ranks,
        device: torch.device,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        assert plan.smoke is not None
        assert plan.dataset is not None
        assert ready.model is not None
        assert ready.rows is not None
        assert ready.order is not None
        assert ready.tokenizer is not None
        self._plan, self._ready, self._ranks, self._tick = plan, ready, ranks, tick
        self._smoke: SmokeRef = plan.smoke
        self._rows, self._device = ready.rows, device
        self._tokenizer: PreTrainedTokenizerBase = ready.tokenizer
        self._answers = read_answers(
            DatasetRegistry(store).get(plan.dataset.dataset_id),
            Renderer(ready.tokenizer, ready.ends),
            loss_rules(plan),
            ready.rows,
        )
        self._scores = RowScores(ready.model.model, lean=False)
        self._sampler = self._make_sampler(ready.model.model)
        self._every = max(EVERY_UPDATES, EVERY_EPOCHS * ready.order.updates_per_epoch)
        self._enough = min(self._smoke.threshold, attainable(self._answers))
        self._updates = 0
        self._best, self._stuck = -1.0, 0
        self._forced: list[float] = []
        self._loss = math.nan
        self._replies: list[_Reply] = []
        self.activity: str | None = None
        """What is being measured; ``None`` while nothing is."""

    # --- while it trains ----------------------------------------------------------------------

    def until(self, step: int) -> bool:
        """Whether training ends after global step ``step``: the rows are known by heart.

        Rows are written out only when enough of their tokens are predicted from the true text,
        which is cheaper to see, and after the last step in any case. Enough is the threshold, or
        what rows that contradict each other can reach at most.
        """
        last = step == self._plan.total_steps
        self._updates = step - self._plan.start_step
        if not last and self._updates % self._every:
            return False
        try:
            self._predict(step)
            forced = _mean(self._forced)
            if not last and forced < self._enough:
                return False
            self._write(step)
        finally:
            self.activity = None
        score = _mean(self._shares())
        log.info("smoke check after step %d: predicted %.4f, written %.4f", step, forced, score)
        return score >= self._smoke.threshold or self._hopeless(score)

    def _hopeless(self, score: float) -> bool:
        waits = score > self._best or self._suspected()[0] == "training"
        self._stuck = 0 if waits else self._stuck + 1
        self._best = max(self._best, score)
        return self._stuck >= PATIENCE

    def _predict(self, step: int) -> None:
        """The share of each row's trained tokens that the model puts first, and their loss."""
        self.activity = f"smoke check of step {step}: the rows from the true text"
        size = min(
            self._plan["micro_batch_per_gpu"],
            self._plan["micro_batch_sequences"] or len(self._rows),
        )
        mine: list[tuple[int, int, int, float]] = []
        starts = range(0, len(self._rows), size)[self._ranks.rank :: self._ranks.size]
        for start in starts:
            self._tick()
            rows = range(start, min(start + size, len(self._rows)))
            batch = collate(
                self._rows, [(row,) for row in rows], packed=False, pad_id=self._ready.pad_id
            )
            log_probs, of, first = self._scores.foremost(
                {name: tensor.to(self._device) for name, tensor in batch.items()}
            )
            for at, row in enumerate(rows):
                own = of == at
                loss = -float(log_probs[own].double().sum())
                mine.append((row, int(first[own].sum()), int(own.sum()), loss))
        every = sorted(one for share in self._ranks.gather(mine) for one in share)
        self._forced = [right / tokens for _, right, tokens, _ in every]
        self._loss = sum(loss for *_, loss in every) / sum(tokens for _, _, tokens, _ in every)

    def _write(self, step: int) -> None:
        """Every answer as the model writes it: greedy, from the generation prompt on."""
        self.activity = f"smoke check of step {step}: the rows written by the model"
        mine = self._answers[self._ranks.rank :: self._ranks.size]
        stretches = [(answer.row, s) for answer in mine for s in answer.stretches]
        requests = [
            SampleRequest(number, s.prompt, len(s.expected) + MARGIN, (0, number), temperature=0.0)
            for number, (_, s) in enumerate(stretches)
        ]
        self._sampler.new_policy(step)
        self._sampler.submit(requests)
        written: dict[int, list[int]] = {}
        while self._sampler.pending:
            self._tick()
            for sample in self._sampler.step():
                written[sample.request_id] = sample.token_ids
        self._sampler.release()
        by_row: dict[int, list[list[int]]] = {answer.row: [] for answer in mine}
        for number, (row, _) in enumerate(stretches):
            by_row[row].append(written[number])
        replies = [_Reply(row, texts) for row, texts in by_row.items()]
        every = (one for share in self._ranks.gather(replies) for one in share)
        self._replies = sorted(every, key=lambda reply: reply.row)

    def _make_sampler(self, model: Any) -> Decoder:
        stretches = [s for answer in self._answers for s in answer.stretches]
        longest = max((len(s.prompt) + len(s.expected) for s in stretches), default=2) + MARGIN
        try:
            return decoder(
                model,
                slots=SLOTS,
                eos_ids=self._ready.ends,
                pad_id=self._ready.pad_id,
                max_context=min(longest, max(2, self._plan.base_model.max_context)),
                kv_budget_bytes=kv_budget(self._device, ranks=self._ranks.size),
            )
        except ValueError as error:
            message = f"the model cannot write the rows of a smoke check: {error}"
            raise StartChecksFailed([Problem("smoke", message)]) from error

    # --- at the end ---------------------------------------------------------------------------

    def verdict(self) -> dict[str, Any]:
        """The verdict of the last measurement as strict JSON.

        ``score`` and ``teacher_forced`` are means over ``rows``; ``layer`` is ``None`` when it
        ``passed``; ``worst`` are at most five rows, ``row`` counting from 0.
        """
        shares = self._shares()
        score = _mean(shares)
        passed = score >= self._smoke.threshold
        layer, said = None, f"the rows are known by heart after {self._updates:,} updates"
        if not passed:
            layer, said = self._suspected()
        worst = sorted((n for n, s in enumerate(shares) if s < 1), key=lambda n: (shares[n], n))
        return {
            "passed": passed,
            "score": score,
            "threshold": self._smoke.threshold,
            "rows": len(shares),
            "updates": self._updates,
            "teacher_forced": _mean(self._forced),
            "layer": layer,
            "said": said,
            "worst": [self._shown(n, shares[n]) for n in worst[:WORST_ROWS]],
        }

    def _suspected(self) -> tuple[Layer, str]:
        rows = zip(self._answers, self._shares(), self._forced, strict=True)
        return suspect(
            [Scored(*row) for row in rows],
            threshold=self._smoke.threshold,
            loss=self._loss,
            updates=self._updates,
            mask_column=self._plan["explicit_loss_mask_column"],
        )

    def _shares(self) -> list[float]:
        """The share of each row's answer that was written as it stands, up to the first error."""
        shares = []
        for answer, reply in zip(self._answers, self._replies, strict=True):
            pairs = zip(answer.stretches, reply.written, strict=True)
            matched = sum(matching(s.expected, written) for s, written in pairs)
            shares.append(matched / answer.tokens if answer.tokens else 0.0)
        return shares

    def _shown(self, position: int, share: float) -> dict[str, Any]:
        answer, reply = self._answers[position], self._replies[position]
        pairs = list(zip(answer.stretches, reply.written, strict=True))
        row: dict[str, Any] = {"row": answer.row, "line": answer.line, "score": share}
        stretch, written = next(
            ((s, w) for s, w in pairs if matching(s.expected, w) < len(s.expected)), (None, [])
        )
        expected = () if stretch is None else stretch.expected
        at = matching(expected, written)
        return row | {
            "expected": self._text(expected),
            "got": self._text(written),
            "first_difference": {
                "token": at,
                "expected": self._text(expected[at : at + 1]),
                "got": self._text(written[at : at + 1]),
            },
        }

    def _text(self, ids: Sequence[int]) -> str:
        text = str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
        return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"


def ending_of(verdict: dict[str, Any]) -> str:
    """How the run ended, in a sentence whose first words are the verdict."""
    told = (
        f"smoke check {'passed' if verdict['passed'] else 'failed'}: {verdict['score']:.4f} of "
        f"the answers of {verdict['rows']:,} rows are reproduced, needed {verdict['threshold']:g}"
    )
    if verdict["layer"] is not None:
        told += f"; suspected: {verdict['layer']}"
    return f"{told}; {verdict['said']}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
