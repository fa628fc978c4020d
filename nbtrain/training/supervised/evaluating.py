"""Validation of a supervised run: the loss over a whole dataset, weighted by trained tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.training.supervised.collate import collate
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.scores import RowScores

__all__ = ["Evaluator"]


class Evaluator:
    """Measures the loss of ``rows``, unpacked, at most ``per_pass`` of them in one pass."""

    def __init__(
        self,
        rows: TokenizedRows,
        *,
        per_pass: int,
        pad_id: int = 0,
        tick: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._rows, self._per_pass, self._pad_id = rows, per_pass, pad_id
        self._tick, self._ranks = tick, ranks or Alone()

    def run(self, scores: RowScores, *, step: int) -> dict[str, Any]:
        """A validation round's row: ``loss`` and ``perplexity`` over all trained tokens.

        A loss that is no number is left out, and the round is then not completed.
        """
        began = time.monotonic()
        device = next(scores.model.parameters()).device
        total, tokens, done = 0.0, 0, 0
        count = len(self._rows)
        starts = range(0, count, self._per_pass)[self._ranks.rank :: self._ranks.size]
        for start in starts:
            self._tick()
            positions = range(start, min(start + self._per_pass, count))
            batch = collate(self._rows, [(row,) for row in positions], packed=False,
                            pad_id=self._pad_id)  # fmt: skip
            log_probs, _ = scores.measured({n: t.to(device) for n, t in batch.items()})
            total -= float(log_probs.double().sum())
            tokens += len(log_probs)
            done += len(positions)
        every = self._ranks.gather((total, tokens, done))
        total, tokens, done = (sum(one[at] for one in every) for at in range(3))
        loss = total / tokens if tokens else math.nan
        finite = math.isfinite(loss)
        return {
            "step": step,
            "policy_version": step,
            "held_out_reward": None,
            "loss": loss if finite else None,
            "perplexity": math.exp(loss) if finite and loss < 700 else None,
            "trained_tokens": tokens,
            "completed_samples": done,
            "expected_samples": count,
            "round_completed": finite and done == count,
            "seconds": time.monotonic() - began,
        }
