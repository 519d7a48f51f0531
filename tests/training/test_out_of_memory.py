"""An error about memory, wherever a run meets it, keeps its type; its notes say where."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.job.errors import is_out_of_memory
from zbpp.training.memory_report import out_of_memory_explained
from zbpp.training.trainer import Trainer


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error, is_forward):
        ctx.error = error
        if is_forward:
            raise error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


class Stage(nn.Linear):
    def __init__(self, error, *, is_forward):
        super().__init__(3, 3)
        self.error, self.is_forward = error, is_forward

    def forward(self, x):
        return super().forward(Raises.apply(super().forward(x), self.error, self.is_forward))


CPU = "[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"


def small(modules, optimizer=torch.optim.SGD):
    pipeline = Pipeline(modules, plan("zb_v", 1, 4), F.mse_loss)
    return Trainer(
        pipeline=pipeline,
        optimizer=optimizer(pipeline.parameters(), lr=0.1),
        data=regression_data(in_features=3, out_features=3, batch_size=4, seed=0),
        learning_rate=lambda step: 1.0,
    )


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU)]
)
@pytest.mark.parametrize(
    ("stage", "is_forward", "where"), [(0, True, "0F0"), (1, True, "1F0"), (1, False, "1B0")]
)
def test_an_error_about_memory_keeps_its_type_and_says_where(error, stage, is_forward, where):
    """A RuntimeError of the CPU's allocator in a later stage was taken for one of its input."""
    error = type(error)(*error.args)
    bad = Stage(error, is_forward=is_forward)
    trainer = small({stage: bad, 1 - stage: nn.Linear(3, 3)})
    with pytest.raises(type(error)) as caught, out_of_memory_explained(1):
        list(trainer.run(1))
    notes = notes_of(caught.value)
    assert f"in {where} (" in notes
    assert "rank 1 is out of memory; its peak so far: " in notes
    assert "`zbpp memory` with the arguments of this run" in notes


def test_a_real_failure_of_the_cpus_allocator_is_one_about_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert is_out_of_memory(caught.value)
