"""The split backward of a tensor-parallel module: DTensor weights over two real processes."""

import torch

from helpers.cases.tensor_parallel import Mlp, gradients
from helpers.processes import run_ranks
from helpers.split import double, float64


def alone():
    with float64():
        torch.manual_seed(0)
        module = Mlp()
    found = {}
    for microbatch in range(2):
        x = double(5, 8, seed=microbatch).requires_grad_()
        module(x).backward(double(5, 4, seed=10 + microbatch))
        found[f"x{microbatch}"] = x.grad
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


def both(rank):
    return gradients(rank, split=False), gradients(rank, split=True)


def test_tensor_parallel_weights_get_the_gradients_of_plain_autograd():
    expected = alone()
    for (plain, _), (split, held_bytes) in run_ranks(both, 2):
        assert plain.keys() == split.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(split[name], plain[name], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(split[name], expected[name], rtol=1e-12, atol=1e-12)
        # Half of `up` and `down`, computed in B; the norm; x and dy of the head, which is whole.
        assert held_bytes >= 8 * (8 * 8 + 8 + 8 * 8 + 2 * 8 + 5 * 8)
