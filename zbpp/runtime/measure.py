"""What a step really did: measured timelines, and the costs that a planner can use."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zbpp.runtime.world import gather
from zbpp.schedule import Costs, Op, Timeline, Timetable, consumes, produces

Times = npt.NDArray[np.float64]


class Recorder:
    """Start and end of every action of one step, in ms; CUDA events on a GPU, a clock on the CPU.

    On the CPU the clock is the machine's (CLOCK_MONOTONIC), the same for all its processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[float | torch.cuda.Event] = []
        self._origin: tuple[float, torch.cuda.Event | None] = (0.0, None)

    def begin(self) -> None:
        """Forget what was recorded; a step begins."""
        self._marks.clear()
        event = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._origin = (time.perf_counter() * 1e3, event)

    def start(self) -> None:
        """An action starts."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter() * 1e3)

    stop = start  # a mark is a mark

    def times(self) -> Times:
        """[actions, 2]: start and end of each, in ms of the machine's clock."""
        clock, event = self._origin
        if event is not None:
            torch.cuda.synchronize(self.device)
        marks = [
            mark if event is None or isinstance(mark, float) else clock + event.elapsed_time(mark)
            for mark in self._marks
        ]
        return np.array(marks, dtype=np.float64).reshape(-1, 2)


def measured_timeline(
    recorder: Recorder, timetable: Timetable, group: dist.ProcessGroup | None = None
) -> Timeline:
    """The last recorded step of all ranks as a Timeline that starts at 0 ms. Collective.

    peak_memory is bytes: the highest the allocator of each rank has seen (CUDA), or the
    process's largest resident size (CPU).
    """
    times = recorder.times() - _clock_offset(group)
    everyone = gather((times, peak_memory_bytes(recorder.device)), group)
    origin = min(float(times[0, 0]) for times, _ in everyone)
    return Timeline(
        timetable,
        starts=tuple(times[:, 0] - origin for times, _ in everyone),
        ends=tuple(times[:, 1] - origin for times, _ in everyone),
        peak_memory=tuple(float(peak) for _, peak in everyone),
    )


def _clock_offset(group: dist.ProcessGroup | None) -> float:
    """What to subtract from this process's clock (ms) to compare it with those of other machines.

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


def measured_costs(timeline: Timeline) -> Costs:
    """Per-stage median durations of a measured timeline, and its message time, as Costs.

    What a timetable lacks (B and W under BW alone, or the reverse) is filled in by B + W = BW, halves
    each where nothing is known. comm is the median delay between a message's producer and a
    consumer that waited for it.
    """
    durations: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True):
        for action, duration in zip(row, (ends - starts).tolist(), strict=True):
            durations[action.stage, action.op].append(duration)

    def of(op: Op, stage: int) -> float | None:
        found = durations.get((stage, op))
        return median(found) if found else None

    stages = range(timeline.timetable.num_stages)
    f = [of(Op.F, stage) or 0.0 for stage in stages]
    whole = [of(Op.BW, stage) for stage in stages]
    b = [_first(of(Op.B, s), _half(whole[s])) for s in stages]
    w = [_first(of(Op.W, s), _half(whole[s])) for s in stages]
    bw = [_first(whole[s], b[s] + w[s]) for s in stages]
    return Costs(f=f, b=b, w=w, bw=bw, comm=_message_time(timeline))


def _half(value: float | None) -> float | None:
    return None if value is None else value / 2


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


def _message_time(timeline: Timeline) -> float:
    """The median delay of messages that their consumers waited for."""
    timetable = timeline.timetable
    made: dict[object, tuple[int, float]] = {}
    for rank, row in enumerate(timetable.rows):
        for action, end in zip(row, timeline.ends[rank].tolist(), strict=True):
            made |= dict.fromkeys(produces(action, timetable.num_stages), (rank, end))
    delays = []
    for rank, row in enumerate(timetable.rows):
        idle_since = 0.0
        for action, start, end in zip(
            row, timeline.starts[rank].tolist(), timeline.ends[rank].tolist(), strict=True
        ):
            for value in consumes(action):
                sender, sent = made[value]
                if sender != rank and sent >= idle_since:
                    delays.append(start - sent)
            idle_since = end
    return max(0.0, median(delays)) if delays else 0.0
