"""What is measured of the steps of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.engine import Engine
from zbpp.runtime.measure import Recorder, measured_timeline
from zbpp.schedule import Timeline, Timetable
from zbpp.schedule.offload import RankOffload


class PipelineTimeline:
    """The part of Pipeline that measures its steps."""

    timetable: Timetable
    group: dist.ProcessGroup | None
    _engine: Engine
    _recorder: Recorder
    _recording: Recorder | None
    _records: Path | None  # where a failed call leaves records
    _ends_process: bool
    _timeout: float

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[None]:
        """Measure each action and message of the steps inside the block; `timeline` gives the last step.

        recorder: what notes them instead, and `timeline` does not.
        """
        self._recording = self._recorder if recorder is None else recorder
        try:
            yield
        finally:
            self._recording = None

    def name_actions(self, is_named: bool) -> None:
        """Show torch's profiler the instructions of the steps that follow by their text, `2F5`; or no longer.

        While they have no names, steps take no time for this.
        """
        self._engine.name_actions(is_named)

    def leave_records_in(self, folder: str | os.PathLike[str], *, ends_process: bool = False) -> None:
        """If a call fails on any rank, let each rank write `flight-rank-N.json` to this folder.

        The file holds the rank's last instructions with their times, where the other ranks were, and the
        Python stack: `zbpp hang FOLDER` shows them. A pipeline of one process writes nothing.

        ends_process: end this process, with its stack on standard error, if another rank has failed and this
        one does not notice it within a second, since it is in an endless loop, say. For jobs that end when a
        rank has failed: a job that makes a new Pipeline then must leave it out.
        """
        self._records, self._ends_process = Path(folder), ends_process
        self._engine.leave_records_in(self._records, self._timeout if ends_process else None)

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks of an error that was raised between calls; note on it which rank is behind.

        For a collective that timed out, and for an error after which this rank makes no more calls. The end
        of a with block does this. An error of a call has been explained already.
        """
        self._engine.explain(error)

    def receive_buffers(self) -> list[Tensor]:
        """The buffers that messages of `step` are received into: as many as are in use at once."""
        return self._engine.receive_buffers()

    def timeline(self) -> Timeline:
        """The last step inside `recording`, as it ran on all ranks; it starts at 0 ms. Collective.

        peak_memory as `measured_timeline` has it. Raises RuntimeError if no step was recorded.
        """
        if self._recorder.is_empty:
            raise RuntimeError("no step was recorded: run one inside `with pipeline.recording():`")
        return measured_timeline(self._recorder, self.timetable, self.group)

    @property
    def offload_plan(self) -> tuple[RankOffload, ...]:
        """What leaves in the next step, for every rank: an argument of `simulate`; () without offload."""
        return self._engine.offload_plan

    def offloaded_bytes(self, name: Literal["saved", "deferred"] = "saved") -> dict[int, int]:
        """Per stage of this rank, the most bytes of a microbatch that have left; {} without offload.

        name: "saved": of what F keeps for B; "deferred": of what B keeps for W.
        """
        return self._engine.offloaded_bytes(name)
