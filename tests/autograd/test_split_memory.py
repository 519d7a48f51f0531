"""Nothing is kept that W does not need, nothing runs twice.

Every tensor made in F and B is watched by its storage; the garbage collector is off.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.split import double, draw_grads, output_grads
from helpers.watch import MODULES, Block, Watch
from zbpp import backward_input
from zbpp.benchmark.interleaved_timing import without_garbage_collection


def x_and_dy_only(weight_grads):
    return {
        tensor.untyped_storage()._cdata for task in weight_grads._tasks for tensor in task.tensors()
    }  # fmt: skip


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner stage", "stage 0"])
@pytest.mark.parametrize("name", MODULES)
def test_after_b_only_what_w_needs_is_alive_and_after_w_only_gradients(name, needs_grad):
    module = MODULES[name]()
    with without_garbage_collection(), Watch() as watch:
        x = torch.randn(2, 5, 16).requires_grad_(needs_grad)
        output = module(x)
        (dy,) = draw_grads([output])
        grads, weight_grads = backward_input(output, dy, x)
        # What the caller gave and was given is the caller's.
        del output, x, dy, grads
        kept = x_and_dy_only(weight_grads)
        left_over = {key: what for key, what in watch.alive().items() if key not in kept}
        assert left_over == {}
        assert sum(size for size, _ in watch.alive().values()) <= weight_grads.held_bytes
        weight_grads.accumulate()
        gradients = {parameter.grad.untyped_storage()._cdata for parameter in module.parameters()}
        assert {key: what for key, what in watch.alive().items() if key not in gradients} == {}


def test_during_b_no_more_is_alive_than_during_plain_backward_and_the_held_dy():
    """Counted after every operation, in bytes."""

    class Peak(Watch):
        highest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.highest = max(self.highest, sum(size for size, _ in self.alive().values()))
            return result

    module = nn.Sequential(*(Block() for _ in range(3)))
    peaks = []
    for split in (False, True):
        module.zero_grad()
        with without_garbage_collection(), Peak() as peak:
            x = torch.randn(2, 5, 16, requires_grad=True)
            output = module(x)
            (dy,) = draw_grads([output])
            peak.highest = 0
            if split:
                _, weight_grads = backward_input(output, dy, x)
                dys = {
                    use.dy.untyped_storage()._cdata: use.dy.untyped_storage().nbytes()
                    for task in weight_grads._tasks
                    if hasattr(task, "uses")
                    for use in task.uses
                }
            else:
                output.backward(dy)
        peaks.append(peak.highest)
        del output, dy
    assert peaks[1] <= peaks[0] + sum(dys.values())


def test_held_bytes_counts_each_storage_once():
    """Three layers share their x, and a weight and its bias their dy."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4, bias=False)

        def forward(self, x):
            return self.q(x), self.k(x), self.v(x)

    outputs = Shared()(torch.randn(5, 8))
    grads = [torch.ones(5, size) for size in (8, 4, 4)]
    _, weight_grads = backward_input(outputs, grads, ())
    assert weight_grads.held_bytes == 4 * 5 * (8 + 8 + 4 + 4)


def test_w_makes_no_temporary_the_size_of_a_weight():
    """Once there is a `.grad`, the product accumulates into it."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Embedding(64, 64))
    module = nn.ModuleList(module)
    for _ in range(2):
        output = module[1](module[0](module[2](torch.arange(3))))
        _, weight_grads = backward_input(output, torch.ones(3, 64), ())
        with Watch() as watch:
            weight_grads.accumulate()
    gradients = {parameter.grad.untyped_storage()._cdata for parameter in module.parameters()}
    made = [size for key, (_, size, _) in watch.storages.items() if key not in gradients]
    assert max(made, default=0) < 4 * 64 * 64


# ---------------------------------------------------------------- nothing runs twice


def nodes_of(roots):
    seen, pending = set(), list(roots)
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [below for below, _ in node.next_functions]
    return seen


@pytest.mark.parametrize("name", ["blocks", "convolutions", "weight_norm", "encoder layer"])
def test_every_node_runs_at_most_once_in_b_and_w_together(name):
    module = MODULES[name]()
    x = torch.randn(2, 5, 16, requires_grad=True)
    output = module(x)
    runs = {}
    for i, node in enumerate(nodes_of([output.grad_fn])):
        if type(node).__name__ != "AccumulateGrad":
            runs[i] = 0

            def count(grads, outputs, i=i):
                runs[i] += 1

            node.register_hook(count)
    _, weight_grads = backward_input(output, torch.ones_like(output), x)
    weight_grads.accumulate()
    assert max(runs.values()) == 1
    ran = sum(runs.values())
    skipped = len(runs) - ran
    assert skipped <= sum(1 for _ in module.parameters())  # at most the transpose of each deferred weight


def test_the_second_microbatch_allocates_nothing_the_size_of_the_table():
    """W adds rows to the gradient that is there; plain autograd makes a table per microbatch."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() != weight.grad.data_ptr():
                self.largest = max(self.largest, result.numel())
            return result

    embedding = nn.Embedding(1000, 4, padding_idx=0, dtype=torch.float64)
    weight = embedding.weight
    weight.grad = double(1000, 4)
    output = embedding(torch.arange(6))
    with Sizes() as sizes:
        _, weight_grads = backward_input(output, output_grads(output), ())
        weight_grads.accumulate()
    assert 0 < sizes.largest <= 24
