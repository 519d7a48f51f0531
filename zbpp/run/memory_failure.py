"""A run that ends out of memory says where, what it held, what was predicted, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zbpp.config import TrainConfig
from zbpp.job.errors import is_out_of_memory
from zbpp.runtime import Extra
from zbpp.schedule import Timetable
from zbpp.training.out_of_memory import failed_at, measured

_LONGEST = 15.0  # s
_SHARE = 0.6  # of the timeout: the rest is left for the end of the job


class MemoryFailure(Extra):
    """Adds notes to out-of-memory errors. The error keeps its type; other errors stay as they are.

    As an extra of the pipeline it does so while the links stand: the other ranks wait for the prediction.

    rank, num_processes: of the job. doing: what runs outside of the steps, for the text. timetable: None
    until it is known. device: this rank's.
    """

    name = "memory_failure"

    def __init__(self, config: TrainConfig, rank: int, num_processes: int) -> None:
        self._config, self._rank, self._num_processes = config, rank, num_processes
        self.doing = "while the plan, the model and the data are made"
        self.timetable: Timetable | None = None
        self.device = torch.device("cpu")
        self._noted: BaseException | None = None

    def prepares(self, timetable: Timetable, device: torch.device) -> None:
        """From now on the stages go to their device."""
        self.timetable, self.device = timetable, device
        self.doing = f"while the stages go to {device}, with their optimizer"

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
            for line in self._lines(failed_at(error)):
                error.add_note(line)

    def _lines(self, at: str) -> Iterator[str]:
        yield measured(self._rank, self._num_processes, f"in {at}" if at else self.doing, self.device)
        try:
            yield from self._predicted(at)
        except Exception as error:  # the run's own error must not be hidden
            yield f"not predicted: {type(error).__name__}: {error}"

    def _predicted(self, at: str) -> list[str]:
        from zbpp.prediction.what_fits import Failed, lines_in_time, with_processes  # fake tensors: seconds

        config, parallel = with_processes(self._config, self._num_processes), self._config.parallel
        # The pipeline is the first dimension of the mesh.
        rank = self._rank // (parallel.replicate * parallel.shard * parallel.tensor)
        seconds = _seconds_to_explain(parallel.timeout)
        return lines_in_time(config, self.timetable, Failed(rank, at, self._limit()), seconds)

    def _limit(self) -> float | None:
        limit = self._config.memory.limit
        if limit is not None:
            return limit * 2**30
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return None


def _seconds_to_explain(timeout: float) -> float:
    """How long a rank that is out of memory may take to say what would fit; the other ranks wait for it.

    timeout: how long ranks wait for each other, in seconds.
    """
    return min(_LONGEST, _SHARE * timeout)
