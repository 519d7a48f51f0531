"""The messages of a timeline: when each one was sent and when it arrived, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import Timeline, Transfer


def transfers_of(timeline: Timeline) -> list[Transfer]:
    """A timeline's messages: for each sending rank in turn, in the order of its sends."""
    if timeline.transfers or not timeline.message_ms:  # measured, with messages or without
        return list(timeline.transfers)
    ranks = range(timeline.timetable.num_ranks)
    return [transfer for rank in ranks for transfer in _predicted(timeline, rank)]


def _predicted(timeline: Timeline, rank: int) -> Iterator[Transfer]:
    """The predicted messages of a rank: sent when the value is made, received message_ms later."""
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
