"""W's in the shadow of exchanges: while experts or attention exchange rows, the rank computes weight
gradients.

    0F3   products | dispatch ----> | products | combine ----> |
                   | W1  W1  W1     |          | W1            |      tasks of 0W1, one per parameter
    0W1   what is left of it

Which W's are pending, and in which order they run, is the plan's law
(zbpp/schedule/interpret/exchange.py): those whose B has ended, first the one with the earliest place in the
rank's row. So each stage's W's ascend in microbatch as before, and no bit of a gradient changes. How much
there is to run, the plan decides: a schedule that runs each W directly behind its B leaves nothing pending,
and `zb_auto` postpones W's if costs.exchange says that this pays.

A task that has begun runs to its end, even if the exchange is over before. On a GPU the host asks whether the
exchange is over long before the device gets there: all that is pending runs in the first exchange then.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from heapq import heappop, heappush
from operator import is_
from types import MappingProxyType

import torch

from zbpp.autograd.models.exchange import Pending, exchanges_in
from zbpp.job.agreement import gather_or_refuse
from zbpp.runtime.call.feed import Call
from zbpp.runtime.extra import Feature
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.processes.dtensors import is_freed
from zbpp.runtime.rank import Rank
from zbpp.schedule import Action, Op
from zbpp.schedule.program import Instruction


class OverlapExchange(Feature):
    """Runs pending W's during exchanges. Losses and gradients stay equal, to the last bit.

    The exchanges are those of experts, and those of attention over divided sequences.
    With reshard="microbatch" a W that reads weights does not run there: they would have to be gathered first.
    A parameter's hook that draws random numbers then draws them inside an F or B, and changes what a dropout
    there draws.
    Raises ValueError, on every rank, for a pipeline without exchanges, for tensor parallel stages, and for
    stages of one rank that share a parameter.
    """

    name = "overlap_exchange"
    excludes = MappingProxyType(
        {
            "cuda_graphs": "a captured F or B has no room for other W's; leave one of them out",
            "weight_offload": "W's would copy weights in the middle of F; leave one of them out",
            "tensor": "its W's may need messages; leave it at 1",
            "empty_microbatches": "the places of W's are those of one timetable: leave it out",
        }
    )

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._exchanges = exchanges_in(worker.module for worker in rank.workers.values())
        refusal = _refusal(rank)
        refusal = refusal and f"{self.name} doesn't go with {refusal}"
        if not any(gather_or_refuse(refusal, bool(self._exchanges), rank.place.gather)):
            raise ValueError(
                f"{self.name}: no stage exchanges rows; leave it out, spread experts by make_mesh(..., "
                "expert=2), or divide sequences by make_mesh(..., context=2)"
            )
        self._workers, self._device = rank.workers, rank.device.type
        row = rank.timetable.rows[rank.index]
        self._place = {
            (stage, microbatch): at for at, (stage, op, microbatch) in enumerate(row) if op == Op.W
        }
        self._pending: list[tuple[int, int, int]] = []  # place, stage, microbatch; a heap
        for exchange in self._exchanges:
            exchange.meanwhile = self._run_w

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """A W is pending from the end of its B to its place."""
        match at:
            case Action(stage, Op.B, microbatch):

                def run_b(message: Message) -> Message:
                    result = run(message)
                    self._begin_w(stage, microbatch)
                    return result

                return run_b
            case Action(stage, Op.W, microbatch):

                def run_w(message: Message) -> Message:
                    self._end_w(stage, microbatch)
                    return run(message)

                return run_w
        return run

    def begin(self, call: Call) -> None:
        """See Extra."""
        self._pending.clear()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", self._device}
        ]

    def close(self) -> None:
        """See Extra."""
        for exchange in self._exchanges:
            exchange.meanwhile = None

    def _begin_w(self, stage: int, microbatch: int) -> None:
        if not any(map(is_freed, self._workers[stage].deferred(microbatch).tensors())):
            heappush(self._pending, (self._place[stage, microbatch], stage, microbatch))

    def _end_w(self, stage: int, microbatch: int) -> None:
        """At its place a W has the earliest place of all that are pending."""
        if self._pending and self._pending[0][0] == self._place[stage, microbatch]:
            heappop(self._pending)

    def _run_w(self, exchange: Pending) -> None:
        """Run pending W's until the exchange is over."""
        if not self._pending:
            return
        with ExitStack() as stack:
            for kind, is_enabled, dtype in self._autocast:  # F may run under another autocast than W
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            while self._pending and not exchange.is_done():
                _, stage, microbatch = self._pending[0]
                worker = self._workers[stage]
                weight_grads = worker.deferred(microbatch)
                while weight_grads.tasks and not exchange.is_done():
                    worker.run_w(microbatch, weight_grads.take(partial(is_, weight_grads.tasks[0])))
                if not weight_grads.tasks:
                    heappop(self._pending)


def _refusal(rank: Rank) -> str:
    """Why W's can't run in the exchanges of this rank's stages."""
    counts = Counter(each for worker in rank.workers.values() for each in worker.module.parameters())
    if any(count > 1 for count in counts.values()):
        return "a parameter that stages of one rank share, whose sum would have another order: leave it out"
    return ""
