"""How fast this core is now: promises in CPU seconds are made for one of a stated speed."""

from __future__ import annotations

import time

ADDITIONS = 1_000_000
REFERENCE = 0.05
"""CPU seconds that a core needs for so many additions in a Python loop, for which the bars hold.

A current desktop core does them in 0.04 to 0.05; a shared virtual one was seen to need 0.16, and
the same code 2 to 3.5 times the CPU seconds measured on another day."""


def slowness() -> float:
    """How many times longer this core takes than the bars are made for; at least 1."""
    return max(1.0, min(_loop() for _ in range(5)) / REFERENCE)


def _loop() -> float:
    begun, total = time.process_time(), 0
    for number in range(ADDITIONS):
        total += number
    return time.process_time() - begun
