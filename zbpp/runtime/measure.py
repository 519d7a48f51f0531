"""What a step really did: measured timelines, and the costs that a planner can use."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zbpp.runtime.world import gather
from zbpp.schedule import Action, Costs, Op, Recv, Send, Timeline, Timetable, Value, consumes, produces
from zbpp.schedule.lower import Instruction
from zbpp.schedule.simulate import Transfer

Times = npt.NDArray[np.float64]
Mark = float | torch.cuda.Event
Messages = tuple[dict[Value, float], dict[Value, float]]  # sent by a rank, arrived there: ms


class Recorder:
    """When each thing that a rank did in one step began and ended, in ms.

    CUDA events on a GPU; on the CPU the machine's clock (CLOCK_MONOTONIC), the same for all processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Mark] = []
        self._steps: Sequence[Instruction | None] = ()
        self._origin: tuple[float, torch.cuda.Event | None] = (0.0, None)

    def begin(self, steps: Sequence[Instruction | None]) -> Callable[[], None]:
        """Forget what was recorded; returns what to call where each of these begins, and where it ends.

        None stands for what is not to be recorded. steps may grow meanwhile.
        """
        marks: list[Mark] = []
        self._steps, self._marks = steps, marks
        if self.device.type != "cuda":
            self._origin = (0.0, None)
            return lambda: marks.append(time.perf_counter() * 1e3)
        torch.cuda.synchronize(self.device)
        self._origin = (time.perf_counter() * 1e3, _event())
        return lambda: marks.append(_event())

    def times(self) -> Times:
        """[actions, 2]: start and end of each, in ms of the machine's clock."""
        spans = [span for step, span in self._spans() if isinstance(step, Action)]
        return np.array(spans, dtype=np.float64).reshape(-1, 2)

    def messages(self) -> Messages:
        """When each message from here was given away, and when each to here was there; as `times`."""
        spans = list(self._spans())
        sent = {step.value: begin for step, (begin, _) in spans if isinstance(step, Send)}
        arrived = {step.value: end for step, (_, end) in spans if isinstance(step, Recv)}
        return sent, arrived

    def _spans(self) -> Iterator[tuple[Instruction | None, tuple[float, float]]]:
        marks = iter(self._on_the_clock())
        return zip(self._steps, zip(marks, marks, strict=True), strict=True)

    def _on_the_clock(self) -> list[float]:
        clock, origin = self._origin
        if origin is None:
            return [mark for mark in self._marks if isinstance(mark, float)]  # all
        torch.cuda.synchronize(self.device)
        events = [mark for mark in self._marks if isinstance(mark, torch.cuda.Event)]
        return [clock + origin.elapsed_time(event) for event in events]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


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
        memory_unit="bytes",
        measured=True,
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
