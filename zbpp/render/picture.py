"""The picture: one panel per timeline over one time axis, a box per action."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from zbpp.render.link_strips import STRIP, draw_links
from zbpp.render.style import (
    COLOURS,
    COPY_COLOURS,
    COPY_MEANING,
    EXCHANGE_COLOUR,
    EXCHANGE_MEANING,
    MEANING,
    MESSAGE_COLOURS,
    MESSAGE_MEANING,
    REDUCTION_COLOURS,
    REDUCTION_MEANING,
    Timelines,
    costs_by_title,
    first_start,
    headline,
    index_on_rank,
    panels_of,
)
from zbpp.schedule.costs import Costs
from zbpp.schedule.interpret.transmissions import transmissions
from zbpp.schedule.timeline import Floats, Timeline
from zbpp.schedule.timetable import Op
from zbpp.schedule.units import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUBBLE = "#e6e6ea"
_GRID = "#d4d6dc"
_WIDTH = 14.0  # inches
_PLOT_WIDTH = 0.93 * _WIDTH  # what the axis gets of it, about
_ABOVE_AND_BELOW = 0.72  # inches: a panel's figures and its axis
_TITLE_LINE = 0.19  # inches
_TITLE_LENGTH = 130  # characters in a line of a title
_MUTED = "#444444"
_BOX = 0.84  # of a rank's height
_BAR = 0.13  # of a rank's height; below its box
_BAR_MIDDLE = 0.5 * _BOX + 0.085
_SMALLEST_FONT = 4.5  # points
_MOST_NUMBERS = 3000  # with more actions no numbers are drawn: slow to draw, and too small to read


def render_picture(
    timelines: Timelines,
    path: str | os.PathLike[str] | IO[bytes],
    *,
    costs: Costs | Mapping[str, Costs] | None = None,
) -> None:
    """Write a picture of timelines, one above the other, in ms from 0: PNG, PDF or SVG by the suffix.

    An open file gets a PNG.

    Grey is the bubble: idle time within a rank's span. A box that is wide enough has its microbatch's number.
    A thin bar below a rank's boxes is a reduction, or a copy of what leaves the device or comes back. One
    at the top of a box is the box's exposed exchange: all that the action has, drawn at its end.
    costs: what the timelines were simulated with, one for all or one for each title. If these have links,
    each link on which messages take time has a strip below the ranks: dark while a message occupies it, light
    while the message is on its way.
    Above each panel stand its title and its largest figures, each with the rank that has it.
    """
    # A Figure of its own, no pyplot: no display, no global state, and matplotlib only for those who draw.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = panels_of(timelines)
    own = costs_by_title(panels, costs)
    strips = [transmissions(timeline, own[title]) for title, timeline in panels]
    heights = [
        _lane(timeline) * (timeline.timetable.num_ranks + STRIP * len(links))
        + _ABOVE_AND_BELOW
        + _TITLE_LINE * len(wrap(title, _TITLE_LENGTH))
        for (title, timeline), links in zip(panels, strips, strict=True)
    ]
    layout = ConstrainedLayoutEngine(h_pad=0.08)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.8), dpi=150, layout=layout)
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    horizon = max(timeline.makespan for _, timeline in panels) or 1.0
    for axes, (title, timeline), links in zip(grid[:, 0], panels, strips, strict=True):
        _draw(axes, title, timeline, horizon)
        if links:
            draw_links(axes, timeline, links, _PLOT_WIDTH / horizon)
    _legend(figure, [timeline for _, timeline in panels], has_links=any(strips))
    figure.savefig(path)


def _lane(timeline: Timeline) -> float:
    """The height of a rank in inches: few ranks are high enough for numbers, many still fit a page."""
    return float(np.clip(5.0 / timeline.timetable.num_ranks, 0.14, 0.42))


def _draw(axes: Axes, title: str, timeline: Timeline, horizon: float) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw_bubbles(axes, timeline)
    _draw_boxes(axes, timeline, _PLOT_WIDTH / horizon)
    _draw_numbers(axes, timeline, _PLOT_WIDTH / horizon)
    _draw_reductions(axes, timeline)
    _draw_copies(axes, timeline)
    _draw_exchanges(axes, timeline)
    num_ranks = timeline.timetable.num_ranks
    # Two texts: a title has one style, and one beside the figures would run into them.
    axes.set_title(headline(timeline), loc="left", fontsize=10, color=_MUTED)
    where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    title = "\n".join(wrap(title, _TITLE_LENGTH))
    axes.annotate(title, (0, 1), (0, 21), fontweight="bold", fontsize=11, **where)
    axes.set_xlim(0, 1.003 * horizon)  # room for the dashed line at the end
    axes.set_ylim(num_ranks - 0.42, -0.5)  # rank 0 on top; room for the last rank's reductions
    axes.set_yticks(range(0, num_ranks, max(1, num_ranks // 8)))
    axes.set_ylabel("rank")
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_milliseconds)
    axes.grid(axis="x", color=_GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.axvline(timeline.makespan, color=_MUTED, linewidth=0.8, linestyle="--", zorder=0)


def _milliseconds(time: float, position: float) -> str:
    """The label of a tick: at 0 with the unit, elsewhere the number alone."""
    return f"{time:g}" if time else "0 ms"


def _draw_bubbles(axes: Axes, timeline: Timeline) -> None:
    first = first_start(timeline)
    ranks = range(timeline.timetable.num_ranks)
    starts = [float(timeline.starts[rank][0]) - first for rank in ranks]
    axes.barh(ranks, list(map(timeline.span, ranks)), _BOX, starts, color=_BUBBLE, zorder=1)


def _draw_boxes(axes: Axes, timeline: Timeline, inches_per_ms: float) -> None:
    """One collection of boxes per colour: it draws 25,000 boxes in a second, single patches take a minute."""
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[Floats]] = defaultdict(list)
    places = np.minimum(index_on_rank(timeline.timetable), 1)
    first = first_start(timeline)
    for rank, row in enumerate(timeline.timetable.rows):
        for op, place in itertools.product(Op, (0, 1)):
            chosen = (row.ops == op) & (places[row.stages] == place)
            starts, ends = timeline.starts[rank][chosen] - first, timeline.ends[rank][chosen] - first
            boxes[COLOURS[op][place]].append(_corners(starts, ends, rank))
    # White edges separate neighbours. On boxes one or two pixels wide they would cover the colour.
    edge = 0.8 if 72 * _typical(timeline) * inches_per_ms > 2.5 else 0.0
    for colour, corners in boxes.items():
        style: dict[str, Any] = {"facecolors": colour, "edgecolors": "white", "linewidths": edge}
        shapes = PolyCollection(list(np.concatenate(corners)), antialiaseds=edge > 0, zorder=2, **style)
        axes.add_collection(shapes, autolim=False)


def _draw_reductions(axes: Axes, timeline: Timeline) -> None:
    places, first = index_on_rank(timeline.timetable), first_start(timeline)
    for stage, rank, start, end in timeline.reductions:
        colour = REDUCTION_COLOURS[min(places[stage], 1)]
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5, "zorder": 2}
        axes.barh(rank + _BAR_MIDDLE, end - start, _BAR, start - first, **style)


def _draw_copies(axes: Axes, timeline: Timeline) -> None:
    """One collection per direction: there are as many copies as actions."""
    first = first_start(timeline)
    for is_out, colour in COPY_COLOURS.items():
        for rank in sorted({each.rank for each in timeline.copies}):
            own = [each for each in timeline.copies if each.rank == rank and each.is_out == is_out]
            spans = [(each.start - first, each.end - each.start) for each in own]
            axes.broken_barh(spans, (rank + _BAR_MIDDLE - _BAR / 2, _BAR), facecolors=colour, zorder=2)


def _draw_exchanges(axes: Axes, timeline: Timeline) -> None:
    first = first_start(timeline)
    for rank, exposed in enumerate(timeline.exposed):
        spans = np.stack([timeline.ends[rank] - exposed - first, exposed], axis=1)[exposed > 0].tolist()
        axes.broken_barh(spans, (rank - _BOX / 2, _BAR), facecolors=EXCHANGE_COLOUR, zorder=3)


def _typical(timeline: Timeline, op: Op | None = None) -> float:
    """The median duration in ms of one op or of all actions."""
    durations = [
        (ends - starts)[slice(None) if op is None else row.ops == op]
        for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True)
    ]
    return float(np.median(np.concatenate(durations)))


def _corners(starts: Floats, ends: Floats, rank: int) -> Floats:
    """Rectangles as [box, corner, (x, y)]."""
    top, bottom = np.full_like(starts, rank - _BOX / 2), np.full_like(starts, rank + _BOX / 2)
    corners = [(starts, top), (ends, top), (ends, bottom), (starts, bottom)]
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)


def _draw_numbers(axes: Axes, timeline: Timeline, inches_per_ms: float) -> None:
    if sum(map(len, timeline.timetable.rows)) > _MOST_NUMBERS:
        return
    sizes = [_font_size(timeline, op, inches_per_ms) for op in _ops(timeline)]
    size = min((size for size in sizes if size >= _SMALLEST_FONT), default=_SMALLEST_FONT)
    places = index_on_rank(timeline.timetable)
    first = first_start(timeline)
    for rank, row in enumerate(timeline.timetable.rows):
        spans = zip(row, timeline.starts[rank] - first, timeline.ends[rank] - first, strict=True)
        for (stage, _, microbatch), start, end in spans:
            text = str(microbatch)
            # An action may be much shorter than the typical one: its number would cover its neighbours.
            if _width(text, size) <= 72 * (end - start) * inches_per_ms:
                colour = "black" if places[stage] else "white"
                style: dict[str, Any] = {"fontsize": size, "color": colour}
                axes.annotate(text, ((start + end) / 2, rank), ha="center", va="center_baseline", **style)


def _font_size(timeline: Timeline, op: Op, inches_per_ms: float) -> float:
    """Points, so that the longest number fits into the typical box of an op."""
    longest = str(unit_of(timeline.timetable.num_units - 1, timeline.timetable.num_slices))
    room = 72 * _typical(timeline, op) * inches_per_ms
    return float(min(9.0, 0.55 * 72 * _lane(timeline), room / _width(longest, 1.0)))


def _width(text: str, size: float) -> float:
    """The width in points of digits at a font size, with a margin."""
    return 0.7 * len(text) * size


def _ops(timeline: Timeline) -> list[Op]:
    return [op for op in Op if any((row.ops == op).any() for row in timeline.timetable.rows)]


def _legend(figure: Figure, timelines: list[Timeline], *, has_links: bool) -> None:
    """One line: the ops and reductions that are there, in both shades if a rank has several stages."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    several = any(max(index_on_rank(timeline.timetable)) > 0 for timeline in timelines)
    shades = 2 if several else 1
    ops = [op for op in Op if any(op in _ops(timeline) for timeline in timelines)]
    handles: dict[str, Any] = {
        f"{op} {MEANING[op]}": tuple(Patch(color=colour) for colour in COLOURS[op][:shades]) for op in ops
    }
    if any(timeline.reductions for timeline in timelines):
        handles[REDUCTION_MEANING] = tuple(Patch(color=colour) for colour in REDUCTION_COLOURS[:shades])
    if any(timeline.copies for timeline in timelines):
        handles |= {COPY_MEANING[is_out]: Patch(color=COPY_COLOURS[is_out]) for is_out in COPY_COLOURS}
    if any(timeline.exposed for timeline in timelines):
        handles[EXCHANGE_MEANING] = Patch(color=EXCHANGE_COLOUR)
    if has_links:
        handles |= {
            MESSAGE_MEANING[name]: tuple(Patch(color=colour) for colour in MESSAGE_COLOURS[name])
            for name in MESSAGE_COLOURS
        }
    handles["bubble"] = Patch(color=_BUBBLE)
    handles["makespan"] = Line2D([], [], color=_MUTED, linewidth=0.8, linestyle="--")
    if several:
        handles["light: a rank's later stages"] = tuple(Patch(color=COLOURS[op][1]) for op in ops)
    figure.legend(
        list(handles.values()),
        list(handles),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=(len(handles) + 1) // 2 if has_links else len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.6,
    )
