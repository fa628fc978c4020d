"""Whether a regular expression over module paths is ever done: some backtrack for ages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

__all__ = ["SECONDS", "is_done_matching"]

SECONDS = 5
"""CPU time for matching a pattern against all paths of a model; milliseconds are usual."""

_CHILD = """
import json, re, resource, sys
told = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (told["seconds"], told["seconds"]))
for path in told["paths"]:
    re.fullmatch(told["pattern"], path)
"""


def is_done_matching(pattern: str, paths: Iterable[str]) -> bool:
    """Whether ``pattern`` is matched against all ``paths`` within :data:`SECONDS` of CPU time.

    It is tried in a process of its own, which the kernel ends: matching holds the GIL, so that
    nothing of this one could be heard meanwhile.
    """
    told = json.dumps({"pattern": pattern, "paths": list(paths), "seconds": SECONDS})
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    return subprocess.run(command, input=told, text=True, check=False).returncode >= 0
