"""Ranks that call step, evaluate and close in different orders, or give different numbers of rows."""

import time
from contextlib import suppress
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zbpp
from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan
from zbpp.observers.same_calls import CallOrder
from zbpp.runtime import AgreementError, CommunicationError

M, SIZE = 2, 3


def two_ranks():
    store = dist.HashStore()
    return [CallOrder(store, rank, {1 - rank}) for rank in range(2)]


def test_a_rank_that_is_a_call_behind_or_ahead_is_no_disagreement():
    first, second = two_ranks()
    for kind in ("step", "evaluate", "evaluate", "step"):
        first.begin(kind, None)
        second.begin(kind, 8)
        first.check()
        second.check()
    for _ in range(3):  # as a rank on CUDA may be
        first.begin("step", 8)
    second.check()
    for _ in range(3):
        second.begin("step", None)
        second.check()


def test_two_ranks_in_different_calls_find_each_others():
    ranks = two_ranks()
    for each in ranks:
        each.begin("step", None)
    ranks[0].begin("evaluate", None)
    ranks[1].begin("step", None)
    with pytest.raises(
        AgreementError, match=r"rank 0 is in evaluate\(\) while rank 1 is in step\(\): every rank must"
    ):
        ranks[1].check()
    with pytest.raises(AgreementError, match=r"is in step\(\) while rank \d is in evaluate\(\)"):
        ranks[0].check()


def test_a_rank_that_waits_in_vain_says_how_many_calls_the_others_have_begun():
    store = dist.HashStore()
    first, second, third = (CallOrder(store, rank, {}, range(3)) for rank in range(3))
    for each in (first, second, third, first, third):
        each.begin("step", None)
    assert third.differences() == [
        "rank 1 has begun 1 calls of this pipeline, the last one step(), and rank 2 2, the last one step(): "
        "every rank must make as many"
    ]


def uneven(rank, replicate):
    """What the rank that makes one step more is told."""
    mesh = make_mesh(replicate=replicate)
    mine = {0: nn.Linear(SIZE, SIZE)} if replicate == 2 else {rank: nn.Linear(SIZE, SIZE)}
    pipeline = Pipeline(mine, plan("gpipe", 2 // replicate, M), F.mse_loss, mesh=mesh, timeout=3.0)
    try:
        for _ in range(1 + rank):
            pipeline.step(torch.ones(M, SIZE), target=torch.ones(M, SIZE))
        time.sleep(6)  # its process lives on
    except CommunicationError as error:
        return error.__notes__


@pytest.mark.parametrize("replicate", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_rank_that_makes_one_step_more_is_told_what_the_other_one_has_made(replicate):
    nothing, notes = run_ranks(uneven, 2, replicate)
    assert any(each.startswith("rank 0 has begun 1 calls of this pipeline, the last one ") for each in notes)
    assert nothing is None


def beside_another_process(rank):
    """What ranks 1 and 2 of a job of three are told: in other calls, and where rank 2 closes too late."""
    group, told = dist.new_group([1, 2]), []
    for case in ("calls", "late") if rank else ():
        stages, timetable = {rank - 1: nn.Linear(SIZE, SIZE)}, plan("gpipe", 2, M)
        pipeline = Pipeline(stages, timetable, F.mse_loss, group, timeout=5.0 if case == "calls" else 0.5)
        x = torch.ones(M, SIZE)
        pipeline.step(x, target=x)
        if case == "late":
            time.sleep(1.5 * (rank - 1))
        try:
            pipeline.evaluate(x, target=x) if (case, rank) == ("calls", 1) else pipeline.close()
        except (AgreementError, CommunicationError) as error:
            told.append((str(error), *getattr(error, "__notes__", [])))
            pipeline.close()
    return told


def test_ranks_have_their_numbers_in_the_job_and_a_rank_that_closes_late_is_named():
    """A send that has begun fails in its wait: that error, too, says what was sent to which rank."""
    _, (calls, late), (others, _) = run_ranks(beside_another_process, 3)
    assert calls[0].startswith("rank 2 is in close() while rank 1 is in evaluate()")
    assert others[0].startswith("rank 1 is in evaluate() while rank 2 is in close()")
    assert late[0].startswith("rank 0, Send sizes to 1: Timed out")
    assert late[1].startswith("rank 2 has begun 1 calls of this pipeline, the last one step(), and rank 1 2")


def reads_of_the_store(rank):
    """How often steps and evaluations, the sizes of which change, read what another rank has called."""
    pipeline = Pipeline({rank: nn.Linear(SIZE, SIZE)}, plan("zb_h1", 2, M), F.mse_loss)
    with pipeline, patch.object(CallOrder, "_read", autospec=True) as read:
        for rows in (M, M, 2 * M):
            x = torch.ones(rows, SIZE)
            pipeline.step(x, target=x)
            pipeline.evaluate(x, target=x)
        return read.call_count


def test_calls_that_go_well_read_nothing_from_the_store():
    """A read takes a round trip to the process that has the store."""
    assert run_ranks(reads_of_the_store, 2) == [0, 0]


CASES = {
    "other first call": (("evaluate", "step"), ("step", "evaluate")),
    "other later call": (("step", "step", "evaluate", "step"), ("step", "step", "step", "evaluate")),
    "other rows": (("step", "step"), ("step", "short")),
    "one step more": (("step", "step"), ("step", "close")),
}


def with_a_short_target(rank):
    """Of three ranks the first and the last have no link."""
    pipeline = Pipeline({rank: nn.Linear(SIZE, SIZE)}, plan("1f1b", 3, M), F.mse_loss, timeout=600.0)
    try:
        pipeline.step(torch.ones(2 * M, SIZE), target=torch.ones(M, SIZE))
    except Exception as error:
        return type(error).__name__


def test_a_target_with_other_rows_than_the_inputs_of_another_rank_is_refused():
    first, middle, last = run_ranks(with_a_short_target, 3)
    assert "AgreementError" in (first, last)
    assert {first, middle, last} <= {"AgreementError", "CommunicationError"}


def row_by_row(rank, kind):
    """The batches of one process, of 8 rows: those of its shard, or the same ones on each process."""
    x = torch.arange(8.0)[:, None].expand(-1, SIZE).contiguous()
    sampler = DistributedSampler(range(8), 2, rank, shuffle=False) if kind == "sampler" else None
    return DataLoader(TensorDataset(x, 2 * x), 2, sampler=sampler)


def on_shards(rank):
    """What the ranks are told that give both or one of inputs and target."""
    found = {}
    for kind, given in product(("sampler", "same"), ("x, y", "x", "y", "what it reads", "pieces")):
        is_last, errors = rank == 1, []
        with suppress(Exception):
            pipeline = Pipeline({rank: nn.Linear(SIZE, SIZE)}, plan("zb_h1", 2, M), F.mse_loss)
            for x, y in row_by_row(rank, kind):
                if given == "pieces":
                    x, y = zbpp.per_microbatch(x.split(1)), zbpp.per_microbatch(y.split(1))
                args = () if is_last and given in ("y", "what it reads") else (x,)
                target = y if is_last or given not in ("x", "what it reads") else None
                try:
                    pipeline.step(*args, target=target)
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    raise
        pipeline.end("the test is over")
        found[kind, given] = errors
        dist.barrier()
    return found


def test_in_the_first_steps_ranks_are_told_that_their_loaders_give_other_rows():
    """The last rank compares what both ranks were given; without the check x of a row meets another's y."""
    _, found = run_ranks(on_shards, 2)
    for (kind, given), errors in found.items():
        what = {"y": "targets"}.get(given, "inputs")
        said = [f"AgreementError: rank 1 was given other {what} than rank 0: the ranks of one pipeline"]
        is_told = kind != "same" and given != "what it reads"
        assert [each.partition(" share")[0] for each in errors] == said * is_told, (kind, given)


def out_of_order(rank):
    """Per case: the calls that went through, what the one that didn't raised, and how long it took."""
    found = {}
    for name, orders in CASES.items():
        pipeline = Pipeline({rank: nn.Linear(SIZE, SIZE)}, plan("zb_h1", 2, M), F.mse_loss, timeout=600.0)
        done, start = 0, time.monotonic()
        try:
            for call in orders[rank]:
                x = torch.ones(M if call == "short" else 2 * M, SIZE)
                arguments = {"target": x} if rank == 1 else {}
                if call == "close":
                    pipeline.close()
                    continue
                method = pipeline.evaluate if call == "evaluate" else pipeline.step
                method(*([x] if rank == 0 else []), **arguments)
                done += 1
        except Exception as error:
            found[name] = done, f"{type(error).__name__}: {error}", time.monotonic() - start
    return found


def test_ranks_that_call_in_different_orders_are_told_at_once():
    """Rank 0: evaluate, step; rank 1: step, evaluate. Both say so at once; the links' timeout is 600 s."""
    of_both = run_ranks(out_of_order, 2)
    for name, orders in CASES.items():
        num_good = sum(a == b for a, b in zip(*orders, strict=True)) if name != "other first call" else 0
        for rank, found in enumerate(of_both):
            done, told, seconds = found[name]
            assert done == num_good
            assert seconds < 150
            if name == "other rows":
                assert told.startswith("AgreementError: step() got ")
            else:
                mine, others = orders[rank][done], orders[1 - rank][done]
                expected = (
                    f"AgreementError: rank {1 - rank} is in {others}() while rank {rank} is in {mine}(): "
                )
                assert told.startswith(expected)
