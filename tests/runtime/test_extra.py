"""Features and observers: what a user may hang on a pipeline, and what the core promises to it."""

import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp.features
import zbpp.observers
from helpers.processes import run_ranks
from zbpp import Extra, Feature, Observer, Pipeline, plan
from zbpp.schedule import Action, Op, Program, Send

M, SIZE = 4, 8


def pipeline_of(*extras, schedule="zb_h1", rank=0, num_ranks=1):
    torch.manual_seed(0)
    timetable = plan(schedule, num_ranks, M)
    everything = [nn.Linear(SIZE, SIZE) for _ in range(timetable.num_stages)]
    stages = {stage: everything[stage] for stage in timetable.stages_of(rank)}
    return Pipeline(stages, timetable, F.mse_loss, extras=extras)


def step(pipeline):
    x = torch.linspace(-1, 1, 2 * M * SIZE).reshape(2 * M, SIZE)
    return pipeline.step(x, target=x.cos())


class Noting(Extra):
    """Notes every call of its methods."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def attach(self, rank):
        self.calls.append((self.name, "attach"))

    def around(self, call, at, run):
        if not isinstance(at, Action):
            return run

        def logged(message):
            self.calls.append((self.name, f"before {at}"))
            result = run(message)
            self.calls.append((self.name, f"after {at}"))
            return result

        return logged

    def begin(self, call):
        self.calls.append((self.name, f"begin {call.kind}"))

    def end(self, call, result):
        self.calls.append((self.name, f"end {call.kind} with {len(result.losses)} losses"))

    def fail(self, error):
        self.calls.append((self.name, f"fail {type(error).__name__}"))

    def close(self):
        self.calls.append((self.name, "close"))


class Log(Noting, Feature):
    """As a feature."""


class Watch(Noting, Observer):
    """As an observer."""


def test_the_first_feature_is_the_innermost_one_and_observers_are_outside_of_all():
    calls = []
    pipeline = pipeline_of(Watch("observer", calls), Log("feature", calls))
    calls.clear()
    step(pipeline)
    assert [name for name, what in calls if what.endswith("0F0")] == [
        "observer", "feature", "feature", "observer",
    ]  # fmt: skip


def test_the_first_extra_is_the_innermost_one():
    calls = []
    pipeline = pipeline_of(Log("first", calls), Log("second", calls))
    assert calls == [("first", "attach"), ("second", "attach")]
    calls.clear()
    step(pipeline)
    assert calls[:6] == [
        ("first", "begin step"), ("second", "begin step"),
        ("second", "before 0F0"), ("first", "before 0F0"), ("first", "after 0F0"), ("second", "after 0F0"),
    ]  # fmt: skip
    assert calls[-2:] == [("first", "end step with 4 losses"), ("second", "end step with 4 losses")]
    calls.clear()
    pipeline.close()
    assert calls == [("second", "close"), ("first", "close")]


def test_an_extra_is_told_of_a_call_that_fails():
    calls = []
    pipeline = pipeline_of(Log("log", calls))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipeline.step(torch.ones(M, SIZE + 1), target=torch.ones(M, SIZE))
    assert [what for _, what in calls if what.startswith(("begin", "end", "fail"))] == [
        "begin step", "fail RuntimeError",
    ]  # fmt: skip


def functions(pipeline):
    """What runs at each instruction of a step, as far as one can tell two functions apart."""
    found = pipeline._rank.executors["step"]._resolution.functions
    return [repr(getattr(each.function, "func", each.function)).split(" at ")[0] for each in found]


def test_an_extra_that_is_gone_has_left_nothing_behind():
    """Extras are bound when a program is resolved: without them, a step runs the functions of the core."""
    pipeline, calls = pipeline_of(), []
    before = functions(pipeline)
    with pipeline.using(Log("log", calls)):
        assert functions(pipeline) != before
        step(pipeline)
    assert calls[-1] == ("log", "close")
    assert functions(pipeline) == before
    calls.clear()
    step(pipeline)
    assert calls == []


class Mark(NamedTuple):
    """An instruction that only one extra knows."""

    text: str

    def __str__(self):
        return self.text


class Marks(Feature):
    """Puts an instruction of its own behind each action of training steps."""

    name = "marks"

    def __init__(self, is_handled=True):
        self.is_handled, self.ran = is_handled, []

    def rewrite(self, call: str, program: Program) -> Program:
        if call != "step":
            return program
        found = []
        for each in program.instructions:
            found += [each, Mark(f"mark {each}")] if isinstance(each, Action) else [each]
        return program._replace(instructions=tuple(found))

    def handlers(self, call):
        return {Mark: lambda at: self.ran.append(at.text)} if self.is_handled else {}


class EverySecondW(Feature):
    """Drops the W's of odd microbatches: a pass, and no handler."""

    name = "every_second_w"

    def rewrite(self, call: str, program: Program) -> Program:
        kept = [each for each in program.instructions if not _is_odd_w(each)]
        return program._replace(instructions=tuple(kept))


def _is_odd_w(instruction):
    return isinstance(instruction, Action) and instruction.op == Op.W and instruction.microbatch % 2 == 1


def test_a_pass_may_leave_out_w():
    """The gradients are those of the even microbatches, as plain autograd computes them."""
    pipeline = pipeline_of(EverySecondW())
    step(pipeline)
    (layer,) = pipeline_of().stages.values()
    x = torch.linspace(-1, 1, 2 * M * SIZE).reshape(2 * M, SIZE)
    for part in x.split(2)[::2]:
        (F.mse_loss(layer(part), part.cos()) / M).backward()
    torch.testing.assert_close(pipeline.stages[0].weight.grad, layer.weight.grad)


def test_a_feature_runs_instructions_of_its_own_where_it_has_put_them():
    marks = Marks()
    pipeline = pipeline_of(marks)
    losses = step(pipeline)
    assert marks.ran == [f"mark {action}" for action in pipeline.timetable.rows[0]]
    assert torch.equal(torch.stack(losses), torch.stack(step(pipeline_of())))
    marks.ran.clear()
    pipeline.evaluate(torch.ones(M, SIZE), target=torch.ones(M, SIZE))
    assert marks.ran == []


class DropW(Feature):
    """Drops the W's of one parameter in every second step, so that these steps don't train it."""

    name = "drop_w"

    def __init__(self, parameter):
        self.parameter, self.num_steps = parameter, 0

    def begin(self, call):
        self.num_steps += 1

    def around_w(self, stage, run_w):
        def run(microbatch, weight_grads):
            if self.num_steps % 2 == 0:
                weight_grads.take(lambda task: task.leaf is self.parameter)
            run_w(microbatch, weight_grads)

        return run


@pytest.mark.parametrize("schedule", ["zb_v", "1f1b"])  # W, and BW
def test_a_feature_takes_tasks_out_of_each_w(schedule):
    pipeline, x = pipeline_of(schedule=schedule), torch.linspace(-1, 1, 2 * M * SIZE).reshape(2 * M, SIZE)
    layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in pipeline.stages))
    for layer, stage in zip(layers, pipeline.stages.values(), strict=True):
        layer.load_state_dict(stage.state_dict())
    with pipeline.using(DropW(pipeline.stages[0].weight)):
        for _ in range(2):
            step(pipeline)
            F.mse_loss(layers(x), x.cos()).backward()
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            found = pipeline.stages[index].get_parameter(name)
            part = 0.5 if (index, name) == (0, "weight") else 1.0
            torch.testing.assert_close(found.grad, part * parameter.grad)
    step(pipeline)
    part = pipeline.stages[0].weight.grad / layers[0].weight.grad  # without the feature: each step counts
    torch.testing.assert_close(part, torch.ones_like(part))


class Mirrored(Feature):
    """Runs each call on `function` of its inputs, and gives `function` of its losses."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def take(self, call):
        return call._replace(args=(self.function(call.args[0]),))

    def give(self, call, result):
        return result._replace(losses=[*map(self.function, result.losses)])


def test_features_change_what_a_call_takes_and_in_turn_what_it_gives():
    """The first feature is the outer one. Gradients are those of the batch that ran."""
    pipeline = pipeline_of(Mirrored("twice", lambda x: 2 * x), Mirrored("plus one", lambda x: x + 1))
    x = torch.linspace(-1, 1, 2 * M * SIZE).reshape(2 * M, SIZE)
    losses, plain = pipeline.step(x, target=x.cos()), pipeline_of()
    expected = plain.step(2 * x + 1, target=x.cos())
    assert losses == [2 * (loss + 1) for loss in expected]
    assert pipeline.evaluate(x, target=x.cos()) == losses
    assert torch.equal(pipeline.stages[0].weight.grad, plain.stages[0].weight.grad)


def test_an_instruction_that_nobody_handles_is_left_out():
    pipeline = pipeline_of(Marks(is_handled=False))
    assert functions(pipeline) == functions(pipeline_of())
    assert len(step(pipeline)) == M


@pytest.mark.parametrize(
    "others, wrong, complaint",
    [
        # Else the step would do nothing, in silence.
        (
            (),
            {"around": lambda call, at, run: None},
            "the extra wrong leaves nothing to run at 0F0",
        ),
        ((Marks(),), {"handlers": lambda call: {Mark: print}}, "two features handle Mark, one of them wrong"),
    ],
)
def test_a_feature_that_is_wrong_is_refused_and_leaves_the_pipeline_as_it_was(others, wrong, complaint):
    feature = Feature()
    feature.name = "wrong"
    vars(feature).update(wrong)
    pipeline = pipeline_of(*others)
    with pytest.raises(TypeError, match=complaint):
        pipeline.use(feature)
    assert pipeline.extras == others
    assert torch.equal(torch.stack(step(pipeline)), torch.stack(step(pipeline_of())))


def test_extras_that_exclude_each_other_are_refused_with_what_to_write_instead():
    first, second = Extra(), Extra()
    first.name, second.name = "first", "second"
    second.excludes = {"first": "leave one of them out"}
    with pytest.raises(ValueError, match="second doesn't go with first: leave one of them out"):
        pipeline_of(first, second)
    pipeline = pipeline_of(second)
    with pytest.raises(ValueError, match="second doesn't go with first"), pipeline.using(first):
        pass
    assert len(step(pipeline)) == M


def extras_of_zbpp():
    for room in (zbpp.features, zbpp.observers):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    waiting = [Extra]
    while waiting:
        found = waiting.pop().__subclasses__()
        waiting += found
        yield from (each for each in found if each.__module__.startswith("zbpp."))


def test_the_table_of_the_docs_is_what_extras_exclude():
    page = (Path(__file__).parents[2] / "docs/pipeline.md").read_text()
    rows = [
        line for line in page.partition("## What goes with what")[2].splitlines() if line.startswith("| `")
    ]
    stated = {
        f"| `{extra.name}` | `{other}` | {instead} |"
        for extra in extras_of_zbpp()
        for other, instead in extra.excludes.items()
    }
    assert sorted(rows) == sorted(stated)


class BytesPerLink(Observer):
    """Counts the bytes that this rank sends to each other rank."""

    name = "bytes_per_link"

    def __init__(self):
        self.sent = defaultdict(int)

    def around(self, call, at, run):
        if not isinstance(at, Send):
            return run

        def counted(message):
            self.sent[at.peer] += sum(tensor.nbytes for tensor in message if tensor is not None)
            return run(message)

        return counted


def bytes_sent(rank):
    counter = BytesPerLink()
    with pipeline_of(counter, rank=rank, num_ranks=2) as pipeline:
        step(pipeline)
    return dict(counter.sent)


def test_an_observer_of_a_user_sees_every_message():
    """Each of M microbatches has 2 rows of SIZE float32 numbers: x to rank 1, and its gradient back."""
    nbytes = M * 2 * SIZE * 4
    assert run_ranks(bytes_sent, 2) == [{1: nbytes}, {0: nbytes}]
