"""How fast this machine is now: promises in CPU seconds are made for cores of a stated speed.

The same code was seen to take 1.5 to 3.5 times the CPU seconds on shared cores whose neighbours
were busy, and not everything the same: what waits for memory suffers most. So a promise is judged
beside work of its own kind, measured in the same run: a bar is a ratio.
"""

from __future__ import annotations

import json
import random
import sqlite3
import string
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

_IMPORTS = """
import time
import sqlalchemy, pandas, matplotlib.figure
print(time.process_time())
"""
_RNG = random.Random(0)
_TEXTS = ["".join(_RNG.choices(string.ascii_lowercase + " ", k=2000)) for _ in range(512)]


def additions() -> float:
    """CPU seconds of a million additions: what never leaves a core's own cache."""
    begun, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - begun


def imports() -> float:
    """CPU seconds of a fresh process that imports what a first look at a run needs."""
    return float(subprocess.check_output([sys.executable, "-c", _IMPORTS], text=True))


def writing() -> float:
    """CPU seconds of 20 plain transactions of 64 rows with 2 kB of packed text each."""
    with tempfile.TemporaryDirectory() as folder:
        plain = sqlite3.connect(Path(folder) / "plain.sqlite")
        plain.execute("PRAGMA journal_mode = WAL")
        columns = ", ".join(f"c{n}" for n in range(20))
        plain.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, {columns}, text BLOB)")
        begun = time.process_time()
        for step in range(20):
            rows = [
                (
                    *(step * 0.1 + n for n in range(18)), f"{n:016x}",
                    json.dumps({"correct": n / 2, "format": 0.5, "step": step}),
                    zlib.compress(_TEXTS[(step * 7 + n) % 512].encode(), 1),
                )
                for n in range(64)
            ]  # fmt: skip
            with plain:
                plain.executemany(f"INSERT INTO t VALUES (NULL, {'?, ' * 20}?)", rows)
        spent = time.process_time() - begun
        plain.close()
        return spent


STATED: dict[Callable[[], float], float] = {additions: 0.05, imports: 0.65, writing: 0.045}
"""CPU seconds that each takes on the cores for which the bars hold."""


def slowness(kind: Callable[[], float] = additions, *, tries: int = 3) -> float:
    """How many times longer than stated this kind of work takes here and now; at least 1.

    With several ``tries`` the quickest counts, as it does among those of what is judged. Beside
    a single measurement take one.
    """
    return max(1.0, min(kind() for _ in range(tries)) / STATED[kind])
