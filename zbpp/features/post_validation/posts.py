"""A gather in two halves: each process posts a value and goes on; later it collects the values of all.

Values travel through the job's store. A process posts its value k + 1 only after it has collected the values
k of all processes. So when a process posts its value k, all processes have posted their values k - 1, and
before that collected the values k - 2: the process then deletes its own value k - 2 from the store.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import torch.distributed as dist

from zbpp.job.errors import CommunicationError
from zbpp.runtime.processes.groups import Store, job_store, unique_name
from zbpp.runtime.processes.mesh import MeshPosition

_POLL_INTERVAL = 1.0  # s; a waiting process looks so often whether another process has given up


class Posts:
    """Values that the processes of a mesh post without waiting for each other.

    timeout: how long `Ticket.collect` may wait, in seconds. Collective.
    """

    def __init__(self, place: MeshPosition, timeout: float) -> None:
        self._timeout, self._number = timeout, 0
        # Gathered, so that the values of `collect` are in the order of `place.gather`.
        everyone = place.gather(place.broadcast(unique_name()) if dist.is_initialized() else "")
        names = place.gather(dist.get_rank() if dist.is_initialized() else 0)
        self._names = [str(name) for name in names]
        self._mine = str(dist.get_rank()) if dist.is_initialized() else "0"
        self._store: Store | None = job_store(f"{everyone[0]}/posts") if len(names) > 1 else None

    def post(self, value: Any) -> Ticket:
        """Post a value to all processes, and return at once. The previous Ticket must have been collected."""
        number = self._number
        self._number += 1
        if self._store is not None:
            # torch takes bytes, too, but its annotation says str.
            self._store.set(f"{number}/{self._mine}", pickle.dumps(value))  # type: ignore[arg-type]
            if number >= 2:
                self._store.delete_key(f"{number - 2}/{self._mine}")
        return Ticket(self, number, value)

    def give_up(self, why: str) -> None:
        """Let the processes that wait for a value of this process stop waiting."""
        if self._store is not None:
            self._store.set("over", f"rank {self._mine}: {why}")

    def _collect(self, number: int, own: Any) -> list[Any]:
        if self._store is None:
            return [own]
        keys = [f"{number}/{name}" for name in self._names]
        self._wait(self._store, keys)
        return [pickle.loads(value) for value in self._store.multi_get(keys)]

    def _wait(self, store: Store, keys: list[str]) -> None:
        end = monotonic() + self._timeout
        while not store.check(keys):
            remaining = end - monotonic()
            if remaining <= 0 or store.check(["over"]):
                raise CommunicationError(self._complaint(store, keys))
            try:
                store.wait(keys, timedelta(seconds=min(_POLL_INTERVAL, remaining)))
            except RuntimeError:
                continue  # some value is not posted yet

    def _complaint(self, store: Store, keys: list[str]) -> str:
        reason = store.get("over").decode() if store.check(["over"]) else f"after {self._timeout:g} s"
        missing = [name for name, key in zip(self._names, keys, strict=True) if not store.check([key])]
        return f"rank {self._mine} waits for the gradients' norm on rank {', '.join(missing)}: {reason}"


class Ticket(NamedTuple):
    """A value that this process has posted, and the number under which all processes post theirs."""

    posts: Posts
    number: int
    value: Any

    def collect(self) -> list[Any]:
        """The values of all processes, in the order of `place.gather`; waits until all have posted.

        Raises CommunicationError, which names the ranks whose values are missing.
        """
        return self.posts._collect(self.number, self.value)
