"""The picture of how losses fell: one line per run, held-out values as dots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zbpp.render.style import COLOURS

_STYLES = ("-", "--", ":", "-.")
_SMOOTHED = 0.05  # of a curve's points: the half-width of the mean around a point


class Curve(NamedTuple):
    """A run's loss by step, and its held-out loss by step."""

    name: str
    losses: dict[int, float]
    held_out: dict[int, float]


def render_curves(curves: Sequence[Curve], path: str | os.PathLike[str], unit: str) -> None:
    """Write a picture of losses over steps: PNG, PDF or SVG by the suffix. unit: that of the values.

    A pale line is a run's loss, a line in full colour its mean over the neighbouring steps. Equal runs lie on
    each other: a later run's line has gaps, through which the earlier one shows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colours = [dark for dark, _ in COLOURS.values()]
    for index, curve in enumerate(curves):
        colour, style = colours[index % len(colours)], _STYLES[index % len(_STYLES)]
        steps, losses = np.array(list(curve.losses)), np.array(list(curve.losses.values()))
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smoothed(losses), style, color=colour, linewidth=1.8, label=curve.name)
        if curve.held_out:
            size = 9 - 3 * min(index, 2)
            held_out = list(curve.held_out), list(curve.held_out.values())
            axes.plot(*held_out, "o", color=colour, markersize=size, label=f"{curve.name}, held-out")
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours; as many on the left as on the right."""
    half = int(len(values) * _SMOOTHED)
    reach = [min(half, index, len(values) - 1 - index) for index in range(len(values))]
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])
