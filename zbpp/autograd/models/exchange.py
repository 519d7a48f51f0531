"""A layer of experts that are spread over several processes: each token's row goes to its experts and back.

    rows of this process      --- by expert ---> sent to the experts' processes    (dispatch)
    rows of all processes     --- by expert ---> products with the experts here
    results                   --- by source ---> sent back, in the tokens' order   (combine)

Who moves the rows is not known here. An `Exchange` holds two functions: `transfer`, which starts to move rows
between processes, and `meanwhile`, which may work until they have arrived. A runtime sets both. Without
`transfer` there is one process, and rows stay where they are.

The backward of an exchange is the exchange with the counts swapped. So all processes of a group run the same
exchanges in the same order, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd.collector import refuse_create_graph


class Pending(Protocol):
    """A transfer of rows under way."""

    def is_done(self) -> bool:
        """Whether the rows have arrived."""

    def wait(self) -> Tensor:
        """The rows that this process has received: those of the group's first process first."""


Transfer = Callable[[Tensor, list[int], list[int]], Pending]
"""(rows, how many go to each process of the group, how many come from each) -> the transfer under way."""


class RowExchange(nn.Module):
    """Moves rows [n, ...] between the processes of a group, in forward and in backward; has no parameters.

    transfer: None for one process. num_processes: in the group. meanwhile: called between the start of a
    transfer and the wait for its end, in forward and in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transfer: Transfer | None = None
        self.meanwhile: Callable[[Pending], None] | None = None
        self.num_processes = 1

    def forward(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Send the rows, the first process's first; returns those received, in the same order."""
        if self.transfer is None:
            return rows
        return _apply(_Exchanged, rows, self, send_counts, receive_counts)

    def move(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """`forward` without autograd."""
        assert self.transfer is not None
        pending = self.transfer(rows.contiguous(), send_counts, receive_counts)
        if self.meanwhile is not None:
            self.meanwhile(pending)
        return pending.wait()


class Exchange(RowExchange):
    """Moves rows between processes that have different experts of one layer.

    A layer holds one in a module beside the parameters of its experts, whose first dimension is the expert.
    """

    def sizes(self, mine: Tensor, num_rows: int) -> tuple[Tensor, list[int], list[int]]:
        """(rows for each expert here from each process, how many rows to send, how many to receive).

        mine: this process's rows for each expert, int64 [processes, experts of each], num_rows in all.
        """
        assert self.transfer is not None
        ones = [1] * self.num_processes
        theirs = self.transfer(mine.contiguous(), ones, ones).wait()
        send, receive = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        return theirs, send, receive


class BalancedExchange(Exchange):
    """Moves nothing, as if each process sent to each as many rows as it receives: to measure memory with.

    Asks for no values: tensors may be fake.
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__()
        self.num_processes = num_processes
        self.transfer = stays

    def sizes(self, mine: Tensor, num_rows: int) -> tuple[Tensor, list[int], list[int]]:
        """See Exchange."""
        ends = [num_rows * n // self.num_processes for n in range(self.num_processes + 1)]
        parts = [end - begin for begin, end in pairwise(ends)]
        return mine, parts, parts


def stays(rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> _Arrived:
    """A Transfer that moves nothing, to measure memory with."""
    return _Arrived(rows)


class _Arrived(NamedTuple):
    """A Pending that is done."""

    rows: Tensor

    def is_done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self.rows


def exchanges_in(modules: Iterable[nn.Module]) -> list[RowExchange]:
    """The exchanges inside these modules that move rows between processes."""
    return [
        each
        for module in modules
        for each in module.modules()
        if isinstance(each, RowExchange) and each.transfer is not None
    ]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Exchanged(torch.autograd.Function):
    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, send: list[int], receive: list[int]) -> Tensor:
        ctx.exchange, ctx.send, ctx.receive = exchange, send, receive
        return exchange.move(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("an exchange between processes", "leave create_graph out")
        return ctx.exchange.move(dy, ctx.receive, ctx.send), None, None, None


Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, rows per expert as int64 [experts here]) -> a row for each."""


def through_experts(
    x: Tensor, chosen: Tensor, num_experts: int, exchange: Exchange, compute: Compute
) -> Tensor:
    """What each token's experts make of it: [tokens, k, ...], for x [tokens, hidden].

    chosen: the experts of each token, int64 [tokens, k], below num_experts, the number in the group.
    compute: what the experts of this process do. Sums are in one order: results are equal in every run.
    """
    if torch.compiler.is_compiling():
        from zbpp.autograd.compiled.dynamo import break_graph

        break_graph()
    order = chosen.flatten().argsort(stable=True)
    counts = counts_of(chosen, num_experts)
    rows = _apply(_Taken, x, order, chosen.shape[1])
    if exchange.transfer is None:
        y = compute(rows, counts)
    else:
        y = _exchanged(rows, counts.view(exchange.num_processes, -1), exchange, compute)
    return _apply(_PutBack, y, order, chosen.shape)


def counts_of(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen, int64 [num_experts]. Its shape is known without the values."""
    chosen = chosen.flatten()
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _exchanged(rows: Tensor, counts: Tensor, exchange: Exchange, compute: Compute) -> Tensor:
    """`compute` on the processes that have the experts; rows and the result are sorted by expert."""
    theirs, send, receive = exchange.sizes(counts, len(rows))
    received = exchange(rows, send, receive)
    # Received rows are sorted by source first. Those of an expert stay in the order of their sources.
    experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
    order = experts.repeat_interleave(theirs.flatten(), output_size=sum(receive)).argsort(stable=True)
    y = _apply(_PutBack, compute(_apply(_Taken, received, order, 1), theirs.sum(0)), order, order.shape)
    sent_back: Tensor = exchange(y, receive, send)
    return sent_back


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Taken(torch.autograd.Function):
    """Rows of x, each k times, in an order of all these: x.repeat_interleave(k, 0)[order].

    The gradient is summed over each row's k places in their order, on every device.
    """

    changes_no_gradient = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return x.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        rows = dy.index_select(0, _inverse(order))
        return rows if ctx.k == 1 else rows.unflatten(0, (-1, ctx.k)).sum(1), None, None


class _PutBack(torch.autograd.Function):
    """The reverse of x[order], in the shape (*shape, ...). No view: FSDP2 would warn of it."""

    changes_no_gradient = True

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_dims = len(shape)
        return y[_inverse(order).view(shape)]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return dy.flatten(0, ctx.num_dims - 1).index_select(0, order), None, None
