"""Whether the ranks of a pipeline call `step`, `evaluate` and `close` in one order, with batches of one size.

    rank 0   evaluate()  step()
    rank 1   step()      evaluate()    without this check: trains on the evaluation batch

Calls are numbered. Before a rank sends or receives anything in a call, it writes into the job's store which
call it makes, then reads what its neighbours wrote: ranks that it has a link with. Of two neighbours, the one
that reads last reads after both have written: that rank sees a difference, sends nothing, and raises. A check
of tags would not do, since NCCL ignores them. The check through the store costs one write per call and one
read per neighbour and call, and nothing per message.

On CUDA a step returns before its messages have arrived, so a rank may be several calls ahead of its
neighbour. One entry covers a run of equal calls: kind, first and last number. Before the first call of
another kind replaces the entry, the rank waits for its device: by then its neighbours have made all earlier
calls.

A rank that makes fewer calls than the others, and does not close the pipeline, lets them wait until the
timeout: it may come yet. Then the
error says how many calls each rank has begun, of all processes of the mesh.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbpp.devices import synchronize
from zbpp.job.agreement import AgreementError, gather
from zbpp.job.errors import CommunicationError, communicating
from zbpp.runtime.batch import Batch
from zbpp.runtime.extra import Observer
from zbpp.runtime.groups import Store, job_store
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
        device: torch.device,
        everyone: Collection[int] = (),
    ) -> None:
        self._store, self._me, self._neighbours, self._device = store, rank, sorted(neighbours), device
        self._everyone = sorted({*everyone, *neighbours} - {rank})
        self._current = _Announced(-1, -1, "nothing", None)
        self._write()

    def begin(self, kind: str, rows: int | None) -> None:
        """Announce the next call. Raises AgreementError if a neighbour's call of this number is another."""
        number, first, previous, _ = self._current
        if kind != previous:
            first = number + 1
            synchronize(self._device)
        self._current = _Announced(number + 1, first, kind, rows)
        self._write()
        self.check()

    def check(self) -> None:
        """Raise AgreementError if a neighbour is known to make another call than this rank's current one."""
        mine = self._current
        for rank in self._neighbours:
            number, first, kind, rows = self._read(rank)
            # If the neighbour is not yet at this call, it compares when it gets there.
            if int(number) >= mine.number >= int(first) and kind != mine.kind:
                raise AgreementError(
                    f"rank {rank} is in {kind}() while rank {self._me} is in {mine.kind}(): every rank "
                    "must make the same calls of a pipeline in the same order"
                )
            if int(number) == mine.number and mine.rows is not None and rows not in ("None", str(mine.rows)):
                raise AgreementError(
                    f"{mine.kind}() got {mine.rows} rows on rank {self._me} and {rows} on rank {rank}: "
                    "give inputs and targets of one batch"
                )

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
    """Raises AgreementError where linked ranks make different calls."""

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
        self._order = CallOrder(store, me, neighbours, rank.device, place.gather(me))

    def announce(self, batch: Batch) -> None:
        """See Extra."""
        if self._order is not None:
            self._order.begin(batch.call.name or batch.call.kind, batch.rows)

    def announce_close(self) -> None:
        """See Extra. A rank in another call would wait for one that has closed the pipeline."""
        if self._order is not None:
            self._order.begin("close", None)

    def fail(self, error: BaseException) -> None:
        """A peer may have closed its links because it is in another call: raise that error instead.

        Or a rank may make fewer calls: that is noted on the error of a wait that has lasted too long.
        """
        if self._order is not None and isinstance(error, CommunicationError):
            with suppress(CommunicationError):  # the store may be gone, too
                self._order.check()
                for each in self._order.differences() if _TIMED_OUT.search(str(error)) else ():
                    error.add_note(each)
