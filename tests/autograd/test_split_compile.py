"""Compiled blocks in the split backward. Their weights' gradients come out of one compiled function: B's."""

import pytest
import torch
import torch._dynamo
from torch import nn

from helpers.split import assert_equals_plain, leaf
from zbpp import backward_input

# Dynamo looks at `.grad` of every input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

RUNS: list[str] = []

# aot_eager: the graphs are traced and cut as for the real compiler, and run as they are.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    RUNS.clear()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("zbpp_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("zbpp_tests::counted_backward", mutates_args=())
def counted_backward(grad: torch.Tensor) -> torch.Tensor:
    RUNS.append("backward")
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


def compiled_blocks():
    return nn.Sequential(*(torch.compile(Block(), backend=BACKEND) for _ in range(2)), nn.Linear(4, 4))


def test_compiled_blocks_equal_plain_autograd_and_their_backward_runs_once():
    facts = assert_equals_plain(compiled_blocks, lambda: leaf(5, 4), count_products=False)
    assert {name.split(".")[-2] for name in facts.computed} == {"norm", "up", "down"}
    assert facts.deferred == {"2.weight", "2.bias"}  # the layer that is not compiled
    assert len(RUNS) == 2 * 2 * 2  # plain and split, microbatches, blocks


def test_compiled_blocks_on_stage_0():
    facts = assert_equals_plain(compiled_blocks, lambda: torch.randn(5, 4), count_products=False)
    assert facts.deferred == {"2.weight", "2.bias"}
    assert len(RUNS) == 8


def test_nothing_of_a_compiled_backward_runs_in_w():
    block = torch.compile(Block(), backend=BACKEND)
    x = torch.randn(5, 4, requires_grad=True)
    _, weight_grads = backward_input(block(x), torch.ones(5, 4), x)
    assert RUNS == ["backward"]
    weight_grads.accumulate()
    assert RUNS == ["backward"]


def test_a_graph_break_inside_a_block():
    class Broken(Block):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    assert_equals_plain(
        lambda: torch.compile(Broken(), backend=BACKEND), lambda: leaf(5, 4), count_products=False
    )
    assert len(RUNS) == 8
