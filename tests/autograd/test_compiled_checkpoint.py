"""Compiled layers under zbpp.checkpoint: what checkpointing saves stays saved, and gradients are right."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers.split import assert_close, float64, grads_of
from zbpp import backward_input
from zbpp.autograd.compiled import compile_stage

# ---------------------------------------------------------------- torch's selective checkpoint

MATMULS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def keep_matmuls(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def keep_all(*args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


class Normed(nn.Sequential):
    """Its norm and its dropout return several tensors."""

    def __init__(self):
        super().__init__(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


class Selective(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Normed(), nn.Tanh()) for _ in range(2)])
        self.contexts = partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)

    def forward(self, x):
        for layer in self.layers:
            x = torch_checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return x


def step_of(stage, x, dy, run):
    """The gradients of a step, x's too."""
    torch.manual_seed(1)
    stage.zero_grad()
    x = x.detach().requires_grad_()
    dx = run(stage(x), dy, x)
    return grads_of(stage) | {"x": dx}


def plain_backward(y, dy, x):
    y.backward(dy)
    return x.grad


def split_backward(y, dy, x):
    (dx,), weight_grads = backward_input(y, dy, x)
    weight_grads.accumulate()
    return dx


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("policy", [keep_matmuls, keep_all])
def test_selective_checkpointing_in_a_compiled_stage_has_plain_gradients(policy, whole, budget, caplog):
    """A compiled layer was captured inside: the checkpoint kept fake tensors, and the recompute got them.

    A whole stage crashed if its F was to keep the tuple that a norm or dropout returns.
    """
    with float64():
        torch.manual_seed(0)
        plain, x, dy = Selective(policy), torch.randn(3, 4), torch.randn(3, 4)
    compiled = copy.deepcopy(plain)
    compile_stage(compiled, backend="eager", whole=whole, budget=budget)
    expected = step_of(plain, x, dy, plain_backward)
    for _ in range(2):
        assert_close(step_of(compiled, x, dy, split_backward), expected, 1e-12)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if not whole:
        refused = [line for line in told if line.startswith(("stage layers.0 is", "stage layers.1 is"))]
        assert all("torch.utils.checkpoint calls it with context_fn" in line for line in refused)
        assert len(refused) == 2
