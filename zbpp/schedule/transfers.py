"""When each message was on its way between two ranks, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import Timeline, Transfer


def transfers_of(timeline: Timeline) -> list[Transfer]:
    """A timeline's messages, by the rank that sends them, in the order in which it does."""
    if timeline.transfers or not timeline.message_ms:
        return list(timeline.transfers)
    return [each for rank in range(timeline.timetable.num_ranks) for each in _predicted(timeline, rank)]


def _predicted(timeline: Timeline, rank: int) -> Iterator[Transfer]:
    """A message is sent when it is made, and takes the time that the plan gives it."""
    timetable = timeline.timetable
    row, values = timetable.rows[rank], Values(timetable.num_stages, timetable.num_microbatches)
    positions, numbers = values.produced_in(row)
    receivers = np.array(timetable.rank_of)[values.stages(numbers)]
    leaves = receivers != rank
    sent = timeline.ends[rank][positions[leaves]]
    arrived = sent + np.array(timeline.message_ms)[row.stages[positions[leaves]]]
    for columns in zip(
        values.named(numbers[leaves]),
        receivers[leaves].tolist(),
        sent.tolist(),
        arrived.tolist(),
        strict=True,
    ):
        value, receiver, *times = columns
        yield Transfer(value, rank, receiver, *times)
