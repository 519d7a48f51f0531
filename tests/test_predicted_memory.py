"""What `zbpp memory` predicts is what a real job holds, action by action."""

from functools import partial

import pytest
import torch

from helpers.configs import composed
from helpers.processes import run_ranks
from zbpp.builders.data import build_data
from zbpp.builders.model import build_model, build_stages
from zbpp.builders.optimizer import build_optimizer
from zbpp.builders.plan import build_timetable
from zbpp.builders.stages import move_stages, recompute_stages
from zbpp.builders.trainer import build_masters, build_pipeline
from zbpp.predict_memory import predict
from zbpp.runtime.memory_record import MemoryRecord
from zbpp.training.batch import batch_for
from zbpp.training.precision import PRECISIONS

TINY = ["model.num_layers=4", "model.hidden_size=32", "num_microbatches=4", "microbatch_size=2"]
CASES = {
    "1f1b": ["schedule=1f1b", "model=gpt_tiny", *TINY],
    "zb_h1": ["schedule=zb_h1", "model=llama_tiny", *TINY],
    "v_half": ["schedule=v_half", "model=llama_tiny", *TINY],
    "recompute": ["schedule=zb_h1", "model=gpt_tiny", "memory.recompute=block", *TINY],
    "masters": ["schedule=zb_h1", "model=llama_tiny", "precision=mixed_bfloat16", *TINY],
}
RANKS = 2


def static_of(pipeline, optimizer, masters, batch):
    """All tensors that stay from step to step."""
    yield from (each for each in batch if each is not None)
    for stage in pipeline.stages.values():
        for each in (*stage.parameters(), *stage.buffers()):
            held = each, each.grad, getattr(each, "main_grad", None)
            yield from (tensor for tensor in held if tensor is not None)
    yield from () if masters is None else masters.parameters()
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, torch.Tensor))
    yield from pipeline.receive_buffers()


def levels_of(rank, overrides):
    """[level before the first action, then after each], the highest level of the step, and its leftovers."""
    config = composed(*overrides, f"parallel.num_processes={RANKS}")
    precision, model = PRECISIONS[config.precision], build_model(config.model)
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    stages = build_stages(model, timetable, rank)
    move_stages(stages, torch.device("cpu"), precision)
    recompute_stages(stages, config.memory.recompute)
    data = build_data(config.data, timetable.num_microbatches * config.microbatch_size, 0)
    loss_fn = precision.widened(model.loss)
    pipeline = build_pipeline(stages, timetable, loss_fn, 0, config.parallel, precision, None, config.memory)
    masters = build_masters(pipeline, precision)
    optimizer = build_optimizer((masters or pipeline).parameters(), config.optimizer)
    args, target = batch_for(stages, timetable.num_stages, data.train, 0, pipeline.device)
    record = MemoryRecord(pipeline.device)
    with pipeline:
        for step in range(3):
            (masters or optimizer).zero_grad()
            if step < 2:
                pipeline.step(*args, target=target)
            else:
                static = partial(static_of, pipeline, optimizer, masters, (*args, target))
                with record.step(static), pipeline.recording(record.recorder):
                    pipeline.step(*args, target=target)
            optimizer.step()
            if masters is not None:
                masters.update()
    levels = [record.spans[0].before, *(each.after for each in record.spans)]
    return levels, record.highest, record.leftovers


def all_levels(rank):
    return {name: levels_of(rank, overrides) for name, overrides in CASES.items()}


@pytest.fixture(scope="module")
def measured():
    return run_ranks(all_levels, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_curve_is_the_measured_one(measured, name):
    """Within .1 % of the peak after every action, and for the peak itself: a few losses are not predicted."""
    prediction = predict(composed(*CASES[name], f"parallel.num_processes={RANKS}"))
    for rank, found in zip(prediction.ranks, measured, strict=True):
        levels, highest, _ = found[name]
        assert len(levels) == len(rank.totals)
        assert list(rank.totals) == pytest.approx(levels, abs=0.001 * highest)
        assert max(rank.during) == pytest.approx(highest, rel=0.001)


def test_a_step_leaves_nothing_behind(measured):
    assert [found[name][2] for found in measured for name in CASES] == [[]] * (RANKS * len(CASES))
