"""How a pipeline ends: closed by its user, or by an error."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from zbpp.error_text import error_text
from zbpp.runtime.engine import Engine
from zbpp.runtime.groups import close_groups
from zbpp.runtime.world import gather
from zbpp.schedule import Timetable


class PipelineEnd:
    """The part of Pipeline that closes it."""

    timetable: Timetable
    device: torch.device
    group: dist.ProcessGroup | None
    _engine: Engine
    _made_group: dist.ProcessGroup | None  # made for a pipeline of one rank, which closes it

    def meet(self, name: str) -> None:
        """Before a collective call of this name: see whether other ranks make another call.

        If one does, the pipeline ends, and AgreementError is raised.
        """
        try:
            self._engine.meet(name)
        except BaseException as error:
            if not self._engine.over:
                self._end(f"an earlier call failed ({error_text(error)})")
            raise

    def settle(self) -> None:
        """Called before the pipeline is closed; see PipelineValidation."""

    def close(self) -> None:
        """Give up the links and process groups that were made for this pipeline; no step follows.

        Modules, gradients and the group that the caller gave stay. Collective: a rank waits here until all
        ranks have come, since another may still read what this one has sent. After a failure, and the second
        time, it doesn't wait. Raises CommunicationError if another rank is gone.
        """
        if self._engine.over:
            self._close_made_group()
            return
        self.settle()
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if self.timetable.num_ranks > 1:
                gather(None, self.group)
        except Exception as error:
            self._engine.fail(error)
            raise
        finally:
            self._end("the pipeline was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._engine.over:  # other ranks may wait for a message of this one
            self._engine.fail(error)
            self._end(f"an error ended the pipeline ({error_text(error)})")
        else:
            self._close_made_group()

    def _end(self, why: str) -> None:
        self._engine.end(why)
        self._close_made_group()

    def _close_made_group(self) -> None:
        if self._made_group is not None:
            close_groups([self._made_group])
            self._made_group = None
