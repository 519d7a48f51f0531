"""A runner, which a benchmark times: a schedule under a runtime."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from zbpp.benchmark.workload import Workload
from zbpp.runtime import Pipeline
from zbpp.runtime.measure import Recorder
from zbpp.schedule import Timeline, Timetable


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
