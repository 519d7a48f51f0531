"""Messages as they were measured on real processes."""

import torch
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, Recorder, plan
from zbpp.schedule import consumes, produces, simulate
from zbpp.schedule.timeline import transfers_of


def recorded(rank, timetable):
    stages = {stage: nn.Linear(4, 4) for stage in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, nn.functional.mse_loss)
    with pipeline.using(Recorder()) as recorder:
        for _ in range(2):  # the second replaces the first
            pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4))
    return recorder.timeline()


def test_a_message_leaves_after_it_is_made_and_is_there_before_it_is_used():
    timetable = plan("zb_v", 2, 4)
    first, second = run_ranks(recorded, 2, timetable)
    assert first.transfers == second.transfers
    ends, starts = {}, {}
    for row, row_starts, row_ends in zip(timetable.rows, first.starts, first.ends, strict=True):
        for action, start, end in zip(row, row_starts.tolist(), row_ends.tolist(), strict=True):
            ends |= dict.fromkeys(produces(action, timetable.num_stages), end)
            starts |= dict.fromkeys(consumes(action), start)
    predicted = transfers_of(simulate(timetable))
    assert [each[:3] for each in transfers_of(first)] == [each[:3] for each in predicted]
    for value, _, _, sent, arrived in first.transfers:
        assert ends[value] <= sent <= arrived <= starts[value]
