"""A stage run in slices of a sequence, F's ascending and B's descending, against plain autograd.

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
from zbpp.autograd.models.past import Past

Run = Callable[..., Any]


class SliceFacts(NamedTuple):
    """What a comparison saw. Names of parameters whose gradients W computes, or B has computed."""

    deferred: set[str]
    computed: set[str]
    error: float  # the largest difference of a gradient, relative to the largest gradient of its parameter


class Sliced:
    """run(x, sequence_slice=...) -> the stage's output for these tokens; by default the stage itself.

    Each token's output has a loss of its own, weighted by drawn numbers: no two tokens weigh the same.
    """

    def __init__(self, stage: nn.Module, x: Tensor, bounds: Sequence[int], run: Run | None = None) -> None:
        self.stage, self.x, self.past, self.run = stage, x, Past(bounds), run or stage
        self.losses: list[Any] = []

    def loss_of(self, output: Tensor, start: int, end: int) -> Tensor:
        weights = double(*output.shape[:1], self.x.shape[1], *output.shape[2:], seed=1)
        return output * weights[:, start:end].to(output.dtype)

    def forward(self) -> None:
        for index, (start, end) in enumerate(pairwise(self.past.bounds)):
            # Contiguous: otherwise torch's linear adds its bias apart from the product.
            output = self.run(self.x[:, start:end].contiguous(), sequence_slice=self.past.at(index))
            self.losses.append(self.loss_of(output, start, end).sum())

    def backward(self, index: int) -> WeightGrads:
        loss, self.losses[index] = self.losses[index], None
        return backward_input(loss, None, [])[1]


def assert_equals_whole(
    stage: nn.Module,
    x: Tensor,
    bounds: Sequence[int],
    run: Run | None = None,
    *,
    whole: Run | None = None,
    is_recomputed: bool = False,
    tolerance: float = 1e-12,
) -> SliceFacts:
    """Gradients are those of plain autograd over the whole sequence; B and W run no product twice.

    whole(x): the output for the whole sequence; by default the stage's. is_recomputed: B runs forward again.
    """
    sliced = Sliced(stage, x, bounds, run)
    stage.zero_grad()
    loss = sliced.loss_of((whole or stage)(x), 0, x.shape[1]).sum()
    with CountProducts() as plain:
        loss.backward()
    expected = grads_of(stage)
    stage.zero_grad()
    sliced.forward()
    with nullcontext() if is_recomputed else CountProducts() as counted:
        found = [sliced.backward(index) for index in reversed(range(len(bounds) - 1))]
        facts = [deferred_and_computed(stage, each) for each in found]
        for each in reversed(found):
            each.accumulate()
    assert_close(grads_of(stage), expected, tolerance)
    assert counted is None or counted.number <= plain.number * (len(bounds) - 1)
    assert all(each == facts[0] for each in facts), "slices defer different weights"
    return SliceFacts(*facts[0], _error(grads_of(stage), expected))


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(each.abs().max().item() for each in expected.values())
    scales = {name: max(each.abs().max().item(), 1e-6 * largest) for name, each in expected.items()}
    return max((found[name] - each).abs().max().item() / scales[name] for name, each in expected.items())
