"""A run that ends out of memory says on which rank, in which action, and how much memory it had allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zbpp.job.errors import is_out_of_memory
from zbpp.runtime import Extra
from zbpp.runtime.measure import peak_memory_bytes

_ACTION = re.compile(r"in (\d+(?:F|BW|B|W)\d+) ")  # a note of the Executor
_UPDATE = "the update"
_HINT = "`zbpp memory` with the arguments of this run shows each rank's curve, and each switch with its time"


@contextmanager
def updating() -> Iterator[None]:
    """Note on an error about memory that the optimizer's step raised it."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(f"in {_UPDATE}: the norm of the gradients and the optimizer's step")
        raise


class MemoryFailure(Extra):
    """Adds notes to out-of-memory errors. The error keeps its type; other errors stay as they are.

    rank, num_processes: of the job. device: of this rank. doing: what runs outside of the steps, in words.
    """

    name = "memory_failure"

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self.device = torch.device("cpu")
        self.doing = "while the plan, the model and the data are made"
        self._noted: BaseException | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add what is known to an out-of-memory error that leaves this context, once."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Add what is known to an out-of-memory error, once."""
        if is_out_of_memory(error) and error is not self._noted:
            self._noted = error
            at = _failed_at(error)
            error.add_note(self._measured(f"in {at}" if at else self.doing))
            error.add_note(_HINT)

    def _measured(self, doing: str) -> str:
        peak = peak_memory_bytes(self.device)
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            kind = f"allocated on its device, which has {total / 2**30:.3f} GiB"
        else:
            kind = "resident in its process"
        of = f" of {self._num_processes}" if self._num_processes > 1 else ""
        return (
            f"rank {self._rank}{of} is out of memory {doing}; its peak so far: {peak / 2**30:.3f} GiB {kind}"
        )


def _failed_at(error: BaseException) -> str:
    """The action whose error this is, such as 0F3, or `the update`; "" if it is neither."""
    for note in getattr(error, "__notes__", ()):
        found = _ACTION.match(note)
        if found:
            return found[1]
        if note.startswith(f"in {_UPDATE}"):
            return _UPDATE
    return ""
