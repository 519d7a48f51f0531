"""One stage's work: F, B, W and BW of its microbatches, in whatever order it is asked for.

It knows its module and what it holds per microbatch; no rank, no peers, no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.autograd import WeightGrads, backward_input
from zbpp.runtime.p2p import Message, describe, layout_of

Loss = Callable[..., Tensor]


class Feed(NamedTuple):
    """What the step's caller gave to one stage, per microbatch."""

    args: Sequence[tuple[Any, ...]]  # () where the inputs come from another stage
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    seeds: Sequence[int]  # of the random numbers drawn in F


class _Saved(NamedTuple):
    """Where gradients enter and leave the graph of a microbatch, None where there are none.

    B needs no more of inputs and outputs, so their memory can go before.
    """

    inputs: tuple[GradientEdge | None, ...]
    outputs: tuple[GradientEdge | None, ...]


class BoundaryError(ValueError):
    """What one stage returned does not fit the next."""


class StageWorker:
    """Runs one stage. loss_fn(output, target) belongs to the last stage; None elsewhere, or if the
    last stage's module returns the loss itself.

    is_last: F returns the gradient that B starts from instead of the module's outputs. device: whose
    random numbers F seeds; None for the CPU.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        is_last: bool,
        loss_fn: Loss | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.index, self.module, self._device = index, module, device or torch.device("cpu")
        self._is_last, self._loss_fn = is_last, loss_fn
        self._feed = Feed((), (), None, ())
        self._saved: dict[int, _Saved] = {}
        self._deferred: dict[int, WeightGrads] = {}
        self.losses: list[Tensor] = []

    def begin(self, feed: Feed) -> None:
        """Take what the caller gave for a step. Raises ValueError if the target is missing."""
        if feed.targets is None and self._is_last and self._loss_fn is not None:
            raise ValueError("the last stage needs target=...: there is a loss_fn")
        self._feed = feed
        self.losses = []

    def abandon(self) -> None:
        """Drop all that is left of a step that failed."""
        self._feed, self.losses = Feed((), (), None, ()), []
        self._saved.clear()
        self._deferred.clear()

    def end(self) -> list[Tensor]:
        """The step's losses; its batch is dropped. Raises RuntimeError if anything else is left over."""
        losses, self.losses = self.losses, []
        self._feed = Feed((), (), None, ())
        left = [*(f"saved({self.index},{m})" for m in self._saved)]
        left += [*(f"deferred({self.index},{m})" for m in self._deferred)]
        if left:
            raise RuntimeError(f"a step ended with work left over: {', '.join(left)}")
        return losses

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: run the module and keep its graph. On the last stage returns the loss's own gradient."""
        inputs = tuple(map(_entrance, self._inputs(microbatch, message)))
        # Before the module runs, since it may change its inputs in place.
        entrances = tuple(_edge(each) for each in inputs if isinstance(each, Tensor))
        outputs = self._call(microbatch, inputs)
        self._saved[microbatch] = _Saved(entrances, tuple(map(_edge, outputs)))
        if self._is_last:
            self.losses.append(outputs[0].detach())
            return (outputs[0].new_full((), 1 / len(self._feed.seeds)),)
        return tuple(_boundary(output).requires_grad_(output.requires_grad) for output in outputs)

    def evaluate(self, microbatch: int, message: Message) -> Message:
        """F that keeps nothing; the caller has turned gradients off."""
        outputs = self._call(microbatch, self._inputs(microbatch, message))
        if self._is_last:
            self.losses.append(outputs[0])
        return tuple(map(_boundary, outputs))

    def backward_input(self, microbatch: int, message: Message) -> Message:
        """B: gradients of what F was given, None where none flows."""
        grads, weight_grads = self._backward(microbatch, message)
        if weight_grads is not None:
            self._deferred[microbatch] = weight_grads
        return grads

    def backward_weight(self, microbatch: int, message: Message = ()) -> Message:
        """W: add the gradients that B put off to `.grad`."""
        weight_grads = self._deferred.pop(microbatch, None)
        if weight_grads is not None:
            weight_grads.accumulate()
        return ()

    def backward(self, microbatch: int, message: Message) -> Message:
        """BW: B followed at once by its W; the same kernels in the same order."""
        grads, weight_grads = self._backward(microbatch, message)
        if weight_grads is not None:
            weight_grads.accumulate()
        return grads

    def _backward(self, microbatch: int, message: Message) -> tuple[Message, WeightGrads | None]:
        inputs, outputs = self._saved.pop(microbatch)
        pairs = zip(outputs, message, strict=True)
        flows = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        if not flows:
            return (None,) * len(inputs), None
        edges, output_grads = zip(*flows, strict=True)
        grads, weight_grads = backward_input(edges, output_grads, inputs)
        return tuple(None if grad is None else _boundary(grad) for grad in grads), weight_grads

    def _inputs(self, microbatch: int, message: Message) -> tuple[Any, ...]:
        return self._feed.args[microbatch] if self._feed.args else message

    def _call(self, microbatch: int, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        _seed_generator(self._device, self._feed.seeds[microbatch])
        try:
            output = self.module(*inputs, **self._feed.kwargs[microbatch])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            # All microbatches have the same shapes: what the first one passed is not the boundary's fault.
            if self.index == 0 or microbatch > 0 or isinstance(error, torch.OutOfMemoryError):
                raise
            raise BoundaryError(
                f"stage {self.index} failed on what stage {self.index - 1} returned, "
                f"{describe(layout_of(inputs))}: {type(error).__name__}: {error}"
            ) from error
        return (self._loss(microbatch, output),) if self._is_last else self._outputs(output)

    def _loss(self, microbatch: int, output: Any) -> Tensor:
        if self._loss_fn is not None:
            output = self._loss_fn(output, (self._feed.targets or ())[microbatch])  # there: see begin
        if not isinstance(output, Tensor) or output.numel() != 1:
            found = describe(layout_of((output,))) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss must be a scalar tensor, not {found}; reduce it, or pass loss_fn")
        return output.reshape(())

    def _outputs(self, output: Any) -> tuple[Tensor, ...]:
        outputs = output if isinstance(output, tuple) else (output,)
        if not outputs or not all(isinstance(each, Tensor) for each in outputs):
            kinds = ", ".join(type(each).__name__ for each in outputs) or "nothing"
            raise BoundaryError(
                f"stage {self.index} returned {kinds}: "
                "a stage returns a tensor, or a tuple of tensors, for the next one"
            )
        return outputs


def _boundary(tensor: Tensor) -> Tensor:
    """A tensor as it crosses a boundary, sent or not: without history, contiguous."""
    return tensor.detach().contiguous()


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _entrance(value: Any) -> Any:
    """An input of F at the top of a graph of its own; what requires no grad passes as it is.

    No leaf, and no view of one: a stage may start with an in-place operation, which both would refuse.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        return _SameMemory.apply(value.detach().requires_grad_())  # type: ignore[no-untyped-call]  # torch's
    return value


class _SameMemory(torch.autograd.Function):
    """The identity, whose output shares its input's memory without being a view of it for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _seed_generator(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and, if it is another, the device's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
