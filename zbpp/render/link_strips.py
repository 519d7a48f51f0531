"""Strips below the ranks, one per link on which messages take time, in pictures and pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zbpp.render.style import MESSAGE_COLOURS, first_start
from zbpp.schedule.interpret.transmissions import Transmission
from zbpp.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRIP = 0.5  # of a rank's height in a picture

Links = Mapping[tuple[int, int], list[Transmission]]

_BOX = 0.42  # of a rank's height: of a message in its strip
_MOST_NAMES = 8  # of links beside a picture's strips


def draw_links(axes: Axes, timeline: Timeline, links: Links, inches_per_ms: float) -> None:
    """A picture's strips: dark while a message occupies the link, light and lower while it is on its way."""
    num_ranks, first = timeline.timetable.num_ranks, first_start(timeline)
    middles = [num_ranks + STRIP * place for place in range(len(links))]
    for middle, messages in zip(middles, links.values(), strict=True):
        for name, (dark, light) in MESSAGE_COLOURS.items():
            own = [each for each in messages if each.value.name == name]
            sent = [(each.start - first, each.gone - each.start) for each in own]
            on_way = [(each.gone - first, each.arrived - each.gone) for each in own]
            shortest = min((busy for _, busy in sent), default=0.0)
            edge = 0.5 if 72 * shortest * inches_per_ms > 2.5 else 0.0  # as around actions
            style: dict[str, Any] = {"facecolors": dark, "edgecolors": "white", "linewidths": edge}
            axes.broken_barh(on_way, (middle, _BOX / 2), facecolors=light, zorder=1)
            axes.broken_barh(sent, (middle - _BOX / 2, _BOX), zorder=2, **style)
    shown = [*zip(middles, links, strict=True)][:: max(1, len(links) // _MOST_NAMES)]
    ticks = {each: f"{each:g}" for each in axes.get_yticks()}
    ticks |= {middle: f"{sender} → {receiver}" for middle, (sender, receiver) in shown}
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.set_ylabel("rank, link")
    axes.set_ylim(num_ranks + STRIP * len(links), -0.5)
