"""Curves of the benchmarks: kept as small JSON, drawn as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def save(found: Any, path: Path) -> None:
    """Write ``found`` with every number rounded to three places."""
    path.write_text(json.dumps(_rounded(found), separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def panels(
    pictures: dict[str, dict[str, list[list[float | None]]]],
    path: Path,
    *,
    x: str,
    y: str,
    smooth: int = 5,
) -> None:
    """One panel a title: each label's curves thin, by seed, and their running mean bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(pictures) + 2, 3.2), layout="constrained")
    axes = figure.subplots(1, len(pictures), sharey=True, squeeze=False)[0]
    for axis, (title, curves) in zip(axes, pictures.items(), strict=True):
        for number, (label, seeds) in enumerate(curves.items()):
            values = np.array(seeds, dtype=float)  # None is a gap
            steps = np.arange(1, values.shape[1] + 1)
            for one in values:
                axis.plot(steps, one, color=f"C{number}", alpha=0.2, linewidth=0.6)
            whole = np.nanmean(values, axis=0)
            kernel = np.ones(smooth) / smooth
            bold = np.convolve(whole, kernel, "valid")
            axis.plot(steps[smooth - 1 :], bold, color=f"C{number}", label=label)
        axis.set_title(title)
        axis.set_xlabel(x)
    axes[0].set_ylabel(y)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=72)
