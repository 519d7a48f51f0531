"""Auxiliary losses: scalars that a forward reports beside its output, to be added to the loss.

The layers of a mixture of experts report a balance loss and a z-loss, which their output does not contain.
`auxiliary_loss` adds such a value, under its name, to the innermost `auxiliary_losses` block:

    with zbpp.auxiliary_losses() as found:
        loss = loss_fn(model(x), target)
    (loss + sum(found.values())).backward()

A StageWorker runs each F of a step in a block, and its B starts at these values, too. `zbpp.checkpoint` runs
its function in a block of its own and returns the values as further outputs. So the forward counts them once,
and the recompute gets their gradients as it gets those of other outputs.

The innermost block is a context variable of the thread that runs the forward. A recompute opens a block of
its own, because Python code of a backward may run on autograd's threads, which don't see that variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Block(NamedTuple):
    found: dict[str, Tensor]  # the sum of each name's values
    had_gradients: bool  # whether gradients were on when the block began


_innermost: ContextVar[_Block | None] = ContextVar("zbpp_auxiliary_losses", default=None)


def auxiliary_loss(name: str, value: Tensor) -> None:
    """Add a scalar to the step's loss, under a name; called anywhere in the forward of any stage.

    value: a floating-point tensor with one element, of one microbatch. The values of one name are summed:
    those of several calls in one microbatch, and those of several stages. `Pipeline.step` treats a value as
    it treats a microbatch's loss: gradients are averaged over microbatches and have the pipeline's
    loss_scale. A value that requires no grad is reported only (`Pipeline.auxiliary_losses`).

    With sequences in slices a value is one of a slice, and weighs the slice's share of the tokens. So a mean
    over tokens, such as a z-loss, is the whole sequence's. A balance loss, which multiplies two means over
    tokens, is not: it becomes the mean of the slices' own balance.

    Outside a step and outside an `auxiliary_losses` block, in an evaluation for example, nothing happens.

    Raises ValueError for a name that is not a non-empty string, for a value that is no such tensor, and where
    gradients are off but were on when the step or the block began: there the value would train nothing.
    """
    if torch.compiler.is_compiling():
        # torch 2.15 traces ContextVar.get: every later call would report to the block of the traced call.
        from zbpp.autograd.compiled.dynamo import break_graph

        break_graph()
    value = named_scalar("auxiliary_loss", name, value)
    block = _innermost.get()
    if block is None:
        return
    if block.had_gradients and not torch.is_grad_enabled():
        raise ValueError(
            f"auxiliary_loss {name!r} is called with gradients off, in a forward that began with gradients: "
            "its value would train nothing. Call it outside of torch.no_grad(), with value.detach() if it is "
            "only to be reported; instead of torch's checkpoint with use_reentrant=True, which turns "
            "gradients off, write zbpp.checkpoint; around a part whose values nobody wants, write "
            "`with torch.no_grad(), zbpp.auxiliary_losses():`"
        )
    before = block.found.get(name)
    block.found[name] = value if before is None else before + value


@contextmanager
def auxiliary_losses() -> Iterator[dict[str, Tensor]]:
    """Collect the auxiliary losses that are reported inside the block.

    Yields {name: the sum of the name's values}, filled while the block runs; a sum has the graph of its
    values. What is reported inside the block reaches no block or step around it. Call backward after the
    block: inside, the recompute of torch's own checkpoint would report a second time.
    """
    block = _Block({}, torch.is_grad_enabled())
    token = _innermost.set(block)
    try:
        yield block.found
    finally:
        _innermost.reset(token)


def named_scalar(what: str, name: Any, value: Any) -> Tensor:
    """The value with shape []. what: what the error message calls it, such as "auxiliary_loss".

    Raises ValueError unless the name is a non-empty string and the value a floating-point tensor with one
    element.
    """
    if not (isinstance(name, str) and name):
        raise ValueError(f"{what} {name!r}: the name must be a string that is not empty, such as 'balance'")
    if not isinstance(value, Tensor):
        found = f"a {type(value).__name__}, which no gradient can flow through"
    elif value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}"
    elif not value.is_floating_point():
        found = f"a tensor of {value.dtype}"
    else:
        return value.reshape(()) if value.dim() else value
    raise ValueError(
        f"{what} {name!r} is {found}: give one floating-point tensor with one element, such as value.mean()"
    )
