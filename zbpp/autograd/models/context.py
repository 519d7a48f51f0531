"""Attention over sequences whose tokens are divided over several processes: heads are exchanged for tokens.

    queries, keys, values of this process's tokens, all heads   --- to_heads --->    of all tokens, some heads
    attention over all tokens                                   here
    its result for all tokens, some heads                       --- to_tokens --->   of this process's tokens

The scheme is DeepSpeed-Ulysses' (arXiv:2309.14509). Each process has a contiguous part of each sequence, all
parts are equally long, and the first process has the first part. Linear layers, norms and losses see their
own tokens only. An attention layer holds a `Context`, and so does a layer that counts positions. A runtime
connects them to the other processes; without `transfer` there is one process, and nothing is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.autograd.models.exchange import RowExchange


class Context(RowExchange):
    """The processes that share each sequence, as one layer knows them.

    heads: {name of a size: how many heads of a kind the layer has here}; each process gets an equal part of
    them. index: this process's number in the group.
    """

    def __init__(self, **heads: int) -> None:
        super().__init__()
        self.heads, self.index = heads, 0

    def connect(self, other: Context) -> None:
        """Connect the Context of another layer to the same processes."""
        other.transfer, other.num_processes, other.index = self.transfer, self.num_processes, self.index

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors [batch, heads, time here, size] -> [batch, heads here, time, size], of a part of the heads.

        All tensors go in one exchange; their numbers of heads and their sizes may differ. Raises ValueError
        for a number of heads that the number of processes does not divide.
        """
        if self.transfer is None:
            return tensors
        self._break_graph()
        num, counts = self.num_processes, [1] * self.num_processes
        for each in tensors:
            if refusal := refusal_of_heads("heads", each.shape[1], num):
                raise ValueError(refusal)
        shapes = [(each.shape[1] // num, each.shape[3]) for each in tensors]
        # [processes, batch, time here, heads there x size]
        parts = [each.transpose(1, 2).unflatten(2, (num, -1)).movedim(2, 0).flatten(3) for each in tensors]
        received: Tensor = self(torch.cat(parts, -1), counts, counts)
        of_each = received.split([heads * size for heads, size in shapes], -1)
        return tuple(
            each.unflatten(3, shape).permute(1, 3, 0, 2, 4).flatten(2, 3)
            for each, shape in zip(of_each, shapes, strict=True)
        )

    def to_tokens(self, x: Tensor) -> Tensor:
        """The reverse of `to_heads`: [batch, heads here, time, size] -> [batch, heads, time here, size]."""
        if self.transfer is None:
            return x
        self._break_graph()
        counts = [1] * self.num_processes
        parts = x.unflatten(2, (self.num_processes, -1)).permute(2, 0, 3, 1, 4)
        received: Tensor = self(parts, counts, counts)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def whole(self, x: Tensor) -> Tensor:
        """[batch, time here, ...] of each process -> [batch, time, ...], on each. No gradient flows back."""
        if self.transfer is None:
            return x
        self._break_graph()
        counts = [1] * self.num_processes
        parts = self.move(x.detach().expand(self.num_processes, *x.shape), counts, counts)
        return parts.transpose(0, 1).flatten(1, 2)

    def positions(self, time: int, device: torch.device) -> Tensor:
        """The positions in the sequence of this process's tokens, int64 [time]; time: how many they are."""
        return torch.arange(self.index * time, (self.index + 1) * time, device=device)

    def _break_graph(self) -> None:
        if torch.compiler.is_compiling():
            from zbpp.autograd.compiled.dynamo import break_graph

            break_graph()


def refusal_of_heads(name: str, number: int, num_processes: int) -> str:
    """Why so many processes can't share so many heads; "" if they can."""
    if number % num_processes == 0:
        return ""
    return (
        f"context={num_processes} does not divide {name}={number}: each process attends with an equal part "
        f"of the heads, so write a context= that divides {number}"
    )
