"""The sample workloads ``sums`` and ``calculator``: first things to train on, in every fresh home.

Their rows are computed, not stored: all pairs ``a + b`` with both in 0 to 99, in the order of the
SHA-256 of the prompts of ``sums``. The first 200 are held out, the next 2,000 train. The embedded
model was made without the held-out pairs, in either workload.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

__all__ = [
    "CALCULATOR",
    "SUMS",
    "SUMS_BASE_MODEL",
    "calculator_rows",
    "sums_prompt",
    "sums_rows",
]

CALCULATOR = "calculator"
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


def calculator_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The 2,000 training and the 200 held-out rows of ``calculator``, pair by pair those of sums.

    A row's ``prompt`` is one user message that asks for the calculator, ``expression`` the call
    that it wants (``"51+48"``) and ``answer`` the number (``"99"``).
    """

    def row(a: int, b: int) -> dict[str, Any]:
        text = f"{sums_prompt(a, b)} Use the calculator."
        prompt = [{"role": "user", "content": text}]
        return {"prompt": prompt, "expression": f"{a}+{b}", "answer": str(a + b)}

    pairs = _pairs()
    train = [row(*pair) for pair in pairs[_HELD_OUT : _HELD_OUT + _TRAIN]]
    return train, [row(*pair) for pair in pairs[:_HELD_OUT]]
