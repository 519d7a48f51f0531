"""Cases: blocks that torch.compile compiles."""

import torch
import torch._dynamo
from torch import nn

from helpers.split import Case, leaf

# The graphs are traced and cut as for the real compiler, and run as they are.
BACKEND = "aot_eager"


def record(event):
    """Does nothing. A test replaces it to see what runs."""


@torch.library.custom_op("zbpp_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("zbpp_tests::counted_backward", mutates_args=())
def counted_backward(grad: torch.Tensor) -> torch.Tensor:
    record("backward")
    return grad.clone()


counted.register_fake(torch.empty_like)
counted_backward.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, grad: counted_backward(grad))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + counted(self.down(torch.tanh(self.up(self.norm(x)))))


def _compiled_blocks():
    return nn.Sequential(*(torch.compile(Block(), backend=BACKEND) for _ in range(2)), nn.Linear(4, 4))


def compiled_blocks() -> Case:
    return Case(_compiled_blocks, lambda: leaf(5, 4), count_products=False)


def compiled_blocks_on_stage_0() -> Case:
    return Case(_compiled_blocks, lambda: torch.randn(5, 4), count_products=False)


def block_with_graph_break() -> Case:
    class Broken(Block):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    return Case(lambda: torch.compile(Broken(), backend=BACKEND), lambda: leaf(5, 4), count_products=False)
