"""What changes around a compiled stage: it goes along, or it refuses. It never goes on in silence."""

import copy
import logging
import random
import sys

import numpy
import pytest
import torch
from torch import nn

from helpers.split import assert_close, double, float64, grads_of
from zbpp.autograd import backward_input
from zbpp.autograd.compiled import compile_stage, compiled_forward
from zbpp.autograd.weight_grads import ChangedInPlace

FACTOR = 2.0
TABLE = {"factors": [1.0, 3.0]}


class Layer(nn.Module):
    scale = 1.5

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.settings = {"power": (1, 2)}

    def forward(self, x):
        y = torch.tanh(self.up(x)) * FACTOR * TABLE["factors"][1] * self.scale
        return self.down(y) ** self.settings["power"][1]


class Doubling(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def linear(kind, *sizes):
    torch.manual_seed(3)
    return kind(*sizes).double()


def replace(name, kind, *sizes):
    return lambda stage, _: setattr(stage[0], name, linear(kind, *sizes))


CHANGES = {
    "a submodule is replaced by one of its kind": replace("up", nn.Linear, 4, 8),
    "a submodule is replaced by one of another kind": replace("up", Doubling, 4, 8),
    "a submodule is replaced by one of another size": lambda stage, patch: [
        replace(name, nn.Linear, *sizes)(stage, patch)
        for name, sizes in {"up": (4, 6), "down": (6, 4)}.items()
    ],
    "a submodule is put around another": lambda stage, _: setattr(
        stage[0], "up", nn.Sequential(stage[0].up, nn.Tanh())
    ),
    "a hook is added": lambda stage, _: stage[0].up.register_forward_hook(lambda *args: args[-1] * 3),
    "a hook is added before": lambda stage, _: stage[0].up.register_forward_pre_hook(
        lambda _, args: args[0] * 3
    ),
    "a global is changed": lambda _, patch: patch.setattr(sys.modules[__name__], "FACTOR", 0.5),
    "a dictionary in a global is changed": lambda _, patch: patch.setitem(TABLE, "factors", [1.0, 0.5]),
    "a class's attribute is changed": lambda _, patch: patch.setattr(Layer, "scale", 0.5),
    "a class's forward is changed": lambda _, patch: patch.setattr(
        Layer, "forward", lambda self, x: self.down(self.up(x))
    ),
    "an entry of a dictionary is changed": lambda stage, _: stage[0].settings.update(power=(1, 3)),
    "a weight is frozen": lambda stage, _: stage[0].up.weight.requires_grad_(False),
    "two weights are tied": lambda stage, _: setattr(stage[0].down, "weight", stage[1].down.weight),
    "nothing is changed": lambda stage, _: None,
}


AT_NIGHT = {
    "a submodule is replaced by one of another kind",
    "a submodule is replaced by one of another size",
    "a hook is added before",
    "a dictionary in a global is changed",
    "nothing is changed",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in CHANGES]
)
def test_a_stage_that_is_changed_after_its_first_step_trains_as_changed(name):
    """A compiled stage went on with the old program, and trained weights that were no longer there."""
    with float64():
        torch.manual_seed(0)
        eager = nn.Sequential(Layer(), Layer())
    compiled = copy.deepcopy(eager)
    compile_stage(compiled, backend="eager")
    x, dy = double(3, 4), double(3, 4, seed=1)
    for side in (eager, compiled):
        backward_input(side(x), dy, x)[1].accumulate()
        with pytest.MonkeyPatch.context() as patch:
            CHANGES[name](side, patch)
            side.zero_grad()
            side(x).backward(dy) if side is eager else backward_input(side(x), dy, x)[1].accumulate()
    assert_close(grads_of(compiled), grads_of(eager))


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        if isinstance(scale, torch.Tensor):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def set(self, step):
        if isinstance(self.scale, torch.Tensor):
            self.scale.fill_(step / 10)
        else:
            self.scale = step / 10 if isinstance(self.scale, float) else step

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.scale)


@pytest.mark.parametrize(
    ("scale", "whole", "traces"),
    [
        # the stage four times, then its layers: Scaled four times, Layer once
        pytest.param(0.0, True, 4 + 4 + 1, marks=pytest.mark.nightly),
        (0.0, False, 4 + 1),
        pytest.param(0, False, 4 + 1, marks=pytest.mark.nightly),
        (torch.tensor(0.0), True, 1),
    ],
)
def test_a_number_that_changes_in_every_step_is_not_compiled_for_ever(
    scale, whole, traces, monkeypatch, caplog
):
    """It was, and each time the cache grew. A buffer is compiled once."""
    traced = []
    capture = compiled_forward.capture
    monkeypatch.setattr(compiled_forward, "capture", lambda *args: (traced.append(1), capture(*args))[1])
    monkeypatch.setattr(compiled_forward, "_MOST_VERSIONS", 4)
    with float64():
        torch.manual_seed(0)
        plain = nn.Sequential(Scaled(scale), Layer())
    compiled, x, dy = copy.deepcopy(plain), double(3, 4), double(3, 4, seed=1)
    compile_stage(compiled, backend="eager", whole=whole)
    for step in range(12):
        for side in (plain, compiled):
            side.zero_grad()
            side[0].set(step)
        plain(x).backward(dy)
        backward_input(compiled(x), dy, x)[1].accumulate()
        assert_close(grads_of(compiled), grads_of(plain))
    assert len(traced) == traces
    told = warnings_in(caplog)
    assert len(told) == (traces > 1) + (traces == 9)
    assert all("has changed 4 times, and each time it was compiled anew" in line for line in told)


@pytest.mark.parametrize("is_split", [True, False])
def test_a_weight_that_is_frozen_after_f_gets_no_gradient(is_split):
    """Plain autograd and eager stages give none; a compiled one did."""
    stage, x = nn.Sequential(Layer()), torch.randn(3, 4, requires_grad=True)
    compile_stage(stage, backend="eager")
    y = stage(x)
    stage[0].up.weight.requires_grad_(False)
    if is_split:
        _, weight_grads = backward_input(y, torch.ones(3, 4), x)
        weight_grads.accumulate()
    else:
        y.sum().backward()
    assert stage[0].up.weight.grad is None
    assert stage[0].down.weight.grad is not None


# ---------------------------------------------------------------- changes in place


class Shifted(nn.Module):
    """The gradient of `position` is the one that x gets; that of `up` is computed of dy in W."""

    def __init__(self):
        super().__init__()
        self.position, self.up, self.down = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x + self.position)))


IN_PLACE = {
    "F": "down.weight was changed in place .*: change it after the last W",
    "dy": r"the gradient that B was given of output 0 was changed in place .*: change a clone\(\)",
    "dx": r"the gradient that B returned for argument 0 was changed in place .*: change a clone\(\)",
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_what_a_compiled_backward_reads_is_not_changed_in_silence(what):
    """A weight after F, a gradient after B: eager stages raise, compiled ones took the new numbers."""
    stage, x, dy = Shifted(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    compile_stage(stage, backend="eager")
    y = stage(x)

    def rest():
        if what == "F":
            with torch.no_grad():
                stage.down.weight.add_(1)
        (dx,), weight_grads = backward_input(y, dy, x)
        if what != "F":
            {"dy": dy, "dx": dx}[what].mul_(2)
        weight_grads.accumulate()

    with pytest.raises(ChangedInPlace, match=IN_PLACE[what]):
        rest()


# ---------------------------------------------------------------- random numbers

OWN = random.Random(0)
DRAWS = {
    "a float of Python's": lambda x: x * random.random(),
    "an integer of Python's": lambda x: x * random.randint(1, 1000),
    "a generator of Python's": lambda x: x * OWN.random(),
    "numpy's": lambda x: x * torch.from_numpy(numpy.random.rand(4)),
    "a number of torch's as Python's": lambda x: x * torch.rand(1).item(),
    "what nobody uses": lambda x: (torch.rand(3), x * torch.rand(4))[1],
    "two of torch's": lambda x: x * torch.rand(4) + torch.rand(4),
}


class Drawing(nn.Linear):
    def __init__(self, draw):
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, x):
        return self.draw(super().forward(x))


def warnings_in(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", DRAWS)
def test_a_compiled_stage_draws_the_random_numbers_of_the_eager_one(name, caplog):
    """Python's were drawn once, at compilation; numpy's were drawn by torch; unused ones not at all."""
    with float64():
        eager = Drawing(DRAWS[name])
    compiled = copy.deepcopy(eager)
    compile_stage(compiled, backend="eager")
    found = []
    for side in (eager, compiled):
        random.seed(0), OWN.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        found.append(torch.stack([side(double(3, 4)) for _ in range(3)]))
    assert torch.equal(*found)
    assert bool(warnings_in(caplog)) == (name != "two of torch's")
