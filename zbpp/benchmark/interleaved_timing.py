"""Timing in turns: one step of each runner after the other, so that a slow moment of the machine hits all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from torch import Tensor

from zbpp.benchmark.workload import Workload
from zbpp.error_text import first_cause
from zbpp.job.agreement import gather
from zbpp.measure import measured_costs
from zbpp.measure.live_tensors import live_bytes
from zbpp.observers.recorder import Recorder
from zbpp.observers.timeline import clock_offset
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, PlanError, Timeline, Timetable, simulate


@dataclass
class TimedRunner:
    """A runner and its measurements: per turn a wall time (ms) and a timeline, per rank a peak of memory.

    runner: None if it failed; failure then says why, in a line. peak_bytes: empty for
    emulated stages, which hold next to nothing.
    """

    name: str
    runtime: str
    timetable: Timetable
    runner: Runner | None = None
    failure: str = ""
    peak_bytes: list[int] = field(default_factory=list)
    wall_times: list[float] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def step_time(self) -> float:
        """The median wall time of `step`: from the first rank's call to the last rank's return, ms."""
        return median(self.wall_times)

    @property
    def typical(self) -> Timeline:
        """The timeline of the turn with the median wall time."""
        order = sorted(range(len(self.wall_times)), key=self.wall_times.__getitem__)
        return self.timelines[order[len(order) // 2]]

    @property
    def costs(self) -> Costs:
        """Medians over all turns."""
        return measured_costs(*self.timelines)

    @property
    def predicted(self) -> Timeline | None:
        """The timeline that these costs predict; None for an order that the simulator refuses."""
        try:
            return simulate(self.typical.timetable, self.costs)
        except PlanError:  # torch's looped BFS has descending microbatches
            return None


def start(
    name: str,
    workload: Workload,
    timetable: Timetable,
    make: Callable[[Workload, Timetable], Runner] | None = None,
) -> TimedRunner:
    """Start zbpp under a timetable and run two steps: the ranks agree on shapes, then the peak is measured.

    make: None: a ZbppRunner. Collective.
    """
    made: list[Runner] = []
    runner = make or ZbppRunner
    peak = _start_and_measure_peak(workload, timetable, lambda: runner(workload, timetable), made)
    peaks = [] if workload.is_emulated else gather(peak)
    return TimedRunner(name, ZbppRunner.runtime, timetable, made[0], peak_bytes=peaks)


def try_to_start(timed: TimedRunner, workload: Workload, make: Callable[[], Runner]) -> TimedRunner:
    """As `start`, for a runner that may fail: if it fails on any rank, timed.failure says why, on every rank.

    Collective.
    """
    made: list[Runner] = []
    peak, problem = 0, None
    try:
        peak = _start_and_measure_peak(workload, timed.timetable, make, made)
    except Exception as error:  # another runtime may raise anything
        problem = (time.time(), _first_line(error))
    if problem is not None:  # outside `except`: the error, and what its frames refer to, are freed by now
        for runner in made:
            runner.close()
    everyone = gather((peak, problem))
    failures = sorted(problem for _, problem in everyone if problem is not None)
    if failures:  # the earliest: the other ranks failed because of it
        timed.failure = failures[0][1]
    else:
        timed.runner = made[0]
        timed.peak_bytes = [] if workload.is_emulated else [peak for peak, _ in everyone]
    return timed


def _first_line(error: BaseException) -> str:
    """The first line of the error's original cause."""
    error = first_cause(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _start_and_measure_peak(
    workload: Workload, timetable: Timetable, make: Callable[[], Runner], made: list[Runner]
) -> int:
    """Append the runner to `made`; return this rank's peak in bytes.

    The peak has three parts: the stages, what the runner keeps from step to step, and what its second step
    needs on top.
    """

    def first_step() -> None:
        made.append(make())
        _step_once(made[0], workload)

    stages = workload.parameter_bytes(timetable)  # builds them, so that they are not counted again below
    device = workload.here.device
    with without_garbage_collection():
        kept = live_bytes(first_step, device).after
        needed = live_bytes(lambda: _step_once(made[0], workload), device).highest
    return stages + kept + needed


def _step_once(runner: Runner, workload: Workload) -> None:
    runner.step(*workload.batch(runner.timetable, 0))
    workload.drop_gradients(runner.timetable)


def time_in_turns(timed: Sequence[TimedRunner], workload: Workload, num_turns: int) -> None:
    """Take `num_turns` turns of one step each; another runner begins each turn. Collective."""
    for number in range(num_turns):
        first = number % max(1, len(timed))
        with without_garbage_collection():
            for each in (*timed[first:], *timed[:first]):
                _time_step(each, workload, number)


def close_all(timed: Iterable[TimedRunner]) -> None:
    """Close the runners' connections; their measurements stay. Collective."""
    for each in timed:
        if each.runner is not None:
            each.runner.close()


def _time_step(timed: TimedRunner, workload: Workload, number: int) -> None:
    runner = timed.runner
    if runner is None:
        return
    args, target = workload.batch(runner.timetable, number)
    workload.synchronise()
    workload.barrier()
    begin = time.perf_counter() * 1e3
    runner.step(args, target)
    workload.synchronise()
    end = time.perf_counter() * 1e3
    workload.drop_gradients(runner.timetable)
    offset = clock_offset()
    begins, ends = zip(*gather((begin - offset, end - offset)), strict=True)
    timed.wall_times.append(max(ends) - min(begins))
    timed.timelines.append(runner.timeline())


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage before, and none inside: neither times nor memory depend on when it happens."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ----------------------------------------------------------------
# A runner, which a benchmark times: a schedule under a runtime.


class Runner(Protocol):
    """One rank's part of a runtime that executes a schedule.

    timetable: says which rank has which stages. close: no step follows.
    """

    @property
    def runtime(self) -> str: ...
    @property
    def timetable(self) -> Timetable: ...
    def step(self, args: tuple[Tensor, ...], target: Tensor | None) -> list[Tensor]: ...
    def timeline(self) -> Timeline: ...
    def close(self) -> None: ...


class ZbppRunner:
    """zbpp's runtime."""

    runtime = "zbpp"

    def __init__(self, workload: Workload, timetable: Timetable) -> None:
        self.timetable = timetable
        self._pipeline = Pipeline(
            workload.stages(timetable),
            timetable,
            workload.model.loss,
            seed=workload.seed,
            timeout=workload.timeout,
        )
        self._recorder = Recorder()

    def step(self, args: tuple[Tensor, ...], target: Tensor | None) -> list[Tensor]:
        """One step of the pipeline; the microbatches' losses on the last stage's owner."""
        with self._pipeline.using(self._recorder):
            return self._pipeline.step(*args, target=target)

    def timeline(self) -> Timeline:
        """The last step as measured. Collective."""
        return self._recorder.timeline()

    def close(self) -> None:
        """Close the connections. Collective."""
        self._pipeline.close()
