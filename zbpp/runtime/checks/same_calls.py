"""Whether ranks call `step` and `evaluate` in the same order, and with batches of one size.

Two kinds of neighbours are compared: ranks of a pipeline that have a link, and processes that have copies of
the same stages and see different data. Copies must train the same parameters, too, since their gradients are
reduced in one order.

    rank 0   evaluate()  step()
    rank 1   step()      evaluate()    without this check: trains on the evaluation batch

Calls are numbered. Before a rank sends or receives anything in a call, it writes into the job's store which
call it makes, then reads what its neighbours wrote. Of two neighbours, the one that reads last reads after
both have written: that rank sees a difference, sends nothing, and raises. A check of tags would not do, since
NCCL ignores them. The check through the store costs one write per call and one read per neighbour and call,
and nothing per message.

On CUDA a step returns before its messages have arrived, so a rank may be several calls ahead of its
neighbour. One entry covers a run of equal calls: kind, first and last number. Before the first call of
another kind replaces the entry, the rank waits for its device: by then its neighbours have made all earlier
calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

import torch

from zbpp.job.agreement import AgreementError
from zbpp.job.errors import CommunicationError, communicating
from zbpp.runtime.call import Call
from zbpp.runtime.extra import Extra, OwnRank
from zbpp.runtime.parallel.groups import Store, job_store
from zbpp.runtime.parallel.mesh import TENSOR
from zbpp.schedule import Timetable


class _Announced(NamedTuple):
    """A rank's current call, as the rank writes the call into the store."""

    number: int
    first: int  # the number of the first of the consecutive calls of this kind
    kind: str
    rows: int | None  # of the batch; None if this rank was given no part of it
    parameters: int = 0  # a hash of the trained ones of a copy of stages; 0 between ranks of a pipeline


class CallOrder:
    """The calls of one rank. store: shared by the ranks; neighbours: whose calls must be the same.

    what: what a number in `neighbours` stands for, in error messages.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        neighbours: Collection[int],
        device: torch.device,
        what: str = "rank",
    ) -> None:
        self._store, self._rank, self._neighbours, self._device = store, rank, sorted(neighbours), device
        self._what = what
        self._current = _Announced(-1, -1, "nothing", None)
        self._write()

    def begin(self, kind: str, rows: int | None, parameters: int = 0) -> None:
        """Announce the next call. Raises AgreementError if a neighbour's call of this number is another."""
        number, first, previous, *_ = self._current
        if kind != previous:
            first = number + 1
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._current = _Announced(number + 1, first, kind, rows, parameters)
        self._write()
        self.check()

    def check(self) -> None:
        """Raise AgreementError if a neighbour is known to make another call than this rank's current one."""
        mine, what = self._current, self._what
        for rank in self._neighbours:
            with communicating(f"{what} {self._rank}, looking up the call of {what} {rank}"):
                number, first, kind, rows, parameters = self._store.get(str(rank)).decode().split()
            # If the neighbour is not yet at this call, it compares when it gets there.
            if int(number) >= mine.number >= int(first) and kind != mine.kind:
                raise AgreementError(
                    f"{what} {rank} is in {kind}() while {what} {self._rank} is in {mine.kind}(): every rank "
                    "must make the same calls of a pipeline in the same order"
                )
            if int(number) == mine.number and mine.rows is not None and rows not in ("None", str(mine.rows)):
                raise AgreementError(
                    f"{mine.kind}() got {mine.rows} rows on {what} {self._rank} and {rows} on {what} {rank}: "
                    "give inputs and targets of one batch, and every copy of a stage as many rows"
                )
            if int(number) == mine.number and int(parameters) != mine.parameters:
                raise AgreementError(
                    f"{what} {rank} trains other parameters than {what} {self._rank}: freeze and unfreeze "
                    "the same ones on all copies of a stage"
                )

    def _write(self) -> None:
        self._store.set(str(self._rank), " ".join(map(str, self._current)))


class SameCalls(Extra):
    """Raises AgreementError where linked ranks, or processes with copies of one stage, make different calls.

    Between copies, the trained parameters are compared, too.
    """

    name = "same_calls"

    def attach(self, rank: OwnRank) -> None:
        """See Extra. Collective over the mesh."""
        self._rank, place = rank, rank.place
        self._ranks: CallOrder | None = None  # None: no other rank is linked to this one
        self._copies: CallOrder | None = None  # None: no other process has copies of the stages
        key_of_all = place.broadcast(rank.key)
        if pairs := rank.programs["step"].links:
            neighbours = neighbours_of(rank.rank, pairs, rank.timetable)
            self._ranks = CallOrder(job_store(rank.key), rank.rank, neighbours, rank.device)
        part, count = place.data_part, place.num_data_parts
        if count > 1:
            store = job_store(f"{key_of_all}/copies/{rank.rank}/{place.coordinate(TENSOR)}")
            neighbours = {(part - 1) % count, (part + 1) % count}
            self._copies = CallOrder(store, part, neighbours, rank.device, f"rank {rank.rank}'s copy")

    def begin(self, call: Call) -> None:
        """See Extra."""
        name = call.name or call.kind
        if self._ranks is not None:
            self._ranks.begin(name, call.rows)
        if self._copies is not None:
            self._copies.begin(name, call.rows, self._hash_of_trained())

    def fail(self, error: BaseException) -> None:
        """A peer may have closed its links because it is in another call: raise that error instead."""
        for order in (self._ranks, self._copies):
            if order is not None and isinstance(error, CommunicationError):
                with suppress(CommunicationError):  # the store may be gone, too
                    order.check()

    def _hash_of_trained(self) -> int:
        return hash(tuple((each.requires_grad, *each.shape) for each in self._rank.trained()))


def neighbours_of(rank: int, links: Iterable[tuple[int, int]], timetable: Timetable) -> set[int]:
    """The ranks that must make the same calls as `rank`: those that have a link with it.

    The owners of the first and the last stage are neighbours, too: inputs and targets belong to one batch.
    """
    pairs = [*links, (timetable.rank_of[0], timetable.rank_of[-1])]
    return {each for pair in pairs if rank in pair for each in pair} - {rank}
