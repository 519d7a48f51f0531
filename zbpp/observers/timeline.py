"""The timeline of a measured step: the records of all ranks together."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from zbpp.devices import highest_allocated_bytes, is_accelerator
from zbpp.job.agreement import gather
from zbpp.observers.record import Messages, Spans, StepRecord
from zbpp.schedule import Timeline, Timetable
from zbpp.schedule.timeline import CopySpan, Reduction, Transfer


def measured_timeline(
    record: StepRecord, timetable: Timetable, group: dist.ProcessGroup | None = None
) -> Timeline:
    """The last recorded step of all ranks as a Timeline that starts at 0 ms. Collective.

    peak_memory, in bytes, is `peak_memory_bytes` of each rank: of its process so far, not of this step.
    """
    offset = clock_offset(group)
    mine = (
        record.times() - offset,
        _earlier(record.messages(), offset),
        [(stage, begin - offset, end - offset) for stage, begin, end in record.reductions()],
        [(*what, begin - offset, end - offset) for *what, begin, end in record.copies()],
        peak_memory_bytes(record.device),
        record.exposed(),
    )
    times, messages, reductions, copies, peaks, exposed = zip(*gather(mine, group), strict=True)
    origin = min(float(each[0, 0]) for each in times)
    return Timeline(
        timetable,
        starts=tuple(each[:, 0] - origin for each in times),
        ends=tuple(each[:, 1] - origin for each in times),
        peak_memory=tuple(map(float, peaks)),
        transfers=tuple(_transfers([_earlier(each, origin) for each in messages], timetable)),
        reductions=tuple(
            each for rank, spans in enumerate(reductions) for each in _in_turn(rank, spans, origin)
        ),
        copies=tuple(
            CopySpan(value, rank, is_out, begin - origin, end - origin)
            for rank, each in enumerate(copies)
            for value, is_out, begin, end in each
        ),
        exposed=tuple(
            np.zeros(len(spans)) if waited is None else waited
            for spans, waited in zip(times, exposed, strict=True)
        )
        if any(waited is not None for waited in exposed)
        else (),
        memory_unit="bytes",
        measured=True,
    )


def _earlier(messages: Messages, offset: float) -> Messages:
    sent, arrived = ({value: time - offset for value, time in each.items()} for each in messages)
    return sent, arrived


def _transfers(messages: Sequence[Messages], timetable: Timetable) -> Iterator[Transfer]:
    """The messages of all ranks as Transfers. messages: per rank, sent from it and arrived on it."""
    for sender, (sent, _) in enumerate(messages):
        for value, time_sent in sent.items():
            receiver = timetable.rank_of[value.stage]
            yield Transfer(value, sender, receiver, time_sent, messages[receiver][1][value])


def _in_turn(rank: int, spans: Spans, origin: float) -> Iterator[Reduction]:
    """One rank's reductions, in the order of their ends. What waits behind another one has not started."""
    free = 0.0
    for stage, begin, end in spans:
        start, free = max(free, begin - origin), end - origin
        yield Reduction(stage, rank, start, free)


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """The ms to subtract from this process's clock, so that clocks of several machines agree. Collective.

    0 on one machine, whose processes share a clock. Several machines count from a barrier, which they leave
    within a fraction of a millisecond.
    """
    if len(set(gather(socket.gethostname(), group))) == 1:
        return 0.0
    dist.barrier(group=group)
    return time.perf_counter() * 1e3


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has used so far: its tensors on the device; on the CPU, all of it."""
    if is_accelerator(device):
        return highest_allocated_bytes(device)
    import resource  # Unix only, and only the CPU path needs it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
