"""Brings values from all processes of a mesh to the first one, in the background, while training goes on.

The values go through the job's store. A collective call would mix with those of the training step.
"""

from __future__ import annotations

import pickle
import threading
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from zbpp.runtime.parallel.groups import job_store, unique_name
from zbpp.runtime.parallel.mesh import Place

_PAUSE = (
    0.02  # s between two polls of the store. A blocking wait would hold up training steps, which use it, too
)
_GRACE = 30.0  # s that a thread goes on waiting for other processes when its own process wants to end


class Exchange:
    """Brings one value of each process to the first one, once. The constructor is collective.

    index: this process's number in `place.gather`; 0 on the first process.
    """

    def __init__(self, place: Place) -> None:
        mine = dist.get_rank() if dist.is_initialized() else 0
        found = place.gather((mine, unique_name()))
        self.index = [rank for rank, _ in found].index(mine)
        self._size = len(found)
        self._store = job_store(f"{found[0][1]}/checkpoint") if self._size > 1 else None

    def post(self, value: Any) -> None:
        """Send this process's value to the first process."""
        if self._store is not None and self.index:
            # torch takes bytes, too, but its annotation says str.
            self._store.set(str(self.index), pickle.dumps(value))  # type: ignore[arg-type]

    def collect(self, own: Any) -> list[Any]:
        """The values of all processes, in the order of `index`; called on the first process. Waits for all.

        Raises RuntimeError if the main thread ends and a value is still missing 30 s later.
        """
        values = [own]
        for index in range(1, self._size):
            assert self._store is not None  # there are other processes
            self._wait(str(index))
            values.append(pickle.loads(self._store.get(str(index))))
            self._store.delete_key(str(index))
        return values

    def _wait(self, key: str) -> None:
        end = None
        while self._store is not None and not self._store.check([key]):
            if end is None and not threading.main_thread().is_alive():
                end = monotonic() + _GRACE
            if end is not None and monotonic() > end:
                raise RuntimeError(f"process {key} has not written its part: is it gone?")
            sleep(_PAUSE)
