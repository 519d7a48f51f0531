"""Measured steps: their timelines, and the costs that a planner can use."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zbpp.autograd.copies import Watch
from zbpp.runtime.clocks import clock_of
from zbpp.runtime.world import gather
from zbpp.schedule import Action, Costs, Op, Recv, Send, Timeline, Timetable, Value, consumes, produces
from zbpp.schedule.copies import CopySpan
from zbpp.schedule.lower import Instruction
from zbpp.schedule.reductions import Reduction
from zbpp.schedule.simulate import Transfer

Times = npt.NDArray[np.float64]
Mark = Any  # of a Clock
Messages = tuple[dict[Value, float], dict[Value, float]]  # sent by a rank, arrived there: ms
Copies = list[tuple[Value, bool, float, float]]  # value, whether it leaves the device, start, end: ms
Spans = list[tuple[int, float, float]]  # stage, start, end: ms


class Recorder:
    """When each instruction of a rank began and ended in its last recorded step, in ms.

    Measured by CUDA events on a GPU: a recorded step waits for nothing, and whoever reads the times first
    waits for the device, once. On the CPU measured by the machine's clock, see clocks.py.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._clock = device, clock_of(device)
        self._marks: list[Mark] = []
        self._instructions: Sequence[Instruction | None] = ()
        self._reduced: list[tuple[int, Mark, Mark]] = []  # stage, begin, end; in the order of the ends
        self._copied: list[tuple[Value, bool, Mark, Mark]] = []  # value, is_out, begin, end

    @property
    def is_empty(self) -> bool:
        """Whether no step was recorded yet."""
        return not self._marks

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[], None]:
        """Start a new record of these instructions, which replaces the last one.

        Returns a function to be called where an instruction begins, and again where it ends, in their order.
        None stands for work that is no instruction. The sequence may still grow.
        """
        marks: list[Mark] = []
        self._instructions, self._marks, self._reduced, self._copied = instructions, marks, [], []
        self._clock.begin()
        mark = self._clock.mark
        return lambda: marks.append(mark())

    def reduction(self, stage: int) -> Callable[[], None]:
        """Note that a stage's reduction starts; return a function to be called when it has ended.

        The function may be called by another thread. On a GPU both calls belong into the stream whose work
        they mark. A reduction whose function is never called is not recorded.
        """
        mark = self._clock.mark
        reduced, begin = self._reduced, mark()
        return lambda: reduced.append((stage, begin, mark()))

    def copy(self, value: Value, *, is_out: bool) -> Watch:
        """What notes a copy of a value: see Watch; called by another thread, or in a CUDA stream."""
        mark, copied = self._clock.mark, self._copied

        def begin() -> Callable[[], None]:
            start = mark()
            return lambda: copied.append((value, is_out, start, mark()))

        return begin

    def times(self) -> Times:
        """[actions, 2]: start and end of each action, in ms of the machine's clock."""
        spans = [span for instruction, span in self._spans() if isinstance(instruction, Action)]
        return np.array(spans, dtype=np.float64).reshape(-1, 2)

    def messages(self) -> Messages:
        """When the send of each message from here began, and when each message to here had arrived.

        In ms of the machine's clock.
        """
        spans = list(self._spans())
        sent = {each.value: begin for each, (begin, _) in spans if isinstance(each, Send)}
        arrived = {each.value: end for each, (_, end) in spans if isinstance(each, Recv)}
        return sent, arrived

    def reductions(self) -> Spans:
        """Each stage with the begin and end of its reduction in ms of the machine's clock, by their ends."""
        stages, begins, ends = zip(*self._reduced, strict=True) if self._reduced else ((), (), ())
        spans = zip(stages, self._clock.in_ms(begins), self._clock.in_ms(ends), strict=True)
        return sorted(spans, key=lambda span: span[2])

    def copies(self) -> Copies:
        """Each value that was copied, whether out of the device, with begin and end, in order."""
        values, are_out, begins, ends = zip(*self._copied, strict=True) if self._copied else ((),) * 4
        in_ms = self._clock.in_ms
        return [*zip(values, are_out, in_ms(begins), in_ms(ends), strict=True)]

    def _spans(self) -> Iterator[tuple[Instruction | None, tuple[float, float]]]:
        """Each instruction with its begin and end."""
        marks = self._clock.in_ms(self._marks)
        return zip(self._instructions, zip(marks[::2], marks[1::2], strict=True), strict=True)


def measured_timeline(
    recorder: Recorder, timetable: Timetable, group: dist.ProcessGroup | None = None
) -> Timeline:
    """The last recorded step of all ranks as a Timeline that starts at 0 ms. Collective.

    peak_memory, in bytes, is `peak_memory_bytes` of each rank: of its process so far, not of this step.
    """
    offset = clock_offset(group)
    mine = (
        recorder.times() - offset,
        _earlier(recorder.messages(), offset),
        [(stage, begin - offset, end - offset) for stage, begin, end in recorder.reductions()],
        [(*what, begin - offset, end - offset) for *what, begin, end in recorder.copies()],
        peak_memory_bytes(recorder.device),
    )
    times, messages, reductions, copies, peaks = zip(*gather(mine, group), strict=True)
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
    """The most memory that this process has used so far: CUDA's allocator, or resident size on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Unix only, and only the CPU path needs it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured_costs(*timelines: Timeline) -> Costs:
    """Per-stage median durations and message times of measured steps with the same stages, as Costs in ms.

    Their timetables may differ. An op that none of them has is filled in: BW as B + W; B and W as half of BW
    each. A message's time is the delay from the end of its producer to the start of a consumer that was idle
    and waited for it. A stage without such a message gets the median of all stages. reduce is the median
    duration of a stage's reduction, without the time for which it waited behind another one; 0 without any.
    host is the median time of copying what a stage's F saves, of the slower direction; 0 without copies.
    """
    durations: dict[tuple[int, Op], list[float]] = defaultdict(list)
    delays: dict[int, list[float]] = defaultdict(list)
    reduced: dict[int, list[float]] = defaultdict(list)
    copied: dict[int, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        _collect_durations(timeline, durations)
        for each in timeline.reductions:
            reduced[each.stage].append(each.end - each.start)
        _collect_delays(timeline, delays)
        for copy in timeline.copies:
            if copy.value.name == "saved":
                copied[copy.value.stage][copy.is_out].append(copy.end - copy.start)

    def of(op: Op, stage: int) -> float | None:
        found = durations.get((stage, op))
        return median(found) if found else None

    stages = range(timelines[0].timetable.num_stages)
    bw = [of(Op.BW, stage) for stage in stages]
    b = [_first(of(Op.B, stage), _half(bw[stage])) for stage in stages]
    w = [_first(of(Op.W, stage), _half(bw[stage])) for stage in stages]
    usual = median([delay for found in delays.values() for delay in found] or [0.0])
    return Costs(
        f=[of(Op.F, stage) or 0.0 for stage in stages],
        b=b,
        w=w,
        bw=[_first(bw[stage], b[stage] + w[stage]) for stage in stages],
        comm=[max(0.0, median(delays.get(stage, [usual]))) for stage in stages],
        reduce=[median(reduced.get(stage, [0.0])) for stage in stages] if reduced else 0.0,
        host=[max(map(median, copied[stage].values()), default=0.0) for stage in stages] if copied else 0.0,
    )


def _half(value: float | None) -> float | None:
    return None if value is None else value / 2


def _first(*values: float | None) -> float:
    """The first value that is known, 0 without any."""
    return next((value for value in values if value is not None), 0.0)


def _collect_durations(timeline: Timeline, into: dict[tuple[int, Op], list[float]]) -> None:
    for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True):
        for action, duration in zip(row, (ends - starts).tolist(), strict=True):
            into[action.stage, action.op].append(duration)


def _collect_delays(timeline: Timeline, into: dict[int, list[float]]) -> None:
    """Add each message's delay under the stage that sent it, if its consumer's rank was idle and waited."""
    timetable = timeline.timetable
    made: dict[object, tuple[int, int, float]] = {}  # value -> rank, stage and end of its producer
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
