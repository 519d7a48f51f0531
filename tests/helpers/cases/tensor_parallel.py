"""A tensor-parallel module on the ranks of the default process group."""

import torch
import torch.distributed as dist
from torch import nn

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
