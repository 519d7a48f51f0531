"""Memory that does not grow: with the number of microbatches, and with the number of steps."""

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.mlp import Mlp
from zbpp.runtime.measure.live_tensors import live_bytes

SIZE = 256
BOUNDARY = 4 * SIZE  # bytes of what passes between two stages for one microbatch of one row
SCHEDULES = ["1f1b", "zb_h1", "zb_v"]
SIZES = [8, 16, 32]
CPU = torch.device("cpu")


def pipeline_for(rank, schedule, num_ranks, num_microbatches):
    timetable = plan(schedule, num_ranks, num_microbatches)
    model = Mlp(in_features=SIZE, hidden_size=SIZE, out_features=SIZE, num_layers=6)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    return Pipeline(stages, timetable, model.loss)


def at_the_peak(rank, num_ranks):
    """{(schedule, microbatches): (receive buffers, most bytes live in a step over those before it)}."""
    found = {}
    for schedule in SCHEDULES:
        for num_microbatches in SIZES:
            pipeline = pipeline_for(rank, schedule, num_ranks, num_microbatches)
            batch = torch.ones(num_microbatches, SIZE)
            for _ in range(2):  # the first agrees on shapes; then .grad and all buffers are there
                pipeline.step(batch, target=batch)
            level = live_bytes(lambda p=pipeline, x=batch: p.step(x, target=x), CPU)
            found[schedule, num_microbatches] = len(pipeline._rank.executors["step"]._pool), level.highest
    return found


@pytest.fixture(scope="module")
def peaks():
    return run_ranks(at_the_peak, 2, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_and_live_bytes_do_not_grow_with_the_number_of_microbatches(schedule, peaks):
    for rank in peaks:
        buffers, live = zip(*[rank[schedule, num] for num in SIZES], strict=True)
        assert len(set(buffers)) == 1
        assert buffers[0] > 0
        assert live[0] >= BOUNDARY
        # The losses, 4 bytes for each microbatch, are the caller's.
        assert max(live) - min(live) <= 4 * (SIZES[-1] - SIZES[0]) < BOUNDARY
