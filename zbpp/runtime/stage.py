"""One stage's work: F, B, W and BW of its microbatches, in whatever order the program asks for them.

    F   module forward; keeps where gradients enter and leave its graph   -> saved
    B   one backward pass through that graph, which frees it              -> gradient of the input, deferred
    W   adds to `.grad` the weight gradients that B deferred
    BW  B and at once its W

A StageWorker knows its module and what it keeps for each microbatch between these calls. It knows no rank, no
peers and no order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbpp.autograd import WeightGrads
from zbpp.autograd.hooks import num_hooks_made
from zbpp.autograd.split import split
from zbpp.autograd.weight_grads import ChangedInPlace
from zbpp.runtime.boundary import (
    BoundaryError,
    checked_outputs,
    detach_gradient,
    detach_outputs,
    gradient_edge,
    graph_input,
)
from zbpp.runtime.feed import NO_FEED, Feed
from zbpp.runtime.layout import Message, describe, layout_of

Loss = Callable[..., Tensor]
AroundW = Callable[[WeightGrads], AbstractContextManager[None]]


class _Saved(NamedTuple):
    """Where gradients enter and leave the graph of a microbatch; None where none does.

    B needs these edges only, not the inputs and outputs themselves: their memory is free as soon as nothing
    else refers to it.
    """

    inputs: tuple[GradientEdge | None, ...]
    outputs: tuple[GradientEdge | None, ...]
    may_have_hooks: bool


class StageWorker:
    """Runs one stage.

    is_last: whether the stage is the pipeline's last: F then computes the loss, and returns the gradient that
    its B starts from. loss_fn(output, target): for the last stage; None if its module returns the loss.
    device: its generator is seeded for each F, beside the CPU's; None: the CPU.
    around_w: what W runs within; None: nothing.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        is_last: bool,
        loss_fn: Loss | None = None,
        device: torch.device | None = None,
        around_w: AroundW | None = None,
    ) -> None:
        self._around_w = around_w
        self.index, self.module, self._device = index, module, device or torch.device("cpu")
        self._is_last, self._loss_fn = is_last, loss_fn
        self._feed = NO_FEED
        self._saved: dict[int, _Saved] = {}  # microbatch -> what its B needs
        self._deferred: dict[int, WeightGrads] = {}  # microbatch -> what its W needs
        self._loss_grad: Message = ()  # of each microbatch's loss; all have the same
        self.losses: list[Tensor] = []

    def begin(self, feed: Feed) -> None:
        """Take what the caller gave for one call. Raises ValueError if a target is needed and missing."""
        if feed.targets is None and self._is_last and self._loss_fn is not None and feed.observe is None:
            raise ValueError("the last stage needs target=...: there is a loss_fn")
        self._feed, self._loss_grad, self.losses = feed, (), []

    def abandon(self) -> None:
        """Drop all that is left of a call that failed."""
        self._feed, self._loss_grad, self.losses = NO_FEED, (), []
        self._saved.clear()
        self._deferred.clear()

    def end(self) -> list[Tensor]:
        """Return the call's losses and drop its batch. Raises RuntimeError if anything else is left over."""
        losses, self.losses = self.losses, []
        self._feed, self._loss_grad = NO_FEED, ()
        left = [f"saved({self.index},{microbatch})" for microbatch in self._saved]
        left += [f"deferred({self.index},{microbatch})" for microbatch in self._deferred]
        if left:
            raise RuntimeError(f"a call ended with work left over: {', '.join(left)}")
        return losses

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: run the module and keep its graph.

        Returns the outputs for the next stage; on the last stage, the gradient of the loss.
        """
        inputs = tuple([graph_input(each) for each in self._inputs(microbatch, message)])
        # The edges are taken before the module runs, since it may change its inputs in place. Tensors that
        # the caller gave get no edge: like a parameter, one that requires grad gets its gradient in `.grad`.
        is_fed = bool(self._feed.args)
        input_edges = tuple([None if is_fed else gradient_edge(each) for each in inputs])
        num_hooks = num_hooks_made()
        outputs = self._call(microbatch, inputs)
        output_edges = tuple([gradient_edge(each) for each in outputs])
        self._saved[microbatch] = _Saved(input_edges, output_edges, num_hooks_made() > num_hooks)
        if self._is_last:
            return self._gradient_of_loss(outputs[0])
        return detach_outputs(outputs)

    def evaluate(self, microbatch: int, message: Message) -> Message:
        """F of an evaluation, which keeps no graph; the caller has turned gradients off."""
        inputs = self._inputs(microbatch, message)
        if not self._is_last:
            return detach_outputs(self._call(microbatch, inputs))
        observe, targets = self._feed.observe, self._feed.targets
        if observe is None:
            self._keep_loss(self._call(microbatch, inputs)[0])
            return ()
        output = self._run_module(microbatch, inputs)
        observe(output, None if targets is None else targets[microbatch])
        has_loss = _is_scalar(output) if self._loss_fn is None else targets is not None
        if has_loss:
            self._keep_loss(self._loss(microbatch, output))
        return ()

    def backward_input(self, microbatch: int, message: Message) -> Message:
        """B: the gradients of F's inputs, None where none flows; keeps what W needs."""
        grads, weight_grads = self._backward(microbatch, message)
        if weight_grads is not None:
            self._deferred[microbatch] = weight_grads
        return grads

    def backward_weight(self, microbatch: int, message: Message = ()) -> Message:
        """W: add to `.grad` the weight gradients that B deferred."""
        weight_grads = self._deferred.pop(microbatch, None)
        if weight_grads is not None:
            self._accumulate(microbatch, weight_grads)
        return ()

    def backward(self, microbatch: int, message: Message) -> Message:
        """BW: B and at once its W; the same kernels in the same order as B and a later W."""
        grads, weight_grads = self._backward(microbatch, message)
        if weight_grads is not None:
            self._accumulate(microbatch, weight_grads)
        return grads

    def _backward(self, microbatch: int, message: Message) -> tuple[Message, WeightGrads | None]:
        """Run the split backward of a microbatch; message: per output of F its gradient, None if it has none.

        Calls `split`, not `backward_input`, whose checks are needless here: a gradient has the layout of the
        output that it belongs to.
        """
        inputs, outputs, may_have_hooks = self._saved.pop(microbatch)
        edges, output_grads = [], []
        for edge, grad in zip(outputs, message, strict=True):
            if edge is not None and grad is not None:
                edges.append(edge)
                output_grads.append(grad)
        if not edges:
            return (None,) * len(inputs), None
        try:
            grads, deferred = split(edges, output_grads, inputs, None, is_hooked=may_have_hooks)
        except RuntimeError as error:
            error.add_note(f"in B of stage {self.index}, microbatch {microbatch}")
            raise
        return tuple([detach_gradient(grad) for grad in grads]), WeightGrads(deferred)

    def _accumulate(self, microbatch: int, weight_grads: WeightGrads) -> None:
        try:
            with nullcontext() if self._around_w is None else self._around_w(weight_grads):
                weight_grads.accumulate()
        except ChangedInPlace as error:
            names = [name for name, each in self.module.named_parameters() if each is error.leaf]
            weights = f", for {', '.join(names)}" if names else ""
            error.add_note(f"in W of stage {self.index}, microbatch {microbatch}{weights}")
            raise

    def _inputs(self, microbatch: int, message: Message) -> tuple[Any, ...]:
        return self._feed.args[microbatch] if self._feed.args else message

    def _call(self, microbatch: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The module's outputs as a tuple, None where it returned None; on the last stage the loss."""
        output = self._run_module(microbatch, inputs)
        return (self._loss(microbatch, output),) if self._is_last else checked_outputs(self.index, output)

    def _run_module(self, microbatch: int, inputs: tuple[Any, ...]) -> Any:
        _seed_generator(self._device, self._feed.seeds[microbatch])
        try:
            return self.module(*inputs, **self._feed.kwargs[microbatch])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._explain(microbatch, inputs, error)
            raise

    def _explain(self, microbatch: int, inputs: tuple[Any, ...], error: Exception) -> None:
        """Say what the module was given; raise BoundaryError where the stage before may be to blame."""
        if self.index == 0 or isinstance(error, torch.OutOfMemoryError):
            return
        given = f"what stage {self.index - 1} returned, {describe(layout_of(inputs))}"
        if microbatch > 0:  # microbatch 0 has passed here, so the two stages fit each other
            error.add_note(f"in the forward of stage {self.index}, microbatch {microbatch}, on {given}")
            return
        raise BoundaryError(
            f"stage {self.index} failed on {given}: {type(error).__name__}: {error}"
        ) from error

    def _loss(self, microbatch: int, output: Any) -> Tensor:
        if output is None:
            raise BoundaryError(f"stage {self.index}, the last one, returned nothing: is a return missing?")
        if self._loss_fn is not None:
            assert self._feed.targets is not None  # `begin` refuses a step without a target
            output = self._loss_fn(output, self._feed.targets[microbatch])
        if not _is_scalar(output):
            found = describe(layout_of((output,))) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss must be a scalar tensor, not {found}; reduce it, or pass loss_fn")
        return output.reshape(()) if output.dim() else output

    def _gradient_of_loss(self, loss: Tensor) -> Message:
        """Keep a microbatch's loss and return its gradient, which its B starts from."""
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not require grad: nothing that it was computed from is trainable; is there a "
                "detach() or no_grad() on its way, or is every parameter frozen?"
            )
        self._keep_loss(loss)
        if not self._loss_grad:
            self._loss_grad = (torch.full_like(loss, self._feed.loss_grad, requires_grad=False),)
        return self._loss_grad

    def _keep_loss(self, loss: Tensor) -> None:
        # A copy: the storage of mse_loss's scalar is as large as the whole output.
        self.losses.append(loss.detach().clone())


def _is_scalar(output: Any) -> bool:
    return isinstance(output, Tensor) and output.numel() == 1


def _seed_generator(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and, if the device is a GPU, the device's too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
