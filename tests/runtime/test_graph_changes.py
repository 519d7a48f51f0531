"""What changes between steps or in a capture, and a replay would not see: captured anew, or eager.

The emulation fills the memory of captures with NaN before each step (`poison`), as a GPU may.
"""

import logging
import math
import random
from collections import deque
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.graph_runs import SIZE, STEPS, Run, arguments, assert_same, batch, captured


class Plain(nn.Module):
    """A layer, with attributes of several kinds that a case reads or changes."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.mask = nn.Linear(SIZE, SIZE), torch.ones(SIZE)
        self.scales, self.tau = {"default": 1.0}, 1.0

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.mask) * self.scales["default"] * self.tau


def graph_lines(caplog):
    return [each.getMessage() for each in caplog.records if "graphs" in each.name]


# ------------------------------------------------------------------------------- the user changes


def other_mask(stage):
    stage.mask = torch.full((SIZE,), 0.1)


def other_hook(stage):
    if hasattr(stage, "hook"):
        stage.hook.remove()
        stage.hook = stage.linear.weight.register_hook(lambda grad: grad * 0)
    else:
        stage.hook = stage.linear.weight.register_hook(lambda grad: grad * 1)


def transposed(stage):
    stage.linear.weight.data = stage.linear.weight.data.t()


def rescaled(stage):
    stage.scales["default"] = 0.5


def other_forward(stage):
    stage.forward = lambda x: torch.tanh(stage.linear(x)) * 0.25


def other_class(stage):
    stage.__class__ = type("Halved", (Plain,), {"forward": lambda self, x: Plain.forward(self, x) / 2})


class Varied(Plain):
    """Reads values in a list of modules, a partial, a closure, an array, and an object that has a method."""

    def __init__(self, index):
        super().__init__(index)
        self.hidden, self.activation = [nn.Dropout(0.5)], partial(F.leaky_relu, negative_slope=0.5)
        self.array, self.sign, self.slope = numpy.ones(1), 0.0, [1.0]
        slope = self.slope
        self.scaled, self.halved = lambda x: x * slope[0], Factor(0.5).times

    def forward(self, x):
        x = self.halved(self.scaled(self.activation(self.hidden[0](super().forward(x)))))
        return x * float(self.array[0]) * math.copysign(1.0, self.sign)


class Factor:
    def __init__(self, value):
        self.value = value

    def times(self, x):
        return x * self.value


def without_dropout(stage):
    stage.hidden[0].p = 0.0


def in_a_partial(stage):
    stage.activation.keywords["negative_slope"] = 0.1


def in_an_array(stage):
    stage.array[0] = 3.0


def minus_zero(stage):
    stage.sign = -0.0


def in_a_closure(stage):
    stage.slope[0] = 3.0


def in_a_bound_object(stage):
    stage.halved.__self__.value = 0.25


DEEPER = [without_dropout, in_a_partial, in_an_array, minus_zero, in_a_closure, in_a_bound_object]


@pytest.mark.parametrize("change", DEEPER)
def test_what_a_user_changes_deeper_is_captured_anew(change):
    """A replay kept the value of the capture."""

    def before(number, pipeline):
        if number == 4:
            change(pipeline.stages[0])

    found = captured(make=Varied, steps={"numbers": range(8), "before": before})
    assert (found.graphs.num_captures, found.graphs.num_replays) == (2, 4)


def test_a_hook_of_all_modules_is_captured_anew():
    handles = []

    def before(number, pipeline):
        if number == 4:
            handles.append(nn.modules.module.register_module_forward_hook(doubled))

    def doubled(module, inputs, output):
        return output * 2 if isinstance(module, nn.Linear) else None

    found = []
    for mode in ("none", "actions"):
        try:
            found.append(Run(mode, "zb_h1", make=Plain).steps(range(8), before=before).found)
        finally:
            handles.pop().remove()
    assert_same(*found)


class Weighted:
    """A loss that is an object, with a weight that changes."""

    def __init__(self):
        self.weight = 1.0

    def __call__(self, output, target):
        return F.mse_loss(output, target) * self.weight

    def loss(self, output, target):
        return self(output, target)


def as_an_object():
    loss = Weighted()
    return loss, partial(setattr, loss, "weight")


def as_a_method():
    loss = Weighted()
    return loss.loss, partial(setattr, loss, "weight")


def as_a_partial():
    loss = partial(lambda output, target, weight: F.mse_loss(output, target) * weight, weight=1.0)
    return loss, partial(loss.keywords.__setitem__, "weight")


def as_a_closure():
    weight = 1.0

    def change(value):
        nonlocal weight
        weight = value

    return lambda output, target: F.mse_loss(output, target) * weight, change


def with_a_global():
    def change(value):
        global WEIGHT
        WEIGHT = value

    change(1.0)
    return lambda output, target: F.mse_loss(output, target) * WEIGHT, change


def at_step_4(change, number, pipeline):
    if number == 4:
        change(3.0)


@pytest.mark.parametrize("make", [as_an_object, as_a_method, as_a_partial, as_a_closure, with_a_global])
def test_a_weight_of_the_loss_that_changes_is_captured_anew(make):
    """Only a loss that was a module was looked at."""
    found = []
    for mode in ("none", "actions", "program"):
        loss, change = make()
        run = Run(mode, "zb_h1", make=Plain, loss_fn=loss)
        found.append(run.steps(range(8), before=partial(at_step_4, change)).found)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    assert run.graphs.num_captures == 2


def exchanged(number, pipeline):
    first, second = (stage.linear.weight for stage in pipeline.stages.values())
    if number == 5:
        first.grad, second.grad = second.grad, first.grad


def shared(number, pipeline):
    first, second = (stage.linear.weight for stage in pipeline.stages.values())
    if number == 5:
        first.grad = second.grad


@pytest.mark.parametrize("change", [exchanged, shared])
def test_gradients_that_weights_exchange_or_share_are_those_of_eager_steps(change):
    captured(schedule="zb_v", make=Plain, steps={"numbers": range(8), "before": change})


@pytest.mark.parametrize("change", [other_mask, other_hook, transposed, rescaled, other_forward, other_class])
def test_what_a_user_changes_between_steps_is_captured_anew(change):
    def before(number, pipeline):
        if number in (0, 4) and (number == 4 or change is other_hook):
            change(pipeline.stages[0])

    found = captured(make=Plain, steps={"numbers": range(8), "before": before})
    assert (found.graphs.num_captures, found.graphs.num_replays) == (2, 4)


# ------------------------------------------------------------------------------- forward changes


class Recurrent(Plain):
    """Keeps its state in an attribute, which is None when a step begins."""

    state = None

    def forward(self, x):
        state = torch.zeros_like(x) if self.state is None else self.state
        self.state = torch.tanh(self.linear(x) + state).detach()
        return torch.tanh(self.linear(x) + self.state)


class LateBuffer(Plain):
    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("size", None)

    def forward(self, x):
        self.size = x.detach().abs().amax()
        return super().forward(x / (1 + self.size))


class Table(Plain):
    """Keeps a table in a dict, a list or a deque, which it makes anew in every third call."""

    kind = dict

    def __init__(self, index):
        super().__init__(index)
        self.tables, self.calls = self.kind(), 0

    def forward(self, x):
        self.calls += 1
        if not self.tables or self.calls % 3 == 0:
            table = torch.arange(SIZE, device=x.device) / self.calls
            self.tables.update({"table": table}) if self.kind is dict else self.tables.append(table)
        table = self.tables["table"] if self.kind is dict else self.tables[-1]
        return super().forward(x + table)


class DrawsAndCounts(Plain):
    """Drops its activation by Python's random numbers, counts, and reads a value: it can't be captured."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        skips = random.random() < 0.5
        scale = x.sum().item() * 0 + self.calls
        return self.linear(x) if skips else super().forward(x * scale)


class Warms(Plain):
    """Its activation grows with the number of calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 40)


def no_state(number, pipeline):
    for stage in pipeline.stages.values():
        if isinstance(stage, Recurrent):
            stage.state = None
        if isinstance(stage, LateBuffer):
            stage.size = None


FORWARDS = {
    "a state that was None": (Recurrent, "forward replaces state of Recurrent"),
    "a buffer that was None": (LateBuffer, "forward replaces size of LateBuffer"),
    "a table in a dict": (Table, "forward replaces tables"),
    "a table in a list": (type("Listed", (Table,), {"kind": list}), "forward replaces tables"),
    "a table in a deque": (type("Queued", (Table,), {"kind": deque}), "forward replaces tables"),
    "a counter": (Warms, "forward changes calls of Warms, which a replay would not do"),
    "random numbers": (DrawsAndCounts, "not permitted when stream is capturing"),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_what_forward_keeps_is_refused_and_as_before_the_capture(case, caplog):
    make, text = FORWARDS[case]
    found = []
    for mode in ("none", "actions"):
        random.seed(1)
        with caplog.at_level(logging.WARNING):
            run = Run(mode, "zb_h1", make=make)
            no_state(0, run.pipeline)
            found.append(run.steps(before=no_state))
    assert_same(found[0].found, found[1].found)
    assert [*found[0].stages[0].state_dict()] == [*found[1].stages[0].state_dict()]
    (line,) = graph_lines(caplog)
    assert text in line


# ------------------------------------------------------------------------------- weights of nobody


def loss_of(head, output, target):
    return F.mse_loss(head(output), target)


def test_a_weight_of_no_module_that_the_loss_uses_is_still_trained(caplog):
    """Its `.grad` is None after each update; nobody would give it one at the captured address."""
    trained = []
    for mode in ("none", "actions", "program"):
        torch.manual_seed(9)
        head = nn.Linear(SIZE, SIZE)
        with caplog.at_level(logging.WARNING):
            run = Run(
                mode,
                "zb_h1",
                make=Plain,
                loss_fn=partial(loss_of, head),
            )
            run.optimizer.add_param_group({"params": [*head.parameters()]})
            run.steps()
        trained.append([each.detach().clone() for each in head.parameters()])
    assert_same(trained[0], trained[1])
    assert_same(trained[0], trained[2])
    for line in graph_lines(caplog):
        assert "it uses a weight of shape (8, 8) that belongs to no stage, and to no loss module" in line


# ------------------------------------------------------------------------------- failed captures and replays


def test_autocasts_copies_of_weights_do_not_outlive_a_failed_capture():
    """Autocast keeps the weights in bfloat16 until its context ends; a capture computes none."""

    class Reads(Plain):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    def losses(mode):
        run, found = Run(mode, "zb_h1", make=Reads), []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in range(STEPS):
                x, y = batch(number)
                found += run.pipeline.step(x, target=y)
                run.maker.poison()
        run.pipeline.close()
        return found

    assert_same(losses("none"), losses("actions"))


def test_a_replayed_step_that_fails_leaves_its_gradients_marked():
    """A replay on a GPU does not count as a change of a tensor."""
    pipeline = Run("actions", "zb_h1", make=Plain)
    for number in range(4):
        pipeline.step(*arguments(number))
    functions = pipeline.pipeline._engine._executors["step"]._plain.functions
    kept = functions[-3]

    def fails(message):
        raise ValueError("planted")

    silent(pipeline)
    functions[-3] = kept._replace(function=fails)
    x, y = batch(4)
    with pytest.raises(ValueError, match="planted") as caught:
        pipeline.pipeline.step(x, target=y)
    assert "hold a part of it" in " ".join(caught.value.__notes__)
    functions[-3] = kept
    with pytest.raises(RuntimeError, match="gradients hold a part of a step that failed"):
        pipeline.pipeline.step(x, target=y)
    pipeline.pipeline.close()


def silent(run):
    """Replays of the emulation count no changes."""
    replay = run.maker._replay

    def uncounted(operations):
        grads = [each.grad for each in run.pipeline.parameters()]
        versions = [each._version for each in grads]
        replay(operations)
        torch._C._autograd._unsafe_set_version_counter(tuple(grads), tuple(versions))

    run.maker._replay = uncounted


# ------------------------------------------------------------------------------- lines


class AlwaysReplaces(Plain):
    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x + self.mean)


class Scaled(Plain):
    def forward(self, x, *, scale=1.0):
        return super().forward(x) * scale


def annealed(number, pipeline):
    pipeline.stages[0].tau = 1 + number / 10


def scaled(number):
    x, y = batch(number)
    return (x,), y, {"scale": 1.0 + number}


@pytest.mark.parametrize(
    ("make", "steps", "text"),
    [
        (
            AlwaysReplaces,
            {"numbers": range(9)},
            "the place, the layout or the hooks of mean of AlwaysReplaces have changed",
        ),
        (
            Scaled,
            {"numbers": range(9), "given": scaled},
            "the call was given 7.0, then 8.0 (a tensor may change)",
        ),
        (
            Plain,
            {"numbers": range(34), "before": annealed},
            "after 8 captures, the last one since tau of Plain has changed",
        ),
    ],
)
def test_a_line_names_what_keeps_steps_eager(make, steps, text, caplog):
    with caplog.at_level(logging.WARNING):
        captured(make=make, steps=steps)
    (line,) = graph_lines(caplog)
    assert text in line


def test_hooks_that_come_later_are_named_when_they_are_captured(caplog):
    def before(number, pipeline):
        if number == 4:
            pipeline.stages[0].linear.register_forward_hook(lambda *_: None)

    with caplog.at_level(logging.WARNING):
        captured(make=Plain, steps={"numbers": range(8), "before": before})
    (line,) = graph_lines(caplog)
    assert "hooks of module linear run when a step is captured" in line


def test_a_tensor_of_another_device_keeps_steps_eager(caplog):
    """On a GPU a graph would hold the value that a CPU tensor had in the capture."""

    def make(index):
        stage = Plain(index)
        stage.unused = torch.zeros(1, device="meta")
        return stage

    with caplog.at_level(logging.WARNING):
        captured(make=make)
    (line,) = graph_lines(caplog)
    assert "unused of Plain is on meta, the stages are on cpu: move it there" in line
