"""The curves of training runs: loss, speed, bubble and memory over the steps, a line per run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 12.0, 7.0  # inches
_GRID = "#d4d6dc"
_GIB = 2**30


class _Panel(NamedTuple):
    """One panel. keys: of metrics.jsonl; the first one that a run has is drawn. scale: a factor."""

    title: str
    keys: tuple[str, ...]
    scale: float = 1.0
    marker: str = ""


_PANELS = (
    _Panel("loss (dots: held-out)", ("loss",)),
    _Panel("speed, tokens/s or rows/s", ("tokens_per_second", "rows_per_second")),
    _Panel("bubble of measured steps, %", ("measured_bubble_rate",), 100, "."),
    _Panel("memory of the fullest rank, GiB", ("peak_memory_bytes",), 1 / _GIB, "."),
)
_HELD_OUT = _Panel("", ("evaluation_loss",), marker="o")

Steps = Sequence[Mapping[str, Any]]
"""The metrics of a run's steps: the lines of its metrics.jsonl."""


def render_curves(runs: Mapping[str, Steps], path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Draw the runs, by name, in one picture: PNG, PDF or SVG by the suffix; an open file gets a PNG.

    Four panels: loss, speed, bubble, memory. A panel leaves out the steps without its figure, and those whose
    figure is not finite.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
        axes.grid(color=_GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for number, (name, steps) in enumerate(runs.items()):
            style: dict[str, Any] = {"color": f"C{number % 10}", "linewidth": 1.2}
            _draw(axes, panel, steps, label=name, **style)
            if panel is _PANELS[0]:
                _draw(axes, _HELD_OUT, steps, **{**style, "linewidth": 0})
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(runs)), frameon=False)
    figure.savefig(path)


def _draw(axes: Axes, panel: _Panel, steps: Steps, **style: Any) -> None:
    points = [
        (int(each["step"]), value * panel.scale)
        for each in steps
        if (value := _value(each, panel)) is not None
    ]
    axes.plot([step for step, _ in points], [value for _, value in points], marker=panel.marker, **style)


def _value(metrics: Mapping[str, Any], panel: _Panel) -> float | None:
    found = next((metrics[key] for key in panel.keys if metrics.get(key) is not None), math.nan)
    value = float(found)  # "NaN" and "Infinity" are texts in the file
    return value if math.isfinite(value) else None
