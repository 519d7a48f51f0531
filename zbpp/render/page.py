"""The page: timelines to scale in one HTML file, to be zoomed in any browser. It loads nothing else.

This file writes the texts, the tables and the data; web/ has the template page.html, page.css, and the three
scripts that draw.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from zbpp.planning.memory_limit import MemoryLimit, limits_per_rank
from zbpp.render.style import (
    COLOURS,
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
    peak_name,
    peak_text,
)
from zbpp.render.table import decimals_of, digits, percent
from zbpp.schedule.costs import BYTES, Costs
from zbpp.schedule.dataflow import VALUE_NAMES
from zbpp.schedule.dataflow_arrays import Values, complete_stages, kinds_of
from zbpp.schedule.interpret.transmissions import transmissions
from zbpp.schedule.row_costs import RowCosts
from zbpp.schedule.timeline import Floats, Timeline
from zbpp.schedule.timetable import Op, Timetable

_SCRIPTS = ("timeline.js", "drawing.js", "page.js")  # a script uses those before it
_LIGHT = f"--first:{COLOURS[Op.F][1]};--later:{COLOURS[Op.B][1]}"  # a swatch of two light colours
_DIGITS = 9  # of the makespan; further digits are rounding errors of sums

Panels = Sequence[tuple[str, Timeline]]


def render_page(
    timelines: Timelines,
    *,
    title: str = "Pipeline schedules",
    notes: Iterable[str] = (),
    costs: Costs | Mapping[str, Costs] | None = None,
    memory_limit: MemoryLimit = None,
) -> str:
    """An HTML page with a panel per timeline, one above the other over one time axis in ms from 0.

    For each action it shows the times, the values that the action needs, and what the action waited for; for
    each rank the memory level over time, in the unit of costs.saved; below the ranks the messages on each
    link on which they take time, if the costs have links.
    notes: paragraphs under the title; a note of several lines is aligned text and keeps its shape.
    costs: what the timelines were simulated with, per stage; one for all timelines, or one for each title.
    Without costs a timeline is shown without its memory level, and its messages take no time.
    memory_limit: one for all ranks, or one for each rank; drawn beside the levels.
    Raises PlanError if costs or limits don't fit the stages and ranks of a timeline.
    """
    panels = panels_of(timelines)
    own = costs_by_title(panels, costs)
    scripts = [_part(name) for name in _SCRIPTS]
    drawn = [_data(timeline, own[name], memory_limit) for name, timeline in panels]
    data = {"values": VALUE_NAMES, "ops": [op.name for op in Op], "panels": drawn}
    return Template(_part("page.html")).substitute(
        title=escape(title),
        notes=_notes(notes),
        summary=_summary(panels),
        legend=_legend(
            panels,
            level=costs is not None,
            limit=memory_limit is not None,
            links=any("links" in each for each in drawn),
        ),
        panels="\n".join(_panel(name, timeline) for name, timeline in panels),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False),
        style=_part("page.css"),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        script_hashes=" ".join(map(_hash, scripts)),
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The script's hash for the Content Security Policy, under which no other script runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# ---------------------------------------------------------------- data that the scripts draw


def _data(timeline: Timeline, costs: Costs | None, memory_limit: MemoryLimit) -> dict[str, Any]:
    """One timeline for the scripts. The lists marked "by kind" have one entry per stage and op."""
    timetable = timeline.timetable
    values = Values.of(timetable)
    fills = _fills(timetable)
    return {
        "stages": timetable.num_stages,
        "units": timetable.num_units,
        "slices": timetable.num_slices,
        "consumed": values.consumed,  # by kind: the values' numbers, for unit 0
        "produced": values.produced,
        "fills": fills,  # by kind: colours
        "reductionFills": [_mixed(*REDUCTION_COLOURS, place) for place in _places(timetable)],  # by stage
        "inks": ["#000" if _is_light(fill) else "#fff" for fill in fills],
        **_costs(costs, timetable),
        "lengths": timeline.lengths or [1] * timetable.num_units,
        "peaks": timeline.peak_memory,
        "inBytes": timeline.memory_unit == BYTES,
        "limits": _limits(memory_limit, timetable.num_ranks),
        "ranks": [_rank(timeline, rank, each) for rank, each in enumerate(_delays(timeline, costs))],
        **_links(timeline, costs),
    }


def _delays(timeline: Timeline, costs: Costs | None) -> Sequence[Floats]:
    """Per rank, how long after its end each action's message arrives; in a measured timeline by the costs."""
    if timeline.delays or costs is None:
        return timeline.delays or [np.zeros(len(row)) for row in timeline.timetable.rows]
    row_costs = RowCosts(costs.of_units(timeline.timetable))
    return [row_costs.times(row).delays for row in timeline.timetable.rows]


def _rank(timeline: Timeline, rank: int, delays: Floats) -> dict[str, list[Any]]:
    row = timeline.timetable.rows[rank]
    reductions = [each for each in timeline.reductions if each.rank == rank]
    complete_at = complete_stages(row) if reductions else {}
    return {
        "kinds": kinds_of(row).tolist(),
        "units": row.microbatches.tolist(),
        "starts": _times(timeline, timeline.starts[rank]),
        "ends": _times(timeline, timeline.ends[rank]),
        "delays": delays.round(_DIGITS).tolist(),  # how long after its end an action's message arrives
        # stage, the index of the action that completes it, start, end
        "reductions": [
            [stage, complete_at[stage], *_times(timeline, np.array(times))] for stage, _, *times in reductions
        ],
    }


def _links(timeline: Timeline, costs: Costs | None) -> dict[str, Any]:
    """The links on which messages take time, if there are any: sender, receiver and the messages.

    A message is its value, the colours while it occupies the link and while it is on its way, and the times
    when it begins to occupy the link, when it has gone out and when it arrives.
    """
    found = [
        [
            *ranks,
            [
                [str(value), *MESSAGE_COLOURS[value.name], *_times(timeline, np.array(times))]
                for value, *times in messages
            ],
        ]
        for ranks, messages in transmissions(timeline, costs).items()
    ]
    return {"links": found} if found else {}


def _times(timeline: Timeline, clock: Floats) -> list[float]:
    """Times in ms from 0. Whole numbers are ints, which are shorter in JSON."""
    decimals = _DIGITS - math.ceil(math.log10(timeline.makespan or 1.0))
    times: list[float] = np.round(clock - first_start(timeline), decimals).tolist()
    return [int(time) if time.is_integer() else time for time in times]


def _costs(costs: Costs | None, timetable: Timetable) -> dict[str, list[float] | None]:
    """changes: by kind what an action adds to its rank's memory, of a unit of length 1.

    static: by rank what it holds all the time.
    past, pastGradients: by stage what the slices of a microbatch of length 1 share; only with slices.
    """
    num_stages = timetable.num_stages
    if costs is None:
        return {"static": None, "changes": None}
    own = costs.of_units(timetable)
    changes = [own.memory[op][stage] for stage in range(num_stages) for op in Op]
    stages = map(timetable.stages_of, range(timetable.num_ranks))
    static = [sum(own.static[stage] for stage in each) for each in stages]
    shared = {"past": own.past, "pastGradients": own.past_gradients} if timetable.num_slices > 1 else {}
    return {"static": static, "changes": changes, **shared}


def _limits(memory_limit: MemoryLimit, num_ranks: int) -> list[float | None]:
    """The limit of each rank, None without a limit."""
    limits = limits_per_rank(memory_limit, num_ranks)
    return [limit if math.isfinite(limit) else None for limit in limits]


def _fills(timetable: Timetable) -> list[str]:
    """The colour of each kind: dark for a rank's first stage, light for its last."""
    return [_mixed(*COLOURS[op], place) for place in _places(timetable) for op in Op]


def _places(timetable: Timetable) -> list[float]:
    """For each stage, its place on its rank: 0 for the rank's first stage, up to 1 for a rank's last."""
    places = index_on_rank(timetable)
    last = max(*places, 1)
    return [place / last for place in places]


def _mixed(one: str, other: str, share: float) -> str:
    """A mixture of two colours as #rrggbb. share: how much of `other` is in it, 0 to 1."""
    pairs = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(a + (b - a) * share) for a, b in pairs).hex()


def _is_light(colour: str) -> bool:
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.299 * red + 0.587 * green + 0.114 * blue > 150  # the luma of ITU-R BT.601


# ---------------------------------------------------------------- texts and tables, which need no script


def _notes(notes: Iterable[str]) -> str:
    items = [f"<pre>{escape(note)}</pre>" if "\n" in note else f"<p>{escape(note)}</p>" for note in notes]
    return f'<div class="notes">{"".join(items)}</div>'


def _summary(panels: Panels) -> str:
    figures = ("stages/rank", "makespan", "max span", "bubble", "bubble rate")
    decimals = decimals_of(timeline.makespan for _, timeline in panels)
    # Activations and bytes have a column each.
    peaks = dict.fromkeys(peak_name(timeline) for _, timeline in panels if peak_text(timeline))
    rows = [
        (
            title,
            *_figures(timeline, decimals),
            *(peak_text(timeline) if peak_name(timeline) == name else "" for name in peaks),
        )
        for title, timeline in panels
    ]
    return _table("summary", ("schedule", *figures, *peaks), rows)


def _figures(timeline: Timeline, decimals: int) -> tuple[str, ...]:
    timetable = timeline.timetable
    return (
        f"{timetable.num_stages / timetable.num_ranks:g}",
        f"{digits(timeline.makespan, decimals)} ms",
        f"{digits(timeline.max_span, decimals)} ms",
        f"{digits(timeline.bubble, decimals)} ms",
        percent(timeline.bubble_rate),
    )


def _panel(title: str, timeline: Timeline) -> str:
    ranks = _table("ranks", ("", "span", "bubble rate", "peak"), _rank_figures(timeline))
    return (
        f'<section class="panel"><header><h2>{escape(title)}</h2>'
        f"<p>{headline(timeline)}</p></header>\n"
        f'<div class="body"><div class="drawing"><canvas tabindex="0" role="application" '
        f'aria-label="{escape(title)}, drawn to scale" aria-describedby="hint tip"></canvas>'
        f'<svg aria-hidden="true"><path/><path/></svg></div>\n{ranks}</div></section>'
    )


def _rank_figures(timeline: Timeline) -> list[tuple[str, ...]]:
    decimals = decimals_of(map(timeline.span, range(timeline.timetable.num_ranks)))
    return [
        (
            f"rank {rank}",
            f"{digits(timeline.span(rank), decimals)} ms",
            percent(timeline.idle(rank) / (timeline.span(rank) or 1.0)),
            peak_text(timeline, rank),
        )
        for rank in range(timeline.timetable.num_ranks)
    ]


def _table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    lines = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(each)}</td>" for each in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<table class="{name}"><thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>'


def _legend(panels: Panels, *, level: bool, limit: bool, links: bool) -> str:
    """The ops and reductions that the panels contain, in two shades if a rank has several stages."""
    timetables = [timeline.timetable for _, timeline in panels]
    several = any(timetable.num_stages > timetable.num_ranks for timetable in timetables)
    shown = [op for op in Op if any((row.ops == op).any() for each in timetables for row in each.rows)]
    fills = {f"{op} {MEANING[op]}": COLOURS[op] for op in shown}
    if any(timeline.reductions for _, timeline in panels):
        fills[REDUCTION_MEANING] = REDUCTION_COLOURS
    messages = [
        _swatch(MESSAGE_MEANING[name], "op", f"--first:{sent};--later:{on_way}")
        for name, (sent, on_way) in MESSAGE_COLOURS.items()
    ]
    items = [
        *(
            _swatch(text, "op", f"--first:{colours[0]};--later:{colours[several]}")
            for text, colours in fills.items()
        ),
        *(messages if links else []),
        _swatch("bubble", "bubble"),
        *([_swatch("memory", "level")] if level else []),
        *([_swatch("limit", "limit")] if limit else []),
        *([_swatch("light: a rank’s later stage", "op", _LIGHT)] if several else []),
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(text: str, name: str, style: str = "") -> str:
    return f'<li><span class="swatch {name}" style="{style}"></span>{text}</li>'
