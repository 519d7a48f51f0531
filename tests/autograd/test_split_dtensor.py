"""The split backward of a tensor-parallel module: DTensor weights over two real processes."""

import torch
import torch.distributed as dist
from torch import nn

from helpers.processes import run_ranks
from helpers.split import double, float64
from zbpp import backward_input


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def gradients(rank, split):
    """Whole gradients of the parallel module, and of its input, over two microbatches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with float64():
        torch.manual_seed(0)
        module = Mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found, later, held_bytes = {}, [], 0
    for microbatch in range(2):
        x, dy = double(5, 8, seed=microbatch).requires_grad_(), double(5, 4, seed=10 + microbatch)
        if split:
            (found[f"x{microbatch}"],), weight_grads = backward_input(module(x), dy, x)
            held_bytes = weight_grads.held_bytes
            later.append(weight_grads)
        else:
            module(x).backward(dy)
            found[f"x{microbatch}"] = x.grad
    assert not later or all(parameter.grad is None for parameter in module.parameters())
    for weight_grads in later:
        weight_grads.accumulate()
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor):
            assert isinstance(grad, DTensor), name
            assert grad.placements == parameter.placements, name
            grad = grad.full_tensor()
        found[name] = grad
    return found, held_bytes


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
