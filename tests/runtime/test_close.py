"""The end of a pipeline: what it gives up, what it leaves to others, and that nobody is cut off by it."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import open_things, run_ranks
from zbpp import Pipeline, plan
from zbpp.job.agreement import gather
from zbpp.runtime import CommunicationError

M, SIZE = 4, 6
CLOSED = "^the pipeline was closed: make a new Pipeline$"


def pipeline_of(rank, num_ranks=2, group=None, schedule="zb_h1"):
    torch.manual_seed(rank)
    return Pipeline(
        {rank: nn.Linear(SIZE, SIZE)}, plan(schedule, num_ranks, M), F.mse_loss, group, timeout=30
    )


def step(pipeline):
    x = torch.linspace(-1, 1, M * SIZE).reshape(M, SIZE)
    return pipeline.step(x, target=x)


def losses(pipeline):
    return [float(loss) for loss in step(pipeline)]


# ---------------------------------------------------------------- what stays and what goes


def opened_and_closed(rank, num_rounds, sizes):
    """What is open before, and after each round of a pipeline over the job (or a part of it); its losses."""
    group = dist.new_group(sizes) if sizes else None
    if sizes and rank not in sizes:
        return None
    place, found = dist.get_rank(group), []
    gather(rank, group)
    before = open_things()
    for _ in range(num_rounds):
        with pipeline_of(place, dist.get_world_size(group), group) as pipeline:
            told = losses(pipeline)
            during = open_things()
        del pipeline
        found.append((told, during, open_things()))
    gather(rank, group)
    return before, found


@pytest.mark.parametrize(("num_processes", "part"), [(2, None), (3, [1, 2])])
def test_closed_pipelines_leave_no_process_groups_and_no_files_open(num_processes, part):
    for result in filter(None, run_ranks(opened_and_closed, num_processes, 4, part)):
        before, rounds = result
        first, during, _ = rounds[0]
        assert during[0] == before[0] + 2
        assert during[1] > before[1]
        # gloo opens a few things once for the process: what the first round leaves must not grow.
        assert [after for *_, after in rounds] == [rounds[0][2]] * 4
        assert {after[0] for *_, after in rounds} == {before[0]}
        assert [told for told, *_ in rounds] == [first] * 4


def after_closing(rank):
    pipeline = pipeline_of(rank)
    step(pipeline)
    pipeline.close()
    pipeline.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        step(pipeline)
    with pytest.raises(RuntimeError, match=CLOSED):
        pipeline.evaluate(torch.ones(M, SIZE), target=torch.ones(M, SIZE))
    (stage,) = pipeline.stages.values()
    return stage.weight.grad is not None, gather(rank)


def test_gradients_stages_and_the_callers_group_stay_but_no_step_runs():
    assert run_ranks(after_closing, 2) == [(True, [0, 1])] * 2


# ---------------------------------------------------------------- who waits for whom


def wait_for(path):
    deadline = time.monotonic() + 100
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return path.exists()


def step_twice(pipeline, rank):
    with pipeline:
        step(pipeline)
        if rank == 1:
            raise KeyError("planted")
        step(pipeline)


def left_by_an_error(rank, folder):
    """Rank 1 fails between two steps and lives on until rank 0, which is in the second one, has noticed."""
    noticed, pipeline = Path(folder) / "noticed", pipeline_of(rank)
    with pytest.raises(CommunicationError if rank == 0 else KeyError):
        step_twice(pipeline, rank)
    if rank == 0:
        noticed.touch()
    with pytest.raises(RuntimeError, match="make a new Pipeline") as caught:
        step(pipeline)
    pipeline.close()  # waits for nobody any more
    return wait_for(noticed), str(caught.value), open_things()[0]


def test_an_error_inside_with_ends_the_pipeline_on_all_ranks_at_once(tmp_path):
    (noticed, first, groups), (also, second, others) = run_ranks(left_by_an_error, 2, str(tmp_path))
    assert noticed
    assert also
    assert first.startswith("an earlier call failed (CommunicationError: rank 0, ")
    assert second == "an error ended the pipeline (KeyError: 'planted'): make a new Pipeline"
    assert (groups, others) == (1, 1)


# ---------------------------------------------------------------- another timetable


def with_dropout(schedule, rank=0, num_ranks=1):
    torch.manual_seed(0)
    timetable = plan(schedule, num_ranks, M)
    everything = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.3)) for _ in range(timetable.num_stages)]
    return Pipeline({stage: everything[stage] for stage in timetable.stages_of(rank)}, timetable, F.mse_loss)


def change_after_one_step(rank):
    """Losses of two steps, and whether gradients are equal: under 1f1b and then zb_h1, both under zb_h1."""
    changed, same = with_dropout("1f1b", rank, 2), with_dropout("zb_h1", rank, 2)
    losses = step(changed)
    changed.use_timetable(plan("zb_h1", 2, M))
    losses += step(changed)
    expected = step(same) + step(same)
    assert (changed.num_steps, changed.timetable) == (2, same.timetable)
    for mine, theirs in zip(changed.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    return [loss.item() for loss in losses], [loss.item() for loss in expected]


def test_another_timetable_goes_on_with_the_same_dropout_and_stages():
    (_, _), (losses, expected) = run_ranks(change_after_one_step, 2)
    assert len(losses) == 2 * M
    assert losses == expected


def test_a_timetable_that_places_stages_elsewhere_is_refused_and_closes_nothing():
    pipeline = with_dropout("zb_v")
    with pytest.raises(
        ValueError, match=r"on other ranks than this pipeline's: rank_of \[0\] instead of \[0, 0\]"
    ):
        pipeline.use_timetable(plan("zb_h1", 1, M))
    assert len(step(pipeline)) == M
