"""The split backward of embeddings: rows added where they belong, no table-sized temporary."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.split import double, output_grads
from zbpp import backward_input


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
