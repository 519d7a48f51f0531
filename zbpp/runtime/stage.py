"""One stage's work: F, B, W and BW of its microbatches, in whatever order it is asked for.

It knows its module and what it holds per microbatch; no rank, no peers, no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.autograd import WeightGrads
from zbpp.autograd.hooks import num_hooks_made
from zbpp.autograd.split import split
from zbpp.autograd.weight_grads import ChangedInPlace
from zbpp.runtime.layout import Message, describe, layout_of

Loss = Callable[..., Tensor]
Observe = Callable[[Any, Any], None]  # (output, target)


class Feed(NamedTuple):
    """What the step's caller gave to one stage, per microbatch."""

    args: Sequence[tuple[Any, ...]]  # () where the inputs come from another stage
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    seeds: Sequence[int]  # of the random numbers drawn in F
    observe: Observe | None = None  # evaluation: sees what the last stage returns


_NO_FEED = Feed((), (), None, ())


class _Saved(NamedTuple):
    """Where gradients enter and leave the graph of a microbatch, None where there are none.

    B needs no more of inputs and outputs, so their memory can go before.
    """

    inputs: tuple[GradientEdge | None, ...]
    outputs: tuple[GradientEdge | None, ...]
    is_hooked: bool  # whether its tensors may have hooks


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
        self._feed = _NO_FEED
        self._saved: dict[int, _Saved] = {}
        self._deferred: dict[int, WeightGrads] = {}
        self._start: Message = ()  # of the backward: every microbatch's loss has the same gradient
        self.losses: list[Tensor] = []

    def begin(self, feed: Feed) -> None:
        """Take what the caller gave for a step. Raises ValueError if the target is missing."""
        if feed.targets is None and self._is_last and self._loss_fn is not None and feed.observe is None:
            raise ValueError("the last stage needs target=...: there is a loss_fn")
        self._feed, self._start, self.losses = feed, (), []

    def abandon(self) -> None:
        """Drop all that is left of a step that failed."""
        self._feed, self._start, self.losses = _NO_FEED, (), []
        self._saved.clear()
        self._deferred.clear()

    def end(self) -> list[Tensor]:
        """The step's losses; its batch is dropped. Raises RuntimeError if anything else is left over."""
        losses, self.losses = self.losses, []
        self._feed, self._start = _NO_FEED, ()
        left = [*(f"saved({self.index},{m})" for m in self._saved)]
        left += [*(f"deferred({self.index},{m})" for m in self._deferred)]
        if left:
            raise RuntimeError(f"a step ended with work left over: {', '.join(left)}")
        return losses

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: run the module and keep its graph. On the last stage returns the loss's own gradient."""
        inputs = tuple([_entrance(each) for each in self._inputs(microbatch, message)])
        # Before the module runs, since it may change its inputs in place. The caller's tensors are no
        # entrances: like a parameter, one that requires grad gets its gradient in `.grad`.
        entrances = tuple([_edge(each) for each in inputs]) if not self._feed.args else (None,) * len(inputs)
        num_hooks = num_hooks_made()
        outputs = self._call(microbatch, inputs)
        exits = tuple([_edge(each) for each in outputs])
        is_hooked = num_hooks_made() > num_hooks
        self._saved[microbatch] = _Saved(entrances, exits, is_hooked)
        if self._is_last:
            return self._backward_start(outputs[0])
        return _departures(outputs)

    def evaluate(self, microbatch: int, message: Message) -> Message:
        """F that keeps nothing; the caller has turned gradients off."""
        inputs, observe = self._inputs(microbatch, message), self._feed.observe
        if observe is None or not self._is_last:
            outputs = self._call(microbatch, inputs)
            if self._is_last:
                self._keep_loss(outputs[0])
            return _departures(outputs)
        output, targets = self._run_module(microbatch, inputs), self._feed.targets
        observe(output, None if targets is None else targets[microbatch])
        has_loss = _is_scalar(output) if self._loss_fn is None else targets is not None
        if has_loss:
            self._keep_loss(self._loss(microbatch, output))
        return ()

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
            self._accumulate(microbatch, weight_grads)
        return ()

    def backward(self, microbatch: int, message: Message) -> Message:
        """BW: B followed at once by its W; the same kernels in the same order."""
        grads, weight_grads = self._backward(microbatch, message)
        if weight_grads is not None:
            self._accumulate(microbatch, weight_grads)
        return grads

    def _accumulate(self, microbatch: int, weight_grads: WeightGrads) -> None:
        try:
            weight_grads.accumulate()
        except ChangedInPlace as error:
            names = [name for name, each in self.module.named_parameters() if each is error.leaf]
            weights = f", for {', '.join(names)}" if names else ""
            error.add_note(f"in W of stage {self.index}, microbatch {microbatch}{weights}")
            raise

    def _backward(self, microbatch: int, message: Message) -> tuple[Message, WeightGrads | None]:
        """`backward_input` without its checks: a message has the layout of what it answers."""
        inputs, outputs, is_hooked = self._saved.pop(microbatch)
        edges, output_grads = [], []
        for edge, grad in zip(outputs, message, strict=True):
            if edge is not None and grad is not None:
                edges.append(edge)
                output_grads.append(grad)
        if not edges:
            return (None,) * len(inputs), None
        try:
            grads, work = split(edges, output_grads, inputs, None, is_hooked=is_hooked)
        except RuntimeError as error:
            error.add_note(f"in B of stage {self.index}, microbatch {microbatch}")
            raise
        return tuple([_boundary(grad) for grad in grads]), WeightGrads(work)

    def _inputs(self, microbatch: int, message: Message) -> tuple[Any, ...]:
        return self._feed.args[microbatch] if self._feed.args else message

    def _call(self, microbatch: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The module's outputs, None for one left out; on the last stage the loss."""
        output = self._run_module(microbatch, inputs)
        return (self._loss(microbatch, output),) if self._is_last else self._outputs(output)

    def _run_module(self, microbatch: int, inputs: tuple[Any, ...]) -> Any:
        _seed_generator(self._device, self._feed.seeds[microbatch])
        try:
            return self.module(*inputs, **self._feed.kwargs[microbatch])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._explain(microbatch, inputs, error)
            raise

    def _explain(self, microbatch: int, inputs: tuple[Any, ...], error: Exception) -> None:
        """Say what the module was given; raise BoundaryError if that may be what it failed on."""
        if self.index == 0 or isinstance(error, torch.OutOfMemoryError):
            return
        given = f"what stage {self.index - 1} returned, {describe(layout_of(inputs))}"
        if microbatch > 0:  # a boundary that fitted once is seldom to blame
            error.add_note(f"in the forward of stage {self.index}, microbatch {microbatch}, on {given}")
            return
        raise BoundaryError(
            f"stage {self.index} failed on {given}: {type(error).__name__}: {error}"
        ) from error

    def _loss(self, microbatch: int, output: Any) -> Tensor:
        if output is None:
            raise BoundaryError(f"stage {self.index}, the last one, returned nothing: is a return missing?")
        if self._loss_fn is not None:
            output = self._loss_fn(output, (self._feed.targets or ())[microbatch])  # there: see begin
        if not _is_scalar(output):
            found = describe(layout_of((output,))) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss must be a scalar tensor, not {found}; reduce it, or pass loss_fn")
        return output.reshape(()) if output.dim() else output

    def _backward_start(self, loss: Tensor) -> Message:
        """What the step's loss, the mean over microbatches, has as its gradient in this one's."""
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not require grad: nothing that it was computed from is trainable; is there a "
                "detach() or no_grad() on its way, or is every parameter frozen?"
            )
        self._keep_loss(loss)
        if not self._start:
            self._start = (torch.full_like(loss, 1 / len(self._feed.seeds), requires_grad=False),)
        return self._start

    def _keep_loss(self, loss: Tensor) -> None:
        # A copy: mse_loss's scalar sits in a storage of the whole output's size.
        self.losses.append(loss.detach().clone())

    def _outputs(self, output: Any) -> tuple[Any, ...]:
        if isinstance(output, Tensor):
            self._refuse_unsendable((output,))
            return (output,)
        outputs = output if isinstance(output, tuple) else (output,)
        kinds = [type(each).__name__ for each in outputs]
        others = [each for each in outputs if not isinstance(each, Tensor)]
        if len(others) < len(outputs) and all(each is None for each in others):
            self._refuse_unsendable(outputs)
            return outputs
        hint = "; of a dict, return tuple(output.values())" if isinstance(output, Mapping) else ""
        raise BoundaryError(
            f"stage {self.index} returned {', '.join(kinds) or 'nothing'}: a stage returns a tensor, or a "
            f"tuple of tensors (None where one is left out), the next one's positional arguments{hint}"
        )

    def _refuse_unsendable(self, outputs: tuple[Any, ...]) -> None:
        """Whether sent or not: a stage must fit every placement."""
        for each in outputs:
            if each is None or (each.layout is torch.strided and not each.is_nested):
                continue
            if each.is_nested:
                what, instead = "a nested tensor", "torch.nested.to_padded_tensor(y, 0.0)"
            else:
                what, instead = "a sparse tensor", "y.to_dense(), or its indices and values"
            raise BoundaryError(
                f"stage {self.index} returned {what}; only dense ones pass between stages: return {instead}"
            )


def _is_scalar(output: Any) -> bool:
    return isinstance(output, Tensor) and output.numel() == 1


def _boundary(grad: Tensor | None) -> Tensor | None:
    """A gradient as it crosses a boundary, sent or not: without history, dense, contiguous."""
    if grad is None:
        return None
    return (grad if grad.layout is torch.strided else grad.to_dense()).detach().contiguous()


def _departure(output: Tensor | None) -> Tensor | None:
    """An output of F for the next stage, which is told whether a gradient is wanted back."""
    return None if output is None else output.detach().contiguous().requires_grad_(output.requires_grad)


def _departures(outputs: Iterable[Tensor | None]) -> Message:
    """The outputs of F for the next stage, each in memory of its own.

    So they are after they were sent. If two of them shared memory on one rank, a next stage that changes one
    of them in place would change the other there, and not across ranks.
    """
    message = tuple([_departure(each) for each in outputs])
    if len(message) == 1:
        return message
    seen: set[int] = set()
    return tuple([_apart(each, seen) for each in message])


def _apart(tensor: Tensor | None, seen: set[int]) -> Tensor | None:
    """The tensor, or a copy if its memory is among `seen`; its memory is then."""
    if tensor is None:
        return None
    memory = tensor.untyped_storage().data_ptr()
    if memory in seen:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    seen.add(memory)
    return tensor


def _edge(value: Any) -> GradientEdge | None:
    """torch's get_gradient_edge of what F has computed, in half the time; None without grad."""
    if not (isinstance(value, Tensor) and value.requires_grad):
        return None
    node = value.grad_fn
    if node is None:  # a leaf
        return get_gradient_edge(value)
    # Nothing but its outputs keeps a Function's node alive: another node does, once they are gone.
    keeper = value.view_as(value).grad_fn if issubclass(type(node), BackwardCFunction) else None
    return GradientEdge(node, value.output_nr, keeper)


def _entrance(value: Any) -> Any:
    """An input of F at the top of a graph of its own; what requires no grad passes as it is.

    No leaf, and no view of one: a stage may start with an in-place operation, which both would refuse.
    """
    return _SameMemory.apply(value) if isinstance(value, Tensor) and value.requires_grad else value  # type: ignore[no-untyped-call]  # torch's


class _SameMemory(torch.autograd.Function):
    """The identity, whose output shares its input's memory without being a view of it for autograd.

    It shares the count of in-place operations, too: of two stages of one rank, the first may have saved
    what the second changes, and its B must see that.
    """

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
