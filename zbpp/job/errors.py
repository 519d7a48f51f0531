"""Errors that any rank of a job may meet: a broken connection, memory that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

_OF_CPU = "DefaultCPUAllocator"  # torch raises a plain RuntimeError on the CPU


_SHARED_GPU = (
    "two processes use one GPU, which NCCL refuses: begin each process with "
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), before init_process_group, and start no more '
    "processes on a machine than it has GPUs"
)


class CommunicationError(RuntimeError):
    """A message did not come in time, or the rank at the other end is gone.

    On NCCL the device waits for messages, the program doesn't: at the timeout torch's watchdog ends the
    process.
    """

    @classmethod
    def at(cls, where: str, error: RuntimeError) -> Self:
        """torch's first line, without gloo's line of code and advice, behind where it was raised."""
        if "Duplicate GPU" in str(error):
            return cls(f"{where}: {_SHARED_GPU}")
        first_line = str(error).partition("\n")[0].partition(". This is typically")[0]
        return cls(f"{where}: " + re.sub(r"\[/\S+\.cc:\d+\] ", "", first_line))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_CPU in str(error)


@contextmanager
def communicating(where: str) -> Iterator[None]:
    """Turn torch's RuntimeError for a broken connection or a timeout into a CommunicationError at `where`.

    torch's is not shown besides: its text is gloo's advice, its stack zbpp's own.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise CommunicationError.at(where, error) from None
