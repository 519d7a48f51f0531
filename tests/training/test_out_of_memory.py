"""An error about memory, wherever a run meets it, keeps its type; its notes say where."""

import pytest
import torch
from torch import nn

from zbpp import Pipeline, plan
from zbpp.job.errors import is_out_of_memory
from zbpp.run.app import out_of_memory_explained

CPU = "[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"


class Raises(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU)]
)
def test_an_error_about_memory_keeps_its_type_and_says_where(error):
    """A RuntimeError of the CPU's allocator in a later stage was taken for one of its input."""
    pipeline = Pipeline({0: nn.Linear(3, 3), 1: Raises(error)}, plan("zb_v", 1, 4), nn.functional.mse_loss)
    with pytest.raises(type(error)) as caught, out_of_memory_explained(1):
        pipeline.step(torch.ones(4, 3), target=torch.ones(4, 3))
    notes = "\n".join(caught.value.__notes__)
    assert "in 1F0 (" in notes
    assert "rank 1 is out of memory; its peak so far: " in notes
    assert "`zbpp memory` with the arguments of this run" in notes


def test_a_real_failure_of_the_cpus_allocator_is_one_about_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert is_out_of_memory(caught.value)
