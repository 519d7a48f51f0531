"""What each rank has called, for the error of a rank whose peer has gone.

    rank 0   step()       CommunicationError: rank 1 has closed its links
    rank 1   evaluate()   AgreementError: rank 0 is in step() while rank 1 is in evaluate()

Ranks compare their calls by what the rank with the inputs tells (sizes.py). The rank that finds a difference
raises AgreementError and closes its links; another one sees closed links alone. So each rank writes its
calls, which are numbered, into the job's store. A write waits for nobody. A rank that fails reads what its
neighbours wrote: ranks that it has a link with. One entry covers a run of equal calls: kind, first and last
number.

A rank that makes fewer calls than the others, and does not close the pipeline, lets them wait until the
timeout: it may come yet. Then the error says how many calls each rank has begun, of all processes of the
mesh.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from zbpp.job.agreement import gather
from zbpp.job.errors import CommunicationError, communicating
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.sizes import refuse_another_call, refuse_other_rows
from zbpp.runtime.extra import Observer
from zbpp.runtime.processes.groups import Store, job_store
from zbpp.runtime.rank import Rank

_MOST_SHOWN = 4
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


class _Announced(NamedTuple):
    """A rank's current call, as the rank writes the call into the store."""

    number: int
    first: int  # the number of the first of the consecutive calls of this kind
    kind: str
    rows: int | None  # of the batch; None if this rank was given no part of it


class CallOrder:
    """The calls of one rank. store: shared by the ranks; neighbours: whose calls must be the same.

    everyone: the ranks that a rank may wait for, in a reduction, say. Numbers of ranks are those in the job.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        neighbours: Collection[int],
        everyone: Collection[int] = (),
    ) -> None:
        self._store, self._me, self._neighbours = store, rank, sorted(neighbours)
        self._everyone = sorted({*everyone, *neighbours} - {rank})
        self._current = _Announced(-1, -1, "nothing", None)
        self._write()

    def begin(self, kind: str, rows: int | None) -> None:
        """Write down the next call."""
        number, first, previous, _ = self._current
        first = first if kind == previous else number + 1
        self._current = _Announced(number + 1, first, kind, rows)
        self._write()

    def check(self) -> None:
        """Raise AgreementError if a neighbour is known to make another call than this rank's current one."""
        mine = self._current
        for rank in self._neighbours:
            number, first, kind, rows = self._read(rank)
            # A neighbour that is not yet at this call compares when it gets there.
            if int(number) >= mine.number >= int(first):
                refuse_another_call(mine.kind, self._me, kind, rank)
            if int(number) == mine.number and rows != "None":
                refuse_other_rows(mine.kind, mine.rows, self._me, int(rows), rank)

    def differences(self) -> list[str]:
        """A sentence for each of the first ranks that have begun more or fewer calls than this one."""
        mine, found = self._current, list[str]()
        for rank in self._everyone:
            number, _, kind, _ = self._read(rank)
            if int(number) != mine.number and len(found) < _MOST_SHOWN:
                found.append(
                    f"rank {rank} has begun {int(number) + 1} calls of this pipeline, the last one {kind}(), "
                    f"and rank {self._me} {mine.number + 1}, the last one {mine.kind}(): every rank must "
                    "make as many"
                )
        return found

    def _read(self, rank: int) -> list[str]:
        with communicating(f"rank {self._me}, looking up the call of rank {rank}"):
            return self._store.get(str(rank)).decode().split()

    def _write(self) -> None:
        self._store.set(str(self._me), " ".join(map(str, self._current)))


class SameCalls(Observer):
    """Raises AgreementError where a rank fails because linked ranks make different calls."""

    name = "same_calls"

    def attach(self, rank: Rank) -> None:
        """See Extra. The first and the last stage get parts of one batch, so their owners are neighbours."""
        pairs, rank_of, place = [*rank.programs.links], rank.timetable.rank_of, rank.place
        self._order: CallOrder | None = None  # None: no other process takes part in a call
        if rank.is_alone:
            return
        if pairs:
            pairs.append((rank_of[0], rank_of[-1]))
        me, in_job = dist.get_rank(), gather(dist.get_rank(), place.pipeline)
        neighbours = {in_job[each] for pair in pairs if rank.index in pair for each in pair} - {me}
        store = job_store(place.broadcast(rank.key))
        self._order = CallOrder(store, me, neighbours, place.gather(me))

    def announce(self, batch: Batch) -> None:
        """See Extra."""
        if self._order is not None:
            self._order.begin(batch.call.called, batch.rows)

    def announce_close(self) -> None:
        """See Extra. A rank in another call would wait for one that has closed the pipeline."""
        if self._order is not None:
            self._order.begin("close", None)
            self._order.check()

    def fail(self, error: BaseException) -> None:
        """A peer may have closed its links because it is in another call: raise that error instead.

        Or a rank may make fewer calls: that is noted on the error of a wait that has lasted too long.
        """
        if self._order is not None and isinstance(error, CommunicationError):
            with suppress(CommunicationError):  # the store may be gone, too
                self._order.check()
                for each in self._order.differences() if _TIMED_OUT.search(str(error)) else ():
                    error.add_note(each)
