"""The rank's entry point: ``python -m nbtrain.training.main --run ID --attempt N``.

Kept import-light on purpose: reward workers are spawned, and a spawned process imports its
parent's main module again before anything else.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one attempt of one run in this process; the exit code is 0 unless the attempt failed."""
    parser = argparse.ArgumentParser(prog="nbtrain.training.main")
    parser.add_argument("--run", required=True, help="run id, 64 hex digits")
    parser.add_argument("--attempt", required=True, type=int)
    arguments = parser.parse_args(argv)

    from nbtrain.processes import die_with_parent

    die_with_parent()

    from nbtrain.training.attempt import run_attempt

    code = run_attempt(arguments.run, arguments.attempt)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A call to the other ranks that nobody answers any more would keep the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
