"""An error about memory, wherever a run meets it, keeps its type; its notes say where, and what would fit."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.configs import composed
from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.job.errors import is_out_of_memory
from zbpp.prediction import what_fits
from zbpp.prediction.predictor import predict
from zbpp.prediction.switches import Switches
from zbpp.prediction.what_fits import Failed, lines_in_time, with_processes
from zbpp.render import in_bytes
from zbpp.run.memory_failure import MemoryFailure
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
MODEL = [
    "model._target_=zbpp.models.mlp.Mlp", "model.in_features=8", "model.hidden_size=64", "model.num_layers=4",
    "model.out_features=8", "data._target_=zbpp.data.regression_data", "data.in_features=8",
    "data.out_features=8", "microbatch_size=512", "num_microbatches=4",
]  # fmt: skip


def failure(*options, rank=1, num_processes=2):
    return MemoryFailure(composed("run_dir=/tmp/none", *MODEL, *options), rank, num_processes)


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


@pytest.fixture
def unpredicted(monkeypatch):
    """What would be predicted: the arguments."""
    asked = []
    monkeypatch.setattr(
        what_fits, "lines_in_time", lambda *arguments: asked.append(arguments) or ["predicted"]
    )
    return asked


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU)]
)
@pytest.mark.parametrize(
    ("stage", "is_forward", "where"), [(0, True, "0F0"), (1, True, "1F0"), (1, False, "1B0")]
)
def test_an_error_about_memory_keeps_its_type_and_says_where(error, stage, is_forward, where, unpredicted):
    """A RuntimeError of the CPU's allocator in a later stage was taken for one of its input."""
    error = type(error)(*error.args)
    bad = Stage(error, is_forward=is_forward)
    trainer = small({stage: bad, 1 - stage: nn.Linear(3, 3)})
    with pytest.raises(type(error)) as caught, failure().explained():
        list(trainer.run(1))
    notes = notes_of(caught.value)
    assert f"in {where} (" in notes
    assert f"rank 1 of 2 is out of memory in {where}; its peak so far: " in notes
    assert notes.endswith("GiB resident in its process\npredicted")
    ((_, _, failed, _),) = unpredicted
    assert failed == (1, where, None)


def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_w_the_update_and_the_start_are_places_too(unpredicted):
    trainer = small({0: nn.Linear(3, 3), 1: nn.Linear(3, 3)})
    trainer.optimizer.step = fail
    with pytest.raises(torch.OutOfMemoryError) as caught, failure().explained():
        list(trainer.run(1))
    assert "rank 1 of 2 is out of memory in the update; " in notes_of(caught.value)
    trainer = small({0: nn.Linear(3, 3), 1: nn.Linear(3, 3)})
    trainer.pipeline.stages[0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught, failure().explained():
        list(trainer.run(1))
    assert "rank 1 of 2 is out of memory in 0W0; " in notes_of(caught.value)
    memory = failure(rank=0, num_processes=1)
    with pytest.raises(MemoryError) as caught, memory.explained(), memory.explained():
        raise MemoryError
    assert (
        notes_of(caught.value).count("is out of memory while the plan, the model and the data are mad") == 1
    )
    memory.prepares(plan("zb_h1", 1, 4), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="fail at") as caught, memory.explained():
        raise RuntimeError(CPU)
    assert "rank 0 is out of memory while the stages go to cpu, with their optimizer; " in notes_of(
        caught.value
    )


def test_a_real_failure_of_the_cpus_allocator_is_one_about_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert is_out_of_memory(caught.value)


def test_another_error_gets_no_word_about_memory(unpredicted):
    with pytest.raises(RuntimeError) as caught, failure().explained():
        raise RuntimeError("shapes differ")
    assert not notes_of(caught.value)
    assert not unpredicted


def test_what_is_predicted_is_what_zbpp_memory_predicts_and_only_what_fits_is_listed():
    config = with_processes(composed("run_dir=/tmp/none", *MODEL, "schedule=gpipe"), 2)
    own = predict(config)
    mine = own.ranks[1]
    limit = 0.9 * max(each.peak for each in own.ranks)
    first, head, *rest = lines_in_time(config, own.timetable, Failed(1, "1F2", limit), 120)
    there = mine.during[list(map(str, mine.actions)).index("1F2")]
    assert first == (
        f"predicted for this rank: {in_bytes(mine.peak)} at most, in {mine.peak_at}, {in_bytes(there)} in 1F2"
    )
    assert head.endswith(f"as configured, would need at most {in_bytes(limit)} with:")
    listed = dict(line[2:].rsplit(": ", 1) for line in rest if line.startswith("- "))
    for changes in (
        {"schedule.name": "1f1b"},
        {"schedule.name": "zb_h2"},
        {"microbatch_size": 256, "num_microbatches": 8},
        {"parallel.num_processes": 4},
    ):
        row = Switches(config).row(changes)
        assert listed.get(row.title) == (in_bytes(row.peak) if row.peak <= limit else None), row.title
    assert len(listed) >= 2
    assert rest[-1].startswith("`zbpp memory` with the arguments of this run")


def test_a_prediction_that_takes_too_long_is_ended():
    began = time.monotonic()
    config = with_processes(composed("run_dir=/tmp/none", *MODEL), 2)
    (line,) = lines_in_time(config, None, Failed(0, "", None), 0.01)
    assert line.startswith("not predicted within 0.01 s: anything; `zbpp memory`")
    assert time.monotonic() - began < 10
