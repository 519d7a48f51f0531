"""What passes between stages: shapes that change, several tensors, values for later stages, few microbatches.

Real processes in float64 against one process with plain autograd, microbatch by microbatch.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.tensors import drawn, gradients_of
from zbpp import Pipeline, PlanError, per_microbatch, plan
from zbpp.planning import SCHEDULES

SIZE = 6


def linear(seed, out=SIZE):
    layer = nn.Linear(SIZE, out, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(drawn(out, SIZE, seed=seed))
        layer.bias.copy_(drawn(out, seed=100 + seed))
    return layer


def piped(rank, make_stages, microbatches, schedule, num_ranks, dynamic_shapes=False):
    """(losses, gradients) of this rank after two steps; the second knows what layouts there are."""
    timetable = plan(schedule, num_ranks, len(microbatches))
    all_stages = make_stages(timetable.num_stages)
    stages = {index: all_stages[index] for index in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, F.mse_loss, dynamic_shapes=dynamic_shapes)
    inputs, targets = (per_microbatch(each) for each in zip(*microbatches, strict=True))
    for _ in range(2):
        for stage in stages.values():
            stage.zero_grad()
        losses = pipeline.step(inputs, target=targets)
    return [loss.item() for loss in losses], gradients_of(stages)


def plain(make_stages, microbatches, num_stages):
    stages = make_stages(num_stages)
    losses = []
    for inputs, target in microbatches:
        x = (inputs,)
        for stage in stages:
            x = stage(*x)
            x = x if isinstance(x, tuple) else (x,)
        loss = F.mse_loss(*x, target)
        (loss / len(microbatches)).backward()
        losses.append(loss.item())
    return losses, gradients_of(dict(enumerate(stages)))


def merged(results):
    """All ranks' losses, of which one has any, and gradients."""
    return (
        [loss for losses, _ in results for loss in losses],
        {name: value for _, grads in results for name, value in grads.items()},
    )


def assert_equals_plain(results, make_stages, microbatches, num_stages):
    losses, found = merged(results)
    expected_losses, expected = plain(make_stages, microbatches, num_stages)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_close(found, expected)


# ---------------------------------------------------------------- shapes that change


class Pruner(nn.Module):
    """Passes on the rows above a threshold only, and which those are; sometimes something more."""

    def __init__(self, index, last):
        super().__init__()
        self.layer, self.last = linear(index), last

    def forward(self, x, kept=None, more=None):
        kept = torch.arange(len(x)) if kept is None else kept
        y = torch.tanh(self.layer(x))
        if more is not None:
            y = y + more.sum(0)
        if self.last:
            return y.sum(0)
        chosen = y.detach()[:, 0] > -0.95
        return y[chosen], kept[chosen], y[~chosen] if len(kept) % 2 else None


def pruners(num_stages):
    return [Pruner(index, index == num_stages - 1) for index in range(num_stages)]


def of_different_lengths():
    """Seven microbatches of 1 to 9 rows."""
    return [(drawn(rows, SIZE, seed=rows), drawn(SIZE, seed=50 + rows)) for rows in (3, 9, 1, 5, 5, 2, 8)]


CHANGING = ["1f1b", "zb_h1", "zb_v"]


def run_changing(rank, num_ranks):
    return [piped(rank, pruners, of_different_lengths(), name, num_ranks, True) for name in CHANGING]


def test_shapes_may_differ_between_microbatches():
    """Rows, which tensors there are, and which of them gets a gradient: nothing is agreed on beforehand."""
    results = run_ranks(run_changing, 3, 3)
    for number, schedule in enumerate(CHANGING):
        num_stages = plan(schedule, 3, 7).num_stages
        ranks = [rank[number] for rank in results]
        assert_equals_plain(ranks, pruners, of_different_lengths(), num_stages)
    first, second = (merged([rank[number] for rank in results]) for number in (0, 1))
    assert first[0] == second[0]
    assert_close(first[1], second[1], tolerance=0)


def even(num_microbatches=6):
    return [(drawn(2, SIZE, seed=i), drawn(2, SIZE, seed=50 + i)) for i in range(num_microbatches)]


# ---------------------------------------------------------------- fewer microbatches than ranks


def chain(num_stages):
    """Six layers over the stages."""
    bounds = [6 * stage // num_stages for stage in range(num_stages + 1)]
    layers = [nn.Sequential(linear(i), nn.Tanh()) for i in range(6)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]


def by_layer(grads):
    """Gradients in the order of the layers, whatever the cut."""
    return dict(enumerate(grads[name] for name in sorted(grads, key=_place)))


def _place(name):
    stage, layer, _, kind = name.split(".")
    return int(stage), int(layer), kind


def allowed(num_ranks, num_microbatches):
    """The schedules that take so few."""
    names = []
    for name in SCHEDULES:
        try:
            plan(name, num_ranks, num_microbatches)
        except PlanError:
            continue
        names.append(name)
    return names


def run_few(rank, num_ranks, sizes):
    return {
        (name, m): piped(rank, chain, even(m), name, num_ranks)
        for m in sizes
        for name in allowed(num_ranks, m)
    }


def test_fewer_microbatches_than_ranks_run_under_every_schedule_that_takes_them():
    """Equal to the last bit to one rank; two schedules need more by their construction, and say so."""
    results = run_ranks(run_few, 3, 3, [1, 2])
    assert {name for name, _ in results[0]} == SCHEDULES.keys() - {"zb_h2", "dualpipe_v"}
    expected = {m: piped(0, chain, even(m), "gpipe", 1) for m in (1, 2)}
    for name, m in results[0]:
        losses, grads = merged([rank[name, m] for rank in results])
        assert losses == expected[m][0]
        assert_close(by_layer(grads), by_layer(expected[m][1]), tolerance=0)
    assert_equals_plain([expected[2]], chain, even(2), 1)


# ---------------------------------------------------------------- tensors that are not their memory


class Spectrum(nn.Module):
    """Sends a conjugate view, and a negative one (the imaginary part of a conjugate)."""

    def __init__(self):
        super().__init__()
        self.layer = linear(0)

    def forward(self, x):
        z = torch.complex(self.layer(x), x)
        return z.conj(), z.conj().imag


class FromSpectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(1)

    def forward(self, z, imaginary):
        return self.layer(z.real * 2 + z.imag.square() * imaginary)


def spectral(num_stages):
    return [Spectrum(), FromSpectrum()]


def run_spectral(rank, num_ranks):
    return piped(rank, spectral, even(), "zb_h1", num_ranks)


def test_negative_and_conjugate_views_arrive_as_the_numbers_that_they_show():
    assert_equals_plain(run_ranks(run_spectral, 2, 2), spectral, even(), 2)


# ---------------------------------------------------------------- outputs that share memory


class Twice(nn.Module):
    """Returns a tensor and a view of it."""

    def __init__(self):
        super().__init__()
        self.layer = linear(0)

    def forward(self, x):
        y = self.layer(x)
        return y, y.view(-1)


class ChangesOne(nn.Module):
    """Changes its first input in place."""

    def __init__(self):
        super().__init__()
        self.layer = linear(1)

    def forward(self, y, flat):
        y.add_(1)
        return self.layer(flat.view_as(y)) + y


def test_a_change_in_place_of_one_output_never_reaches_another_on_one_rank_either():
    """What a stage returns arrives as values: as if each had been sent, also where nothing is sent."""
    pipeline = Pipeline({0: Twice(), 1: ChangesOne()}, plan("interleaved_zb", 1, 2), F.mse_loss)
    x, target = drawn(4, SIZE, seed=1), drawn(4, SIZE, seed=2)
    (loss, other) = pipeline.step(x, target=target)
    evaluated = pipeline.evaluate(x, target=target)
    first, second = linear(0), linear(1)
    for rows, found in ((slice(0, 2), (loss, evaluated[0])), (slice(2, 4), (other, evaluated[1]))):
        y = first(x[rows])
        expected = F.mse_loss(second(y) + (y + 1), target[rows])
        for each in found:
            torch.testing.assert_close(each, expected.detach(), rtol=1e-12, atol=0)
