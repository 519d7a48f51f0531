"""Whether linked ranks make the same calls in the same order: a message of step must never meet evaluate.

    rank 0   evaluate()  step()
    rank 1   step()      evaluate()    would train on the evaluation batch

Calls are numbered. Before a rank posts a call's first message, it writes into the job's store which call it
makes, then reads what its neighbours wrote. Of two neighbours one reads after both have written: that rank
sees the difference, posts nothing, and raises. This holds on gloo as on NCCL, which ignores tags; it takes
one look at the store a call, and nothing a message.

On CUDA a rank may be several calls ahead of its neighbour. Where the kind of call changes, the rank waits for
its device first: then its neighbours have made all earlier calls, and what it wrote holds for those to come.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from zbpp.runtime.world import AgreementError, Store, communicating


class _Call(NamedTuple):
    """`first`: the number of the first call of the same kind without another kind in between."""

    number: int
    first: int
    kind: str
    rows: int | None  # of the batch, where this rank was given any of it


class Calls:
    """The calls of one rank. store: shared by the ranks; neighbours: whose calls must be the same."""

    def __init__(self, store: Store, rank: int, neighbours: Collection[int], device: torch.device) -> None:
        self._store, self._rank, self._neighbours, self._device = store, rank, sorted(neighbours), device
        self._current = _Call(-1, -1, "nothing", None)
        self._write()

    def begin(self, kind: str, rows: int | None) -> None:
        """Announce the next call. Raises AgreementError if a neighbour makes another one in its place."""
        number, first, previous, _ = self._current
        if kind != previous:
            first = number + 1
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._current = _Call(number + 1, first, kind, rows)
        self._write()
        self.check()

    def check(self) -> None:
        """Raise AgreementError if a neighbour is known to make another call than this rank's current one."""
        mine = self._current
        for rank in self._neighbours:
            with communicating(f"rank {self._rank}, looking up the call of rank {rank}"):
                number, first, kind, rows = self._store.get(str(rank)).decode().split()
            # A neighbour that is behind compares when it comes to this call.
            if int(number) >= mine.number >= int(first) and kind != mine.kind:
                raise AgreementError(
                    f"rank {rank} is in {kind}() while rank {self._rank} is in {mine.kind}(): every rank "
                    "must make the same calls of a pipeline in the same order"
                )
            if int(number) == mine.number and mine.rows is not None and rows not in ("None", str(mine.rows)):
                raise AgreementError(
                    f"{mine.kind}() got {mine.rows} rows on rank {self._rank} and {rows} on rank {rank}: "
                    "what is split along dim 0 is one batch"
                )

    def _write(self) -> None:
        self._store.set(str(self._rank), " ".join(map(str, self._current)))
