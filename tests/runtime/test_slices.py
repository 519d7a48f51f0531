"""A step whose sequences come in slices: losses and gradients are those of whole sequences."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import zbpp
from helpers.processes import run_ranks
from helpers.sliced_toy import SCHEDULES, TIME, WORDS, Toy, grads_of
from helpers.split import assert_close
from helpers.toy_lm import rows_of
from zbpp import Pipeline, plan
from zbpp.runtime.call.sequence_lengths import SequenceLengths
from zbpp.stage_api import IGNORED

M = 4
BOUNDS = {1: (), 2: (0, 6, 12), 3: (0, 7, 10, 12), 4: (0, 3, 6, 9, 12)}


def batch(rows=2 * M):
    """Some targets are left out; the first slice of microbatch 1 has none under any bounds here."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(WORDS, (rows, TIME + 1), generator=generator)
    target = tokens[:, 1:].clone()
    target[0, :4] = target[2, :8] = target[3, :8] = target[-1, 2:] = IGNORED
    return tokens[:, :-1], target, torch.rand(rows, TIME, generator=generator, dtype=torch.float64)


def plain(num_stages):
    """(loss without the auxiliary ones, gradients, auxiliary loss) of whole sequences in one process."""
    x, target, scale = batch()
    model = Toy()
    stages = [model.build_stage(index, num_stages) for index in range(num_stages)]
    with zbpp.auxiliary_losses() as found:
        y = x
        for stage in stages:
            y = stage(y, scale=scale)
    loss, auxiliary = model.loss(y, target), sum(found.values())
    (loss + auxiliary).backward()
    return loss.item(), grads_of(stages), auxiliary.item()


class Found(NamedTuple):
    losses: list[float]
    grads: dict[str, torch.Tensor]
    evaluated: list[float]
    auxiliary: float


def run(rank, schedule, num_ranks, num_slices, mesh=None, **options):
    """What this rank has of a step and an evaluation."""
    timetable, model = plan(schedule, num_ranks, M, num_slices=num_slices), Toy()
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    x, target, scale = batch()
    options = {"slice_bounds": BOUNDS[num_slices], **options}
    with Pipeline(stages, timetable, model.loss, mesh=mesh, **options) as pipeline:
        x, target, scale = rows_of(pipeline.place, x, target, scale)
        losses = [each.item() for each in pipeline.step(x, target=target, scale=scale)]
        auxiliary = pipeline.auxiliary_losses()["size"]
        grads = grads_of(stages.values())
        evaluated = [each.item() for each in pipeline.evaluate(x, target=target, scale=scale)]
    return Found(losses, grads, evaluated, auxiliary)


def merged(parts):
    grads = {name: grad for each in parts for name, grad in each.grads.items()}
    return Found(
        [loss for each in parts for loss in each.losses],
        grads,
        [loss for each in parts for loss in each.evaluated],
        parts[0].auxiliary,
    )


def all_runs(rank, num_ranks, all_slices):
    schedules = SCHEDULES if num_ranks > 1 else ["1f1b", "zb_h1", "zb_v"]
    return {(name, k): run(rank, name, num_ranks, k) for name in schedules for k in all_slices}


@pytest.mark.parametrize(
    "all_slices", [[max(BOUNDS)], pytest.param(sorted(BOUNDS)[:-1], marks=pytest.mark.nightly)]
)
def test_losses_and_gradients_are_those_of_whole_sequences_under_every_schedule(all_slices):
    """To 1e-12, and equal to the last bit under all schedules and cuts with the same slices."""
    first = {}
    for num_ranks in (1, 2):
        ranks = run_ranks(all_runs, num_ranks, num_ranks, all_slices)
        for key in ranks[0]:
            found = merged([each[key] for each in ranks])
            num_stages = plan(key[0], num_ranks, M).num_stages
            loss, expected, auxiliary = plain(num_stages)
            assert len(found.losses) == len(found.evaluated) == M
            assert sum(found.losses) / M == pytest.approx(loss, rel=1e-13)
            assert found.evaluated == pytest.approx(found.losses, rel=1e-13)
            assert found.auxiliary == pytest.approx(auxiliary, rel=1e-13)
            assert_close(found.grads, expected, 1e-12)
            same = first.setdefault((key[1], num_stages), found)
            assert found.losses == same.losses
            assert all(torch.equal(found.grads[name], same.grads[name]) for name in same.grads)


def test_values_of_rows_may_stand_before_those_of_tokens():
    """A class of each row, say: it goes whole to each slice, and says nothing about lengths."""
    rows, tokens = torch.zeros(4), torch.zeros(4, TIME)
    lengths = SequenceLengths(2, BOUNDS[2])
    lengths.find({"argument 0": rows, "argument 1": tokens})
    lengths.find({"target": {"class": rows, "tokens": tokens}})
    for wrong in ({"target": rows}, {"target": (rows, tokens[:, 1:])}, {"0": rows, "1": tokens[:, 1:]}):
        with pytest.raises(ValueError, match=f"cut sequences of {TIME} tokens along dimension 1"):
            lengths.find(wrong)
