"""What a step really did: measured timelines, and the costs that a planner can use."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zbpp.runtime.world import gather
from zbpp.schedule import Costs, Op, Timeline, Timetable, Value, consumes, produces
from zbpp.schedule.simulate import Transfer

Times = npt.NDArray[np.float64]
Mark = float | torch.cuda.Event
Messages = tuple[dict[Value, float], dict[Value, float]]  # sent by a rank, arrived there: ms


class Recorder:
    """Start and end of every action of one step, in ms; CUDA events on a GPU, a clock on the CPU.

    On the CPU the clock is the machine's (CLOCK_MONOTONIC), the same for all its processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Mark] = []
        self._sent: dict[Value, Mark] = {}
        self._arrived: dict[Value, Mark] = {}
        self._origin: tuple[float, torch.cuda.Event | None] = (0.0, None)

    def begin(self) -> None:
        """Forget what was recorded; a step begins."""
        for record in (self._marks, self._sent, self._arrived):
            record.clear()
        event = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._origin = (time.perf_counter() * 1e3, event)

    def start(self) -> None:
        """An action starts."""
        self._marks.append(self._mark())

    stop = start  # a mark is a mark

    def sent(self, value: Value) -> None:
        """A message is given away."""
        self._sent[value] = self._mark()

    def arrived(self, value: Value) -> None:
        """A message is there: its receiver has waited for it."""
        self._arrived[value] = self._mark()

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self) -> Times:
        """[actions, 2]: start and end of each, in ms of the machine's clock."""
        return np.array(self._on_the_clock(self._marks), dtype=np.float64).reshape(-1, 2)

    def messages(self) -> Messages:
        """When each message from here was given away, and when each to here was there; as `times`."""
        sent, arrived = (
            dict(zip(marks, self._on_the_clock(marks.values()), strict=True))
            for marks in (self._sent, self._arrived)
        )
        return sent, arrived

    def _on_the_clock(self, marks: Iterable[Mark]) -> list[float]:
        clock, event = self._origin
        if event is None:
            return [mark for mark in marks if isinstance(mark, float)]  # all
        torch.cuda.synchronize(self.device)
        return [clock + event.elapsed_time(mark) for mark in marks if isinstance(mark, torch.cuda.Event)]


def measured_timeline(
    recorder: Recorder, timetable: Timetable, group: dist.ProcessGroup | None = None
) -> Timeline:
    """The last recorded step of all ranks as a Timeline that starts at 0 ms. Collective.

    peak_memory is bytes: the highest the allocator of each rank has seen (CUDA), or the
    process's largest resident size (CPU).
    """
    offset = clock_offset(group)
    mine = (
        recorder.times() - offset,
        _earlier(recorder.messages(), offset),
        peak_memory_bytes(recorder.device),
    )
    times, messages, peaks = zip(*gather(mine, group), strict=True)
    origin = min(float(each[0, 0]) for each in times)
    return Timeline(
        timetable,
        starts=tuple(each[:, 0] - origin for each in times),
        ends=tuple(each[:, 1] - origin for each in times),
        peak_memory=tuple(map(float, peaks)),
        transfers=tuple(_transfers([_earlier(each, origin) for each in messages], timetable)),
    )


def _earlier(messages: Messages, offset: float) -> Messages:
    sent, arrived = ({value: time - offset for value, time in each.items()} for each in messages)
    return sent, arrived


def _transfers(messages: Sequence[Messages], timetable: Timetable) -> Iterator[Transfer]:
    """messages: of every rank."""
    for sender, (sent, _) in enumerate(messages):
        for value, time_sent in sent.items():
            receiver = timetable.rank_of[value.stage]
            yield Transfer(value, sender, receiver, time_sent, messages[receiver][1][value])


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """What to subtract from this process's clock (ms) to compare it with those of other machines. Collective.

    One machine has one clock. Several are aligned at a barrier, to a fraction of a millisecond.
    """
    if len(set(gather(socket.gethostname(), group))) == 1:
        return 0.0
    dist.barrier(group=group)
    return time.perf_counter() * 1e3


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has used on its device so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Unix only, and only the CPU path needs it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured_costs(*timelines: Timeline) -> Costs:
    """Per-stage median durations and message times of measured steps of one cut, as Costs in ms.

    Timetables may differ. What all of them lack (B and W under BW alone, or the reverse) is filled in by
    B + W = BW, halves each where nothing is known. A message's time is the delay between its producer
    and a consumer that waited for it; a stage whose messages nobody waited for gets the median of all.
    """
    durations: dict[tuple[int, Op], list[float]] = defaultdict(list)
    delays: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        _collect_durations(timeline, durations)
        _collect_delays(timeline, delays)

    def of(op: Op, stage: int) -> float | None:
        found = durations.get((stage, op))
        return median(found) if found else None

    stages = range(timelines[0].timetable.num_stages)
    whole = [of(Op.BW, stage) for stage in stages]
    b = [_first(of(Op.B, s), _half(whole[s])) for s in stages]
    w = [_first(of(Op.W, s), _half(whole[s])) for s in stages]
    usual = median([delay for found in delays.values() for delay in found] or [0.0])
    return Costs(
        f=[of(Op.F, stage) or 0.0 for stage in stages],
        b=b,
        w=w,
        bw=[_first(whole[s], b[s] + w[s]) for s in stages],
        comm=[max(0.0, median(delays.get(stage, [usual]))) for stage in stages],
    )


def _half(value: float | None) -> float | None:
    return None if value is None else value / 2


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


def _collect_durations(timeline: Timeline, into: dict[tuple[int, Op], list[float]]) -> None:
    for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True):
        for action, duration in zip(row, (ends - starts).tolist(), strict=True):
            into[action.stage, action.op].append(duration)


def _collect_delays(timeline: Timeline, into: dict[int, list[float]]) -> None:
    """By the stage that a message left: the delays of those whose consumer was idle when they were made."""
    timetable = timeline.timetable
    made: dict[object, tuple[int, int, float]] = {}
    for rank, row in enumerate(timetable.rows):
        for action, end in zip(row, timeline.ends[rank].tolist(), strict=True):
            made |= dict.fromkeys(produces(action, timetable.num_stages), (rank, action.stage, end))
    for rank, row in enumerate(timetable.rows):
        idle_since = 0.0
        for action, start, end in zip(
            row, timeline.starts[rank].tolist(), timeline.ends[rank].tolist(), strict=True
        ):
            for value in consumes(action):
                sender, stage, sent = made[value]
                if sender != rank and sent >= idle_since:
                    into[stage].append(start - sent)
            idle_since = end
