"""What a pipeline reports of its calls."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.engine import Engine
from zbpp.schedule import Timetable


class PipelineTimeline:
    """The part of Pipeline that reports."""

    timetable: Timetable
    group: dist.ProcessGroup | None
    _engine: Engine
    _timeout: float

    def receive_buffers(self) -> list[Tensor]:
        """The buffers that messages of `step` are received into: as many as are in use at once."""
        return self._engine.receive_buffers()
