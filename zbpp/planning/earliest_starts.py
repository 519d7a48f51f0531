"""One microbatch alone in the pipeline: in which order its actions can run, and how soon.

An action waits for its inputs alone: no rank is busy with anything else. The inputs come from the data-flow
table. A kind is a stage and an op as one number, see `dataflow_arrays`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter

from zbpp.schedule.dataflow_arrays import producers, stage_of


def dependency_order(num_stages: int) -> list[int]:
    """All kinds, each after the kinds that it waits for."""
    waits_for = {kind: itertools.chain(*values) for kind, values in enumerate(producers(num_stages))}
    return list(TopologicalSorter(waits_for).static_order())


def earliest_starts(
    num_stages: int, duration: Sequence[float], message: Callable[[int, int], float]
) -> list[float]:
    """For each kind, the earliest time (ms) at which it can start: the length of the longest path to it.

    duration: of each kind (ms). message(source stage, target stage): the time (ms) of a message between them.
    B and BW make the same values. The faster of the two counts, so that no plan can start a kind earlier.
    """
    needed = producers(num_stages)
    starts = [0.0] * len(needed)

    def arrival(made_by: tuple[int, ...], kind: int) -> float:
        return min(
            starts[source] + duration[source] + message(stage_of(source), stage_of(kind))
            for source in made_by
        )

    for kind in dependency_order(num_stages):
        starts[kind] = max((arrival(made_by, kind) for made_by in needed[kind]), default=0.0)
    return starts
