"""Slices of sequences that differ in length, each cut at the same shares of it: equal to plain autograd."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import zbpp
from helpers.processes import run_ranks
from helpers.sliced_toy import SCHEDULES, TIME, WORDS, Toy, grads_of
from helpers.split import assert_close
from zbpp import Pipeline, plan
from zbpp.runtime.call.microbatch import Cutter
from zbpp.runtime.call.sequence_lengths import SequenceLengths
from zbpp.schedule.slice_bounds import scaled_bounds
from zbpp.stage_api import IGNORED

BOUNDS = {2: (0, 8, 12), 4: (0, 5, 8, 10, 12)}
LENGTHS = [[12, 5, 4, 31], [7, 0, 12, 9], [12, 12, 12, 12], [9, 20, 4, 0]]  # of each step's microbatches
ORDERS = [None, [2, 1, 3, 0], [3, 2, 1, 0], None]
M = 4


def step_of(number):
    """(tokens, targets, scales) of the microbatches of a step; None for an empty one."""
    generator = torch.Generator().manual_seed(number)

    def microbatch(place, length):
        if not length:
            return None, None, None
        rows = 1 + (place + number) % 2
        tokens = torch.randint(WORDS, (rows, length + 1), generator=generator)
        target = tokens[:, 1:].clone()
        target[0, : length // 3] = IGNORED
        return tokens[:, :-1], target, torch.rand(rows, length, generator=generator, dtype=torch.float64)

    return zip(*map(microbatch, range(M), LENGTHS[number]), strict=True)


def plain(num_stages):
    """(loss of each step, gradients of all steps) of whole sequences in one process."""
    model, losses = Toy(), []
    stages = [model.build_stage(index, num_stages) for index in range(num_stages)]
    for number in range(len(LENGTHS)):
        batches = [each for each in zip(*step_of(number), strict=True) if each[0] is not None]
        counted = sum(int((target != IGNORED).sum()) for _, target, _ in batches)
        total = torch.zeros((), dtype=torch.float64)
        for x, target, scale in batches:
            with zbpp.auxiliary_losses() as found:
                for stage in stages:
                    x = stage(x, scale=scale)
            count = int((target != IGNORED).sum())
            loss = model.loss(x, target) * count / counted
            total += loss.detach()
            (loss + sum(found.values()) / M).backward()
        losses.append(total.item())
    return losses, grads_of(stages)


def run(rank, schedule, num_ranks, num_slices):
    timetable, model = plan(schedule, num_ranks, M, num_slices=num_slices), Toy()
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    losses, evaluated = [], []
    with Pipeline(stages, timetable, model.loss, slice_bounds=BOUNDS[num_slices]) as pipeline:
        for number, order in enumerate(ORDERS):
            x, target, scale = map(zbpp.per_microbatch, step_of(number))
            x = zbpp.per_microbatch(x.values, order)
            found = pipeline.step(x, target=target, scale=scale)
            losses.append([each.item() for each in found])
            evaluated += [each.item() for each in pipeline.evaluate(x, target=target, scale=scale)]
    return losses, grads_of(stages.values()), evaluated


def all_runs(rank, num_ranks, all_slices):
    schedules = SCHEDULES if num_ranks == 2 else ["1f1b", "zb_v"]
    return {(name, k): run(rank, name, num_ranks, k) for name in schedules for k in all_slices}


@pytest.mark.parametrize(
    "num_ranks, all_slices",
    [
        (1, [2, 4]),
        (2, [4]),
        pytest.param(2, [2], marks=pytest.mark.nightly),
        pytest.param(4, [2, 4], marks=pytest.mark.nightly),
    ],
)
def test_losses_and_gradients_are_those_of_whole_sequences(num_ranks, all_slices):
    ranks = run_ranks(all_runs, num_ranks, num_ranks, all_slices)
    for key in ranks[0]:
        losses, expected = plain(plan(key[0], num_ranks, M).num_stages)
        last = next(each[key] for each in ranks if each[key][0][0])
        assert [sum(each) / M for each in last[0]] == pytest.approx(losses, rel=1e-12)
        assert last[2] == pytest.approx([loss for each in last[0] for loss in each], rel=1e-12)
        grads = {name: grad for each in ranks for name, grad in each[key][1].items()}
        assert_close(grads, expected, 1e-12)


def test_bounds_are_at_the_same_shares_with_a_token_in_each_slice():
    for bounds in BOUNDS.values():
        num_slices = len(bounds) - 1
        for length in range(num_slices, 40):
            found = scaled_bounds(bounds, length)
            assert (found[0], found[-1]) == (0, length)
            assert all(start < end for start, end in pairwise(found))
            if length % TIME == 0:
                assert found == tuple(each * length // TIME for each in bounds)


def test_lengths_that_do_not_fit_are_refused_in_a_line():
    marked = zbpp.per_microbatch
    lengths = SequenceLengths(2, BOUNDS[4])
    with pytest.raises(ValueError, match=r"argument 0, microbatch 1 has shape \[1, 3\].*4 slices"):
        lengths.find({"argument 0": marked([torch.zeros(1, 9), torch.zeros(1, 3)])})
    lengths.find({"argument 0": marked([torch.zeros(1, 9), torch.zeros(1, 7)])})
    with pytest.raises(ValueError, match="microbatch 1 have 7 tokens in one argument, and 6 in another"):
        lengths.find({"target": marked([torch.zeros(1, 9), torch.zeros(1, 6)])})


def vectors_on_the_middle_rank(rank):
    """Rank 1 of 3 is given keywords alone; 9 and 12 are lengths of sequences, or of the bounds."""
    timetable, model = plan("1f1b", 3, 2, num_slices=2), Toy()
    stage = torch.nn.Linear(8, 8).double()
    found, first = [], torch.zeros(1, 9, dtype=torch.int64)

    class Middle(torch.nn.Module):
        mixes_time = False

        def forward(self, x, vectors):
            found.append(tuple(vectors.shape))
            return stage(x)

    ends = {0: model.build_stage(0, 2), 1: Middle(), 2: model.build_stage(1, 2)}
    x = zbpp.per_microbatch([first, first[:, :5]])
    with Pipeline({rank: ends[rank]}, timetable, model.loss, slice_bounds=(0, 6, 12)) as pipeline:
        for size in (9, 12, 5):
            given = zbpp.per_microbatch([torch.zeros(1, size).double()] * 2)
            pipeline.step(x, target=x, **({"vectors": given} if rank == 1 else {}))
    return found


def test_a_keyword_that_is_as_long_as_one_of_the_sequences_stays_whole():
    assert run_ranks(vectors_on_the_middle_rank, 3)[1] == [(1, size) for size in (9, 12, 5) for _ in range(4)]


def test_a_tensor_is_cut_if_it_is_as_long_as_the_sequences_of_all_microbatches():
    lengths, empty = [7, 4, 12], torch.empty(0)
    cutter = Cutter(4, BOUNDS[4])
    tokens = zbpp.per_microbatch([empty, *(torch.zeros(1, length) for length in lengths)])
    cutter.sequences.find({"argument 0": tokens, "vectors": zbpp.per_microbatch([torch.zeros(1, 8)] * 4)})
    assert cutter.sequences.unequal == (0, *lengths)
    cut = cutter.cut("argument 0", tokens)[4:]
    assert [sum(each.shape[1] for each in cut[i : i + 4]) for i in (0, 4, 8)] == lengths
    for size in lengths:
        vectors = zbpp.per_microbatch([torch.zeros(1, size)] * 4)
        assert {tuple(each.shape) for each in cutter.cut("vectors", vectors)} == {(1, size)}
