"""One stage's work: F, B, W and BW of its microbatches, in whatever order the program asks for them.

    F   the module's forward; keeps the edges of its graph                -> saved, auxiliary losses
    B   one backward pass through that graph, which frees it              -> gradient of the input, deferred
    W   adds to `.grad` the weight gradients that B deferred
    BW  B and at once its W

A StageWorker knows its module and what it keeps for each microbatch between these calls. It knows no rank, no
peers and no order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbpp.autograd import WeightGrads, auxiliary_losses
from zbpp.autograd.hooks import num_hooks_made
from zbpp.autograd.split import split
from zbpp.autograd.weight_grads import ChangedInPlace
from zbpp.devices import seed_generators
from zbpp.job.errors import is_out_of_memory
from zbpp.runtime.boundary import (
    BoundaryError,
    checked_outputs,
    detach_gradient,
    detach_outputs,
    gradient_edge,
    graph_input,
)
from zbpp.runtime.call.feed import NO_FEED, Feed
from zbpp.runtime.call.results import checked_losses
from zbpp.runtime.call.weights import weighed
from zbpp.runtime.in_place import explained_in_backward, place_in
from zbpp.runtime.layout import Message, describe, layout_of
from zbpp.stage_api import own_loss

FORWARD_NOTE = "the forward was given what stage"  # how the note on a forward's error begins
LOSS_NOTE = "in the loss function"

Loss = Callable[..., Tensor | Mapping[str, Tensor]]
RunW = Callable[[int, WeightGrads], None]
"""Runs the tasks of a microbatch's W, or some of them."""


class StageLosses(NamedTuple):
    """The losses of one stage in one call."""

    losses: list[Tensor]  # of each microbatch, on the last stage
    named: dict[str, list[Tensor]]  # auxiliary losses, and entries of losses that are dicts


class _Saved(NamedTuple):
    """What F of a microbatch leaves for its B: edges of the graph, not the tensors.

    inputs: of each input of F, the edge at which its gradient leaves the graph; None if it has no gradient.
    outputs: of each output, the edge at which its gradient enters; None if it has none. auxiliary: of each
    auxiliary loss, the same edge and the gradient itself. may_have_hooks: whether F has put hooks on its
    graph. Inputs and outputs are not kept, so their memory is free as soon as nobody else holds them.
    """

    inputs: tuple[GradientEdge | None, ...]
    outputs: tuple[GradientEdge | None, ...]
    auxiliary: list[tuple[GradientEdge, Tensor]]
    may_have_hooks: bool


class StageWorker:
    """Runs one stage.

    is_last: whether the stage is the pipeline's last: F then computes the loss, and returns the gradient that
    its B starts from. loss_fn(output, target): for the last stage; None if its module returns the loss. The
    module's own loss may take its place (stage_api.py). keywords: what a feature adds to the keyword
    arguments of the next forward, beside the caller's. run_w: how W runs its tasks: `accumulate`, or what
    features have made of it.
    device: its generator is seeded for each F, beside the CPU's; None: the CPU.
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
        self.index, self.module, self.device = index, module, device or torch.device("cpu")
        self._is_last, self.loss_fn = is_last, loss_fn
        self.feed = NO_FEED  # the stage's part of this call's arguments
        self.keywords: dict[str, Any] = {}
        self._saved: dict[int, _Saved] = {}  # microbatch -> what its B needs
        self._deferred: dict[int, WeightGrads] = {}  # microbatch -> what its W needs
        self.run_w: RunW = self.accumulate
        self._has_counted = False  # whether a call has ended in which the counts of losses were compared
        self.losses: list[Tensor] = []
        self.named: dict[str, list[Tensor]] = {}

    def begin(self, feed: Feed) -> None:
        """Take what the caller gave for one call. Raises ValueError if a target is needed and missing."""
        if feed.targets is None and self._is_last and self.loss_fn is not None and feed.observe is None:
            names = ", ".join(f"{each}=" for each in feed.kwargs[0]) if feed.kwargs else ""
            raise ValueError(
                "the last stage needs target=..., which goes to loss(output, target): write "
                f"pipeline.{feed.called}(x, target=y). Positional arguments are the first stage's inputs"
                + (f", and {names} goes to each stage's forward" if names else "")
            )
        self.feed = feed

    def abandon(self) -> None:
        """Drop the inputs, outputs and saved tensors of a call that failed."""
        self._take_losses()
        self._saved.clear()
        self._deferred.clear()

    def end(self) -> StageLosses:
        """Return the call's losses and drop its batch. Raises RuntimeError if anything else is left over."""
        self._has_counted = self._has_counted or self.feed.weights is not None
        losses = self._take_losses()
        left = [f"saved({self.index},{microbatch})" for microbatch in self._saved]
        left += [f"deferred({self.index},{microbatch})" for microbatch in self._deferred]
        if left:
            raise RuntimeError(f"a call ended with work left over: {', '.join(left)}")
        return losses

    def _take_losses(self) -> StageLosses:
        """Return the call's losses; drop them and the batch."""
        taken = StageLosses(self.losses, self.named)
        self.feed, self.keywords, self.losses, self.named = NO_FEED, {}, [], {}
        return taken

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: run the module and keep its graph.

        Returns the outputs for the next stage; on the last stage, the gradient of the loss.
        """
        inputs = tuple([graph_input(each) for each in self._inputs(microbatch, message)])
        # The edges are taken before the module runs, since it may change its inputs in place. Tensors that
        # the caller gave get no edge: like a parameter, one that requires grad gets its gradient in `.grad`.
        is_fed = bool(self.feed.args)
        input_edges = tuple([None if is_fed else gradient_edge(each) for each in inputs])
        num_hooks = num_hooks_made()
        with auxiliary_losses() as found:
            outputs = self._call(microbatch, inputs)
        output_edges = tuple([gradient_edge(each) for each in outputs])
        auxiliary = self._auxiliary(microbatch, found) if found else []
        self._saved[microbatch] = _Saved(input_edges, output_edges, auxiliary, num_hooks_made() > num_hooks)
        if not self._is_last:
            return detach_outputs(outputs)
        if not auxiliary:
            _refuse_untrainable(outputs[0])
        self._keep_loss(outputs[0])
        return (self.feed.loss_grads.of(outputs[0]),)

    def _auxiliary(self, microbatch: int, found: Mapping[str, Tensor]) -> list[tuple[GradientEdge, Tensor]]:
        """Keep the values of auxiliary losses; returns where B starts at them, and with which gradients.

        They weigh as much as the unit's share of its microbatch's tokens.
        """
        if self.feed.shares is not None:
            found = {name: value * self.feed.shares[microbatch] for name, value in found.items()}
        for name, value in found.items():
            self._keep_named(name, value)
        edges = [(gradient_edge(value), value) for value in found.values()]
        return [(edge, self.feed.loss_grads.of(value)) for edge, value in edges if edge is not None]

    def evaluate(self, microbatch: int, message: Message) -> Message:
        """F of an evaluation, which keeps no graph; the caller has turned gradients off."""
        inputs = self._inputs(microbatch, message)
        if not self._is_last:
            return detach_outputs(self._call(microbatch, inputs))
        observe, targets = self.feed.observe, self.feed.targets
        if observe is None:
            self._keep_loss(self._call(microbatch, inputs)[0])
            return ()
        output = self._run_module(microbatch, inputs)
        try:
            observe(output, None if targets is None else targets[microbatch])
        except Exception as error:
            error.add_note("in the metrics of an evaluation")
            raise
        has_loss = _is_loss(output) if self.loss_fn is None else targets is not None
        if has_loss:
            self._keep_loss(self._loss(microbatch, output, self.loss_fn))
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
            self.run_w(microbatch, weight_grads)
        return ()

    def backward(self, microbatch: int, message: Message) -> Message:
        """BW: B and at once its W; the same kernels as B and a later W, with less memory (see `split`)."""
        grads, weight_grads = self._backward(microbatch, message, at_once=self.run_w == self.accumulate)
        if weight_grads is not None:
            self.run_w(microbatch, weight_grads)
        return grads

    def _backward(
        self, microbatch: int, message: Message, *, at_once: bool = False
    ) -> tuple[Message, WeightGrads | None]:
        """Run the split backward of a microbatch; message: per output of F its gradient, None if it has none.

        Calls `split`, not `backward_input`, whose checks are needless here: a gradient has the layout of the
        output that it belongs to.
        """
        inputs, outputs, auxiliary, may_have_hooks = self._saved.pop(microbatch)
        edges, output_grads = [], []
        for edge, grad in (*zip(outputs, message, strict=True), *auxiliary):
            if edge is not None and grad is not None:
                edges.append(edge)
                output_grads.append(grad)
        if not edges:
            return (None,) * len(inputs), None
        try:
            grads, deferred, large = split(
                edges, output_grads, inputs, None, is_hooked=may_have_hooks, at_once=at_once
            )
        except RuntimeError as error:
            explained = explained_in_backward(error, self.module, self.index)
            if explained is None:
                raise
            raise explained from None
        weight_grads = WeightGrads(deferred, large)
        large.clear()  # W frees what it has used
        return tuple([detach_gradient(grad) for grad in grads]), weight_grads

    def accumulate(self, microbatch: int, weight_grads: WeightGrads) -> None:
        """W, or a part of it: add these gradients of a microbatch to `.grad`."""
        try:
            weight_grads.accumulate()
        except ChangedInPlace as error:
            names = [name for name, each in self.module.named_parameters() if each is error.leaf]
            if names:
                error.add_note(f"the weight is {', '.join(names)} of stage {self.index}")
            place = "" if error.tensor is None else place_in(error.tensor, self.module)
            if place:
                error.add_note(f"the memory is {place} of stage {self.index}")
            raise
        except RuntimeError as error:
            explained = explained_in_backward(error, self.module, self.index)
            if explained is None:
                raise
            raise explained from None

    def has_auxiliary_losses(self, microbatch: int) -> bool:
        """Whether F of a microbatch, whose B has not run, has reported auxiliary losses."""
        return bool(self._saved[microbatch].auxiliary)

    def deferred(self, microbatch: int) -> WeightGrads:
        """What B of a microbatch has left for W; an empty one if B has left nothing."""
        return self._deferred.get(microbatch) or WeightGrads([])

    def take_deferred(self, microbatch: int) -> WeightGrads:
        """Return what B of a microbatch has left for W, and forget it."""
        return self._deferred.pop(microbatch, None) or WeightGrads([])

    def _inputs(self, microbatch: int, message: Message) -> tuple[Any, ...]:
        return self.feed.args[microbatch] if self.feed.args else message

    def _call(self, microbatch: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The module's outputs as a tuple, None where it returned None; on the last stage the loss."""
        if not self._is_last:
            return checked_outputs(self.index, self._run_module(microbatch, inputs))
        own = own_loss(self.module, self.loss_fn)
        if own is not None:
            return (self._loss(microbatch, self._run_module(microbatch, inputs, head=False), own),)
        return (self._loss(microbatch, self._run_module(microbatch, inputs), self.loss_fn),)

    def _run_module(self, microbatch: int, inputs: tuple[Any, ...], **options: Any) -> Any:
        if self.feed.seeds is not None:
            seed_generators(self.device, self.feed.seeds[microbatch])
        keywords, self.keywords = {**self.feed.kwargs[microbatch], **self.keywords}, {}
        try:
            return self.module(*inputs, **keywords, **options)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if not is_out_of_memory(error):
                error.add_note(self._given(inputs))
                if self.index == 0 and len(inputs) > 1 and isinstance(error, TypeError):
                    call = f"pipeline.{self.feed.called}(x, target=y)"
                    error.add_note(f"is one of them the target? Then write {call}")
            raise

    def _given(self, inputs: tuple[Any, ...]) -> str:
        """What the forward was given, as a note on its error."""
        given = describe(layout_of(tuple([each for each in inputs if isinstance(each, Tensor)])))
        if self.index:
            return f"{FORWARD_NOTE} {self.index - 1} returned, {given}"
        return f"the forward of stage 0 was given {given}"

    def _loss(self, microbatch: int, output: Any, loss_fn: Loss | None) -> Tensor:
        if output is None:
            raise BoundaryError(f"stage {self.index}, the last one, returned nothing: is a return missing?")
        if loss_fn is not None:
            assert self.feed.targets is not None  # `begin` refuses a step without a target
            try:
                output = loss_fn(output, self.feed.targets[microbatch])
            except Exception as error:
                error.add_note(LOSS_NOTE)
                raise
        weights = self.feed.weights
        factor = None if weights is None else weights.of_means[microbatch]
        if isinstance(output, Mapping):
            return self._sum_of_losses(output, factor)
        if isinstance(output, tuple) and len(output) == 2:
            if weights is None:
                raise BoundaryError(_UNCOUNTED)
            output, factor = self._counted(microbatch, *output), weights.of_sum
        loss = checked_loss(output)
        return loss if factor is None else weighed(loss, factor)

    def _counted(self, microbatch: int, total: Tensor, count: Tensor | float) -> Tensor:
        """The sum of a loss (sum, count). Raises BoundaryError for another count than the target's."""
        assert self.feed.weights is not None
        expected = self.feed.weights.counts[microbatch]
        if not self._has_counted and float(count) != float(expected):  # once: on a GPU the host waits for it
            raise BoundaryError(
                f"the loss is a sum over {float(count):g} targets, and microbatch {microbatch} has "
                f"{float(expected):g} by zbpp.stage_api.mean_over: let both count the same"
            )
        return total

    def _sum_of_losses(self, losses: Mapping[str, Tensor], factor: Tensor | None) -> Tensor:
        """Keep the entries of a loss that is a dict, and return their sum."""
        entries = checked_losses(losses)
        if factor is not None:
            entries = {name: weighed(value, factor) for name, value in entries.items()}
        for name, value in entries.items():
            self._keep_named(name, value)
        return functools.reduce(operator.add, entries.values())

    def _keep_loss(self, loss: Tensor) -> None:
        # A copy: the storage of mse_loss's scalar is as large as the whole output.
        self.losses.append(loss.detach().clone())

    def _keep_named(self, name: str, value: Tensor) -> None:
        self.named.setdefault(name, []).append(value.detach().clone())


_UNCOUNTED = (
    "the loss returned (sum, count), and the number of targets of the whole step must be known before its "
    "first backward: mark the loss by @zbpp.stage_api.mean_over_tokens, or by "
    "@zbpp.stage_api.mean_over(count) with count(target) -> number of targets"
)


def checked_loss(loss: Any) -> Tensor:
    """A microbatch's loss with shape []. Raises BoundaryError for what is no real scalar."""
    if not _is_scalar(loss):
        found = describe(layout_of((loss,))) if isinstance(loss, Tensor) else type(loss).__name__
        raise BoundaryError(
            f"the loss of a microbatch must be a scalar tensor, not {found}: reduce it, as by .mean(), or "
            "pass loss_fn"
        )
    if loss.is_complex():
        raise BoundaryError("the loss is complex: return a real number, such as loss.real or loss.abs()")
    return loss.reshape(()) if loss.dim() else loss


def _refuse_untrainable(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not require grad: nothing that it was computed from is trainable; is there a "
            "detach() or no_grad() on its way, or is every parameter frozen?"
        )


def _is_loss(output: Any) -> bool:
    return all(map(_is_scalar, output.values())) if isinstance(output, Mapping) else _is_scalar(output)


def _is_scalar(output: Any) -> bool:
    return isinstance(output, Tensor) and output.numel() == 1
