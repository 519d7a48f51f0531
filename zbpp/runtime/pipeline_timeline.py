"""What a pipeline reports of its calls."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.engine import Engine
from zbpp.schedule import Timetable


class PipelineTimeline:
    """The part of Pipeline that reports."""

    timetable: Timetable
    group: dist.ProcessGroup | None
    _engine: Engine
    _records: Path | None  # where a failed call leaves records
    _ends_process: bool
    _timeout: float

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
