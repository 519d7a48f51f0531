"""Switches for memory and for the optimizer's step, in pairs: the losses of the plain run, or a refusal."""

import gc
from itertools import combinations

import pytest
import torch
from optimi import AdamW
from torch import nn

from helpers.processes import run_ranks
from zbpp import (
    ActivationOffload,
    Costs,
    GradientRelease,
    Pipeline,
    PostValidation,
    clip_grad_norm_,
    plan,
)
from zbpp.autograd import recompute
from zbpp.features.activation_offload.activation_offload import offload_of
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.models.mlp import Mlp

SIZE, M, STEPS, SCHEDULE = 64, 4, 5, "zb_v"
CLIP = 0.05  # the first steps' gradients are larger: every kind of update has to clip
SWITCHES = ("recompute", "offload", "offload_weights", "release", "validation")
REFUSED = {
    ("offload", "offload_weights"): "weight_offload",
    ("offload_weights", "release"): "offloaded",
    ("offload_weights", "validation"): "weight_offload",
    ("release", "validation"): "releas",
}
PAIRS = [*combinations(SWITCHES, 2)]
ALLOWED = [pair for pair in PAIRS if pair not in REFUSED]


class Run:
    """A pipeline of one rank with some of the switches on, and how it makes a step."""

    def __init__(self, on):
        timetable = plan(SCHEDULE, 1, M)
        model = Mlp(in_features=SIZE, hidden_size=SIZE, out_features=SIZE, num_layers=4)
        stages = {s: in_two_blocks(model.build_stage(s, 2)) for s in range(timetable.num_stages)}
        if "offload_weights" in on:
            OffloadedWeights(stages, "cpu")
        for stage in stages.values() if "recompute" in on else ():
            recompute(stage[0])
            recompute(stage[1])
        everything = ActivationOffload(Costs(host=1e-6), least_bytes=1)
        leaving = everything if "offload" in on else None
        self.pipeline = Pipeline(stages, timetable, model.loss, extras=[*filter(None, [leaving])])
        releases = "release" in on
        self.optimizer = AdamW(self.pipeline.parameters(), lr=1e-2, gradient_release=releases)
        self.clips = not releases
        self.validated = None
        if releases:
            self.pipeline.use(GradientRelease(self.optimizer))
        if "validation" in on:
            self.validated = PostValidation(self.pipeline, self.optimizer, clip_norm=CLIP)

    def step(self, number):
        x = torch.randn(M * 2, SIZE, generator=torch.Generator().manual_seed(number))
        if self.validated is not None:
            return torch.stack(self.validated.step(x, target=-x))
        if self.clips:
            self.optimizer.zero_grad()
        losses = torch.stack(self.pipeline.step(x, target=-x))
        if self.clips:
            clip_grad_norm_(self.pipeline, CLIP)
            self.optimizer.step()
        return losses


def in_two_blocks(stage):
    layers = list(stage.children())
    half = len(layers) // 2
    return nn.Sequential(nn.Sequential(*layers[:half]), nn.Sequential(*layers[half:]))


def losses_of(on, second=None):
    """second: a timetable that all steps but the first two follow."""
    run = Run(on)
    losses = [run.step(number) for number in range(2)]
    if second is not None:
        run.pipeline.use_timetable(second)
    losses = torch.stack(losses + [run.step(number) for number in range(2, STEPS)])
    offload = offload_of(run.pipeline)
    assert (offload is not None and any(offload.nbytes.values())) == ("offload" in on)
    return losses


@pytest.fixture(scope="module")
def plain():
    """The losses with clipping, and without it."""
    found = {(): losses_of(()), ("release",): losses_of(("release",))}
    assert not torch.equal(found[()], found["release",])  # clipping matters
    return found


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_of_switches_gives_the_losses_of_the_run_without_them_or_is_refused(pair, plain):
    if pair in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[pair]):
            Run(pair)
        return
    expected = plain[("release",) if "release" in pair else ()]
    assert torch.equal(losses_of(pair), expected)


ALONE_AND_TOGETHER = [*((each,) for each in SWITCHES), *ALLOWED]


@pytest.mark.parametrize("on", ALONE_AND_TOGETHER, ids="+".join)
def test_another_timetable_in_the_middle_of_a_run_changes_no_loss(on, plain):
    """Extras that are made for one timetable are attached again."""
    expected = plain[("release",) if "release" in on else ()]
    assert torch.equal(losses_of(on, plan("interleaved_1f1b", 1, M, stages_per_rank=2)), expected)


def censuses(rank):
    """{switches: live tensors after 4 steps and after 12}; in a process without other tests' tensors."""
    return {on: census(on) for on in ALONE_AND_TOGETHER}


def census(on):
    run = Run(on)
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            run.step(number)
        before = live_tensors()
        for number in range(4, 12):
            run.step(number)
        return before, live_tensors()
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def counted():
    (found,) = run_ranks(censuses, 1)
    return found


@pytest.mark.parametrize("on", ALONE_AND_TOGETHER, ids="+".join)
def test_nothing_outlives_a_step_with_switches_on(on, counted):
    before, afterwards = counted[on]
    assert before == afterwards
    assert before[0] > 0


def live_tensors():
    """How many tensors live, and the bytes of their storages."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())
