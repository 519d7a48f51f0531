"""A chain of modules cut into stages, against the whole chain: plain autograd, float64."""

import copy
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.processes import run_ranks
from zbpp import Pipeline, plan, split_sequential


class Fork(nn.Module):
    """x -> (layer(x), x): the next child gets a tuple."""

    def __init__(self, wrap=tuple):
        super().__init__()
        self.layer, self.wrap = nn.Linear(6, 6), wrap

    def forward(self, x):
        return self.wrap((self.layer(x), x))


class Join(nn.Module):
    def forward(self, pair):
        assert isinstance(pair, tuple)  # as nn.Sequential passes it
        return pair[0].tanh() + pair[1]


def chain():
    torch.manual_seed(0)
    parts = [
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        Fork(),
        Join(),
        nn.LayerNorm(6),
        nn.Linear(6, 6),
        nn.Linear(6, 2),
    ]
    return nn.Sequential(OrderedDict((f"part_{i}", part) for i, part in enumerate(parts))).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 2)]


def pipeline_of(stages):
    timetable = plan("interleaved_zb", 1, 4, stages_per_rank=len(stages))
    return Pipeline(stages, timetable, F.mse_loss)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize("counts", [[2, 1, 1, 3], [3, 1, 3], [1, 1, 1, 1, 1, 1, 1], [7], None])
def test_gradients_of_a_chain_are_plain_autograds(kind, counts):
    """A tuple between two children is one value inside a stage and across a boundary."""
    whole = chain()
    x, target = batch()
    for microbatch, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(whole(microbatch), wanted) / 4).backward()
    layers = copy.deepcopy(whole)
    layers.zero_grad()
    optimizer = torch.optim.SGD(layers.parameters())  # of the given modules
    given = layers if kind is nn.Sequential else nn.ModuleList(layers)
    stages = split_sequential(given, 4 if counts is None else len(counts), layers_per_stage=counts)
    losses = pipeline_of(stages).step(x, target=target)
    torch.testing.assert_close(torch.stack(losses).mean(), F.mse_loss(whole(x), target).detach())
    expected = [parameter.grad for parameter in whole.parameters()]
    found = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    states = [stage.state_dict() for stage in stages.values()]
    assert [name for state in states for name in state] == list(given.state_dict())
    if counts is not None:
        assert [len(list(stage.children())) for stage in stages.values()] == counts


def test_the_heaviest_stage_is_as_light_as_can_be():
    layers = nn.Sequential(
        nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 4), *(nn.Linear(4, 4) for _ in range(3))
    )
    by_parameters = [list(dict(each.named_children())) for each in split_sequential(layers, 2).values()]
    assert by_parameters == [["0", "1"], ["2", "3", "4", "5"]]
    plain = split_sequential(nn.Sequential(*(nn.Tanh() for _ in range(6))), 3)
    assert [len(list(stage.children())) for stage in plain.values()] == [2, 2, 2]


def test_a_layer_that_occurs_twice_in_a_chain_is_called_twice():
    """named_children() would leave the second out."""
    layer = nn.Linear(6, 6).double()
    layers = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 2).double())
    stages = split_sequential(layers, 2, layers_per_stage=[3, 1])
    x, _ = batch()
    assert torch.equal(stages[1](stages[0](x)), layers(x))
    assert stages[0].get_submodule("2") is layer


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def tied():
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last).double()


def tied_on_two_ranks(rank):
    stages = split_sequential(tied(), 2)
    x, target = (torch.linspace(-1, 1, 48).double().reshape(8, 6).roll(by) for by in (0, 1))
    with Pipeline({rank: stages[rank]}, plan("zb_h1", 2, 4), F.mse_loss) as pipeline:
        pipeline.step(x, target=target)
        return {name: each.grad for name, each in pipeline.named_parameters()}


def test_a_parameter_that_two_stages_share_is_trained_as_one():
    layers = tied()
    x, target = (torch.linspace(-1, 1, 48).double().reshape(8, 6).roll(by) for by in (0, 1))
    F.mse_loss(layers(x), target).backward()
    first, last = run_ranks(tied_on_two_ranks, 2)
    assert list(first | last) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, grad in (first | last).items():
        torch.testing.assert_close(grad, layers.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def with_a_shared_buffer():
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(norm, nn.Tanh(), norm)


@pytest.mark.parametrize(
    "make, num_stages, options, error, message",
    [
        (lambda: nn.Linear(2, 2), 2, {}, TypeError, "called in turn, not Linear: zbpp.trace_stages"),
        (lambda: Residual(nn.Linear(2, 2), nn.Tanh()), 2, {}, TypeError, "not Residual"),
        (with_a_shared_buffer, 3, {}, ValueError, r"stage 2 \(2.running_mean\) would share one buffer"),
        (chain, 8, {}, ValueError, "7 children are too few for 8 stages"),
        (chain, 0, {}, ValueError, "num_stages=0"),
        (chain, 2.0, {}, ValueError, "num_stages=2.0: write a whole number"),
        (chain, 2, {"layers_per_stage": [7, 0]}, ValueError, r"=\[7, 0\] leaves stage 1 empty"),
        (chain, 2, {"layers_per_stage": [3, 3]}, ValueError, "adds up to 6"),
        (chain, 2, {"layers_per_stage": [3, 3, 1]}, ValueError, "is for 3 stages: write 2 numbers"),
        (chain, 2, {"layers_per_stage": 3}, ValueError, "=3 is no list of whole numbers: write 2 of them"),
        (chain, 2, {"layers_per_stage": ["3", 4]}, ValueError, r"=\['3', 4\] is no list of whole numbers"),
        (chain, 2, {"layers_per_stage": [3.5, 3.5]}, ValueError, "is no list of whole numbers"),
    ],
)  # fmt: skip
def test_a_container_that_is_no_chain_or_a_cut_that_does_not_fit_is_refused(
    make, num_stages, options, error, message
):
    with pytest.raises(error, match=message):
        split_sequential(make(), num_stages, **options)


class Pair(NamedTuple):
    value: torch.Tensor
    skip: torch.Tensor


@pytest.mark.parametrize(
    "wrap, kind", [(lambda pair: pair[:1], "tuple of 1"), (lambda pair: Pair(*pair), "Pair of 2")]
)
def test_a_tuple_that_the_next_stage_would_not_get_as_it_is_is_refused(wrap, kind):
    """A boundary unpacks a tuple: of one it would leave the tensor, of a named one a plain one."""
    layers = nn.Sequential(Fork(wrap), nn.Identity())
    first = split_sequential(layers, 2)[0]
    with pytest.raises(TypeError, match=f"child '0' returned a {kind} to the next stage"):
        first(torch.ones(1, 6))
    split_sequential(layers, 1)[0](torch.ones(1, 6))  # no boundary
