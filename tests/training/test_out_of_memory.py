"""An error about memory, wherever a run meets it, keeps its type; its notes say where."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.job.errors import is_out_of_memory
from zbpp.training.out_of_memory import MemoryFailure
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
    with pytest.raises(type(error)) as caught, MemoryFailure(1, 2).explained():
        list(trainer.run(1))
    notes = notes_of(caught.value)
    assert f"in {where} (" in notes
    assert f"rank 1 of 2 is out of memory in {where}; its peak so far: " in notes
    assert "GiB resident in its process\n`zbpp memory` with the arguments of this run" in notes


def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_w_the_update_and_the_start_are_places_too():
    trainer = small({0: nn.Linear(3, 3), 1: nn.Linear(3, 3)})
    trainer.optimizer.step = fail
    with pytest.raises(torch.OutOfMemoryError) as caught, MemoryFailure(1, 2).explained():
        list(trainer.run(1))
    assert "rank 1 of 2 is out of memory in the update; " in notes_of(caught.value)
    trainer = small({0: nn.Linear(3, 3), 1: nn.Linear(3, 3)})
    trainer.pipeline.stages[0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught, MemoryFailure(1, 2).explained():
        list(trainer.run(1))
    assert "rank 1 of 2 is out of memory in 0W0; " in notes_of(caught.value)
    memory = MemoryFailure(0, 1)
    with pytest.raises(MemoryError) as caught, memory.explained(), memory.explained():
        raise MemoryError
    assert (
        notes_of(caught.value).count("is out of memory while the plan, the model and the data are mad") == 1
    )
    memory.doing = "between the steps"
    with pytest.raises(RuntimeError, match="fail at") as caught, memory.explained():
        raise RuntimeError(CPU)
    assert "rank 0 is out of memory between the steps; " in notes_of(caught.value)


def test_a_real_failure_of_the_cpus_allocator_is_one_about_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert is_out_of_memory(caught.value)


def test_another_error_gets_no_word_about_memory():
    with pytest.raises(RuntimeError) as caught, MemoryFailure(1, 2).explained():
        raise RuntimeError("shapes differ")
    assert not notes_of(caught.value)
