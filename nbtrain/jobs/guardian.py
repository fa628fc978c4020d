"""The guardian: a small process beside a host, which cleans up when the host is killed.

Ranks and reward workers die with their parent by themselves. What a user's reward function
starts (a browser, a compiler) does not: the host stops it while it lives, the guardian when the
host was killed. It waits on a pipe that only the host holds open, so it knows at once; then it
kills what carries the attempt's mark, until nothing does, and exits.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from nbtrain.processes import marked

_SWEEP_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_QUIET_LOOKS = 3


def main() -> None:
    """Wait for the end of standard input, then kill all processes marked with ``sys.argv[1]``."""
    mark = sys.argv[1]
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end = time.monotonic() + _SWEEP_SECONDS
    quiet = 0
    # Several looks without a find: a process may be between its parent's fork and its own mark.
    while quiet < _QUIET_LOOKS and time.monotonic() < end:
        found = marked(mark)
        quiet = 0 if found else quiet + 1
        for one in found:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
