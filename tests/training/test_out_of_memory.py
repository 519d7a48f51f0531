"""An error about memory, raised by a stage in F or in B, keeps its type; its notes say where and what."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline, plan
from zbpp.app import _explained
from zbpp.data import regression_data
from zbpp.training.out_of_memory import note_memory
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


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU)]
)
@pytest.mark.parametrize(
    ("is_forward", "where"), [(True, "in 0F0 (F, the forward, of stage 0"), (False, "in 1B0")]
)
def test_an_error_about_memory_keeps_its_type_and_says_where(error, is_forward, where):
    error = type(error)(*error.args)
    bad = Stage(error, is_forward=is_forward)
    modules = {0: bad, 1: nn.Linear(3, 3)} if is_forward else {0: nn.Linear(3, 3), 1: bad}
    pipeline = Pipeline(modules, plan("zb_v", 1, 4), F.mse_loss)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1),
        data=regression_data(in_features=3, out_features=3, batch_size=4, seed=0),
        learning_rate=lambda step: 1.0,
    )
    with pytest.raises(type(error)) as caught, _explained(trainer):
        list(trainer.run(1))
    notes = "\n".join(caught.value.__notes__)
    assert where in notes
    assert "rank 0 is out of memory; its peak so far" in notes
    assert "`zbpp memory`" in notes


def test_another_error_gets_no_word_about_memory():
    error = RuntimeError("shapes differ")
    note_memory(error, 0, torch.device("cpu"))
    assert not getattr(error, "__notes__", [])
