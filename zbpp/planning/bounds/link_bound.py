"""A bound by the work of a link: it sends one message after another.

    link 1 -> 2     |==x(2,0)==|==x(2,1)==| ... |==x(2,7)==|
               made at the earliest                         what follows the last one, at least

The first message is made no earlier than by a lone unit. Then the link is occupied for the sum of all its
messages. Whichever of them is the last, its consumer starts a latency later. From there the consumer's unit
takes no less to its last W than a lone unit does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from zbpp.planning.bounds.relaxation import Relaxation
from zbpp.schedule.dataflow_arrays import kind_of
from zbpp.schedule.timetable import Op


class _Stream(NamedTuple):
    """The messages of one stage over one link, a lone unit's. ms.

    made: when the first one is there. busy: of each. follows: from when it has gone out to the last W.
    """

    made: float
    busy: float
    follows: float


def link_bounds(relaxation: Relaxation) -> Iterator[tuple[tuple[int, int], float]]:
    """For each link that messages occupy: ((sender, receiver), the least makespan in ms).

    For a card that links of a rank share: ((rank, rank), the least makespan).
    """
    streams = defaultdict[tuple[int, int], list[_Stream]](list)
    for link, stream in _streams(relaxation):
        streams[link].append(stream)
    for link, own in streams.items():
        work = relaxation.problem.num_units * sum(each.busy for each in own)
        yield link, min(each.made for each in own) + work + min(each.follows for each in own)


def _streams(relaxation: Relaxation) -> Iterator[tuple[tuple[int, int], _Stream]]:
    problem = relaxation.problem
    routes, length, last = problem.stage_costs.routes, problem.length(0), problem.num_stages - 1
    for stage in range(problem.num_stages if routes else 0):
        for op, target in ((Op.F, stage + 1), (Op.B, stage - 1)):
            route = routes[kind_of(stage, op)]
            if route is None or not route.busy:
                continue
            made = (relaxation.f_end if op == Op.F else relaxation.b_end)[stage]
            starts = relaxation.f_start if op == Op.F else relaxation.b_start
            ends = relaxation.w_end[: last + 1 if op == Op.F else stage]
            after = problem.first_message(stage, target) - length * route.busy
            stream = _Stream(made, length * route.busy, after + max(ends) - starts[target])
            yield (problem.rank_of[stage], route.queue), stream
