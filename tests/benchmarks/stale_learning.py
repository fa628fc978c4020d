"""What staleness costs in learning: GSPO with trajectories in flight across updates.

``python tests/benchmarks/stale_learning.py`` trains on ``sums`` with ``max_staleness`` 0 and 3
(twice a batch in flight), three seeds, the same number of updates, at two learning rates, and
prints held-out reward, clipped share and lag; ``--clip LOW HIGH`` tries another range.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from curves_drawn import panels, save
from sums_runs import Recipe, Result, run, views


def arm(
    learning_rate: float, staleness: int, clip: tuple[float, float], steps: int, seed: int
) -> Result:
    recipe = Recipe(
        seed, steps, learning_rate=learning_rate, staleness=staleness, clip=clip, in_flight=128
    )
    return run(recipe, held_out=views()[1])


def curves_of(results: list[Result]) -> dict[str, Any]:
    """What is kept of an arm: by seed, its curve, its held-out reward and its clipped share."""
    return {
        "rewards": [result.rewards for result in results],
        "held_out": [mean(result.held_out) for result in results],
        "clipped": [mean(result.clipped) for result in results],
        "lag": [mean(result.lags) for result in results],
    }


def draw(curves: dict[str, Any], path: Path) -> None:
    """Training reward by update, a panel for each learning rate."""
    pictures: dict[str, dict[str, Any]] = {}
    for name, arm in curves.items():
        rate, staleness, clip = name.split()
        label = "staleness 0" if staleness == "0" else f"staleness {staleness}, clip {clip}"
        pictures.setdefault(f"lr {rate}", {})[label] = arm["rewards"]
    panels(pictures, path, x="update", y="mean reward, training")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 5e-4])
    parser.add_argument("--clip", type=float, nargs=2, action="append")
    parser.add_argument("--out", type=Path, help="folder for the curves")
    options = parser.parse_args()
    curves = {}
    print("| lr | staleness | clip | held-out, by seed | mean | clipped | lag | wasted |")
    print("|---|---|---|---|---|---|---|---|")
    for rate in options.rates:
        arms = [(0, (3e-4, 4e-4))] + [(3, tuple(c)) for c in options.clip or [(0.02, 0.02)]]
        for staleness, clip in arms:
            results = [arm(rate, staleness, clip, options.steps, s) for s in options.seeds]
            scores = [mean(result.held_out) for result in results]
            clipped = mean(mean(result.clipped) for result in results)
            lag = mean(mean(result.lags) for result in results)
            wasted = sum(r.wasted for r in results) / sum(r.sampled for r in results)
            print(
                f"| {rate:g} | {staleness} | {clip[0]:g}/{clip[1]:g} | "
                f"{' '.join(f'{s:.3f}' for s in scores)} | {mean(scores):.3f} | {clipped:.1%} | "
                f"{lag:.2f} | {wasted:.1%} |",
                flush=True,
            )
            curves[f"{rate:g} {staleness} {clip[0]:g}"] = curves_of(results)
    if options.out:
        save(curves, options.out / "stale_learning.json")
        draw(curves, options.out / "stale_learning.png")


if __name__ == "__main__":
    main()
