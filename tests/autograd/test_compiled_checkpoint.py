"""Compiled layers under zbpp.checkpoint: what checkpointing saves stays saved, and gradients are right."""

import copy
import logging

import pytest
import torch
from torch import nn

from helpers.split import assert_close, float64, grads_of, leaf
from tests.autograd.test_split_memory import Watch
from zbpp import backward_input, checkpoint
from zbpp.autograd import recompute
from zbpp.autograd.compiled import compile_stage
from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.models.llama import Llama


def llama():
    """Two layers."""
    with float64():
        torch.manual_seed(0)
        model = Llama(vocab_size=20, num_layers=6, hidden_size=16, num_heads=4, sequence_length=8)
        return model.build_stage(1, 3).double()


class Checkpointed(nn.Module):
    """A stage whose forward calls zbpp.checkpoint."""

    def __init__(self, stage):
        super().__init__()
        self.layers = nn.ModuleList(stage.children())

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x)
        return x


def inside(stage, compiled):
    stage = Checkpointed(stage)
    if compiled:
        compile_stage(stage, backend="eager")
    return stage


def around(stage, compiled):
    if compiled:
        compile_stage(stage, backend="eager", whole=False)
    for layer in stage.children():
        recompute(layer)
    return stage


def before(stage, compiled):
    """As memory.recompute=block would, which the trainer refuses beside compile."""
    for layer in stage.children():
        recompute(layer)
    if compiled:
        compile_stage(stage, backend="eager")
    return stage


def step(stage):
    """Bytes alive after F, B and W but for what is the caller's, and the gradient of x."""
    with float64():
        torch.manual_seed(1)
        x, dy = leaf(2, 8, 16), torch.randn(2, 8, 16)
    with without_garbage_collection(), Watch() as watch:
        alive = []
        y = stage(x)
        alive.append(_bytes(watch) - y.nbytes)
        (dx,), weight_grads = backward_input(y, dy, x)
        del y
        alive.append(_bytes(watch) - dx.nbytes)
        weight_grads.accumulate()
        alive.append(_bytes(watch) - dx.nbytes)
    return alive, dx


def _bytes(watch):
    return sum(size for size, _ in watch.alive().values())


def measured(stage):
    """A step that compiles, then one that is measured, and its gradients."""
    step(stage)
    stage.zero_grad(set_to_none=False)  # so that W makes nothing
    alive, dx = step(stage)
    return alive, grads_of(stage) | {"x": dx}


@pytest.mark.parametrize("how", [inside, around, before])
def test_compiled_layers_under_a_checkpoint_hold_no_more_than_eager_ones(how, caplog):
    plain = llama()
    (plain_after_f, _, _), _ = measured(copy.deepcopy(plain))
    (eager_after_f, eager_after_b, _), expected = measured(how(copy.deepcopy(plain), False))
    (after_f, after_b, after_w), found = measured(how(copy.deepcopy(plain), True))
    assert_close(found, expected, 1e-10)
    assert after_f <= eager_after_f < plain_after_f / 4
    assert 0 < after_b <= eager_after_b
    assert after_w == 0
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert bool(told) == (how is not around)
    if told:
        assert told[0].startswith("stage is not compiled, its layers are, each by itself: ")
