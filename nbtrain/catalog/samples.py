"""The sample workload ``sums``: a first thing to train on, known to every fresh home.

Its rows are computed, not stored: all pairs ``a + b`` with both in 0 to 99, in the order of the
SHA-256 of their prompts. The first 200 are held out, the next 2,000 train. The embedded model
was made without the held-out pairs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

__all__ = ["SUMS", "SUMS_BASE_MODEL", "sums_prompt", "sums_rows"]

SUMS = "sums"
SUMS_BASE_MODEL = "nbtrain/tiny"
_HELD_OUT = 200
_TRAIN = 2000


def sums_prompt(a: int, b: int) -> str:
    """The user's text of the task ``a + b``."""
    return f"What is {a} + {b}?"


@cache
def _pairs() -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return sorted(pairs, key=lambda pair: hashlib.sha256(sums_prompt(*pair).encode()).digest())


def sums_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The 2,000 training and the 200 held-out rows of ``sums``.

    A row's ``prompt`` is one user message, its ``answer`` the whole reply that earns the reward
    (``"<answer>99</answer>"``). No prompt stands on both sides.
    """

    def row(a: int, b: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": sums_prompt(a, b)}],
            "answer": f"<answer>{a + b}</answer>",
        }

    pairs = _pairs()
    train = [row(*pair) for pair in pairs[_HELD_OUT : _HELD_OUT + _TRAIN]]
    return train, [row(*pair) for pair in pairs[:_HELD_OUT]]
