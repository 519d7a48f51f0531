"""Stages run in slices of a sequence, F's ascending and B's descending, against plain autograd.

    facts = assert_equals_whole(stage, x, bounds=[0, 5, 12])

In float64. W's run after all B's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from helpers.split import CountProducts, assert_close, deferred_and_computed, double, grads_of
from zbpp import WeightGrads, backward_input
from zbpp.autograd.models.past import Past, SequenceSlice

Run = Callable[..., Any]


class SliceFacts(NamedTuple):
    """What a comparison saw. Names of parameters whose gradients W computes, or B has computed."""

    deferred: set[str]
    computed: set[str]
    error: float  # the largest difference of a gradient, relative to the largest gradient of its parameter


def call_stage(stage: nn.Module, *message: Any, sequence_slice: SequenceSlice | None) -> Any:
    return stage(*message) if sequence_slice is None else stage(*message, sequence_slice=sequence_slice)


class Sliced:
    """Stages in a row, each with a Past of its own, whose graph is one.

    call(stage, *message, sequence_slice) -> the stage's output; sequence_slice is None for whole sequences.
    loss(output, start, end) -> the loss of these tokens, whose sum over slices is that of the sequence. By
    default each number of the output has a drawn weight.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        x: Tensor,
        bounds: Sequence[int],
        call: Run = call_stage,
        loss: Run | None = None,
    ) -> None:
        self.stages = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.pasts = [Past(bounds) for _ in self.stages]
        self.x, self.bounds, self.call, self.loss = x, bounds, call, loss or self._weighted
        self.losses: list[Any] = []

    def _weighted(self, output: Tensor, start: int, end: int) -> Tensor:
        weights = double(*output.shape[:1], self.x.shape[1], *output.shape[2:], seed=1)
        return (output * weights[:, start:end].to(output.dtype)).sum()

    def whole(self) -> Tensor:
        return self.loss(self._run(self.x, None), 0, self.x.shape[1])

    def forward(self) -> None:
        for index, (start, end) in enumerate(pairwise(self.bounds)):
            # Contiguous: otherwise torch's linear adds its bias apart from the product.
            output = self._run(self.x[:, start:end].contiguous(), index)
            self.losses.append(self.loss(output, start, end))

    def _run(self, x: Tensor, index: int | None) -> Any:
        message: Any = (x,)
        for stage, past in zip(self.stages, self.pasts, strict=True):
            output = self.call(stage, *message, sequence_slice=None if index is None else past.at(index))
            message = output if isinstance(output, tuple) else (output,)
        return output

    def backward(self, index: int) -> WeightGrads:
        loss, self.losses[index] = self.losses[index], None
        return backward_input(loss, None, [])[1]


def assert_equals_whole(
    stages: nn.Module | Sequence[nn.Module],
    x: Tensor,
    bounds: Sequence[int],
    *,
    is_recomputed: bool = False,
    tolerance: float = 1e-12,
    **options: Any,
) -> SliceFacts:
    """Gradients are those of plain autograd over the whole sequence.

    B and W run no more products than a plain backward of each slice, and defer the same weights as without
    slices. is_recomputed: B runs forward again. options: of Sliced.
    """
    sliced = Sliced(stages, x, bounds, **options)
    module = sliced.stages[0] if len(sliced.stages) == 1 else nn.ModuleList(sliced.stages)
    module.zero_grad()
    loss = sliced.whole()
    with CountProducts() as plain:
        loss.backward()
    expected = grads_of(module)
    unsliced = deferred_and_computed(module, backward_input(sliced.whole(), None, [])[1])
    module.zero_grad()
    sliced.forward()
    assert all(past.held_bytes for past in sliced.pasts)
    with nullcontext() if is_recomputed else CountProducts() as counted:
        found = [sliced.backward(index) for index in reversed(range(len(bounds) - 1))]
        for each in reversed(found):
            assert deferred_and_computed(module, each) == unsliced, "a slice defers other weights"
            each.accumulate()
    assert_close(grads_of(module), expected, tolerance)
    assert counted is None or counted.number <= plain.number * (len(bounds) - 1)
    return SliceFacts(*unsliced, _error(grads_of(module), expected))


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(each.abs().max().item() for each in expected.values())
    scales = {name: max(each.abs().max().item(), 1e-6 * largest) for name, each in expected.items()}
    return max((found[name] - each).abs().max().item() / scales[name] for name, each in expected.items())
