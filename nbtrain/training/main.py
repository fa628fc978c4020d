"""The rank's entry point: ``python -m nbtrain.training.main --run ID --attempt N``.

Kept import-light on purpose: reward workers are spawned, and a spawned process imports its
parent's main module again before anything else.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one attempt of one run in this process; the exit code is 0 unless the attempt failed."""
    parser = argparse.ArgumentParser(prog="nbtrain.training.main")
    parser.add_argument("--run", required=True, help="run id, 64 hex digits")
    parser.add_argument("--attempt", required=True, type=int)
    arguments = parser.parse_args(argv)

    from nbtrain.processes import die_with_parent

    die_with_parent()

    from nbtrain.training.job import run_attempt

    return run_attempt(arguments.run, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
