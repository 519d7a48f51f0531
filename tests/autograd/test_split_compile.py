"""Compiled blocks in the split backward. Their weights' gradients come out of one compiled function: B's."""

import pytest
import torch
import torch._dynamo

from helpers.cases import compile as cases
from helpers.cases.compile import BACKEND, Block
from zbpp import backward_input

# Dynamo looks at `.grad` of every input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """What has run so far."""
    found = []
    monkeypatch.setattr(cases, "record", found.append)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def test_compiled_blocks_equal_plain_autograd_and_their_backward_runs_once(runs):
    facts = cases.compiled_blocks().compare()
    assert {name.split(".")[-2] for name in facts.computed} == {"norm", "up", "down"}
    assert facts.deferred == {"2.weight", "2.bias"}  # the layer that is not compiled
    assert len(runs) == 2 * 2 * 2  # plain and split, microbatches, blocks


def test_compiled_blocks_on_stage_0_run_backward_once(runs):
    facts = cases.compiled_blocks_on_stage_0().compare()
    assert facts.deferred == {"2.weight", "2.bias"}
    assert len(runs) == 8


def test_nothing_of_a_compiled_backward_runs_in_w(runs):
    block = torch.compile(Block(), backend=BACKEND)
    x = torch.randn(5, 4, requires_grad=True)
    _, weight_grads = backward_input(block(x), torch.ones(5, 4), x)
    assert runs == ["backward"]
    weight_grads.accumulate()
    assert runs == ["backward"]


def test_a_block_with_a_graph_break_is_right(runs):
    cases.block_with_graph_break().compare()
    assert len(runs) == 8
