"""The public names and their signatures: what outside code relies on."""

import inspect
import pkgutil
from inspect import Parameter

import pytest
import torch
from torch import nn

import zbpp
from zbpp import (
    SCHEDULES,
    Costs,
    Pipeline,
    PlanError,
    Timetable,
    WeightGrads,
    backward_input,
    lower,
    plan,
    replicate,
    simulate,
)
from zbpp.models.mlp import Mlp

NAMES = [
    "ActivationOffload", "SCHEDULES", "Costs", "CudaGraphs", "Extra", "FlightRecorder", "GradientRelease",
    "HeadAtOnce", "LossScale", "MasterWeights", "OverlapExchange", "Pipeline", "PlanError",
    "PostValidation", "Recorder", "Timeline", "Timetable",
    "WeightGrads",
    "auxiliary_loss", "auxiliary_losses", "backward_input", "check_replicas", "checkpoint",
    "clip_grad_norm_", "find_non_finite", "linear_cross_entropy", "load", "lower", "make_mesh",
    "per_microbatch", "plan", "replicate", "save", "simulate", "split_layers",
    "split_sequential", "trace_stages",
]  # fmt: skip

POSITIONAL, KEYWORD = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
REST, KEYWORDS = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD


def parameters(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values() if p.name != "self"]


def defaults(function):
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.default is not Parameter.empty}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_listed(name):
    assert getattr(zbpp, name) is not None
    assert name in zbpp.__all__
    assert name in dir(zbpp)


def test_no_other_name_is_public():
    assert sorted(zbpp.__all__) == sorted(NAMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        zbpp.Pipelines  # noqa: B018  # the look-up is what is tested


def test_the_five_schedules_are_known_by_name():
    assert {"gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v"} <= SCHEDULES.keys()


def test_the_signature_of_plan():
    first, rest = parameters(plan)[:3], parameters(plan)[3:]
    assert first == [("name", POSITIONAL), ("num_ranks", POSITIONAL), ("num_microbatches", POSITIONAL)]
    assert {("costs", KEYWORD), ("memory_limit", KEYWORD), ("placement", KEYWORD)} <= set(rest)
    assert ("stages_per_rank", KEYWORD) in rest
    assert all(kind == KEYWORD for _, kind in rest)


def test_the_signature_of_costs_and_their_defaults():
    names = ["f", "b", "w", "bw", "comm", "saved", "deferred", "reduce", "host", "static", "exchange"]
    assert [name for name, _ in parameters(Costs)] == names
    assert list(defaults(Costs).values()) == [1.0, 1.0, 1.0, None, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_the_signature_of_simulate_and_lower():
    assert parameters(simulate) == [
        ("timetable", POSITIONAL), ("costs", POSITIONAL), ("offload", POSITIONAL), ("num_steps", KEYWORD),
    ]  # fmt: skip
    assert [name for name, _ in parameters(lower)] == ["timetable", "offload"]
    assert defaults(lower) == {"offload": ()}


def test_the_signature_of_backward_input():
    names = ["outputs", "output_grads", "inputs", "parameters"]
    assert parameters(backward_input)[:4] == [(name, POSITIONAL) for name in names]
    assert defaults(backward_input)["parameters"] is None


def test_the_signature_of_pipeline():
    names = ["stages", "timetable", "loss_fn", "group"]
    assert parameters(Pipeline)[:4] == [(name, POSITIONAL) for name in names]
    assert (defaults(Pipeline)["loss_fn"], defaults(Pipeline)["group"]) == (None, None)
    assert {("num_microbatches", KEYWORD), ("device", KEYWORD)} <= set(parameters(Pipeline))
    expected = [("args", REST), ("target", KEYWORD), ("kwargs", KEYWORDS)]
    assert parameters(Pipeline.step) == expected
    more = [("return_outputs", KEYWORD), ("metrics", KEYWORD)]
    assert parameters(Pipeline.evaluate) == [*expected[:2], *more, expected[2]]
    assert defaults(Pipeline.step) == {"target": None}
    assert defaults(Pipeline.evaluate) == {"target": None, "return_outputs": False, "metrics": None}


def test_what_a_timetable_shows():
    timetable = plan("zb_v", num_ranks=2, num_microbatches=4)
    assert Timetable.parse(str(timetable)) == timetable
    assert (timetable.num_ranks, timetable.num_stages, timetable.num_microbatches) == (2, 4, 4)
    assert [timetable.rank_of[stage] for stage in range(4)] == [0, 1, 1, 0]
    assert [len(row) for row in timetable.rows] == [24, 24]


def test_what_a_timeline_shows():
    timeline = simulate(plan("1f1b", 2, 4), Costs(f=1.0, b=1.0, w=1.0, comm=0.0))
    assert timeline.makespan == 15  # (m + p - 1)(F + B + W)
    assert timeline.max_span == max(timeline.span(0), timeline.span(1)) == 15
    assert timeline.bubble == 3
    assert timeline.bubble_rate == 3 / 15
    assert tuple(timeline.peak_memory) == (2.0, 1.0)


def test_a_plan_that_cannot_be_made_is_a_plan_error_and_a_value_error():
    with pytest.raises(PlanError):
        plan("zb_h9", 2, 4)
    assert issubclass(PlanError, ValueError)


def test_the_split_backward_as_documented():
    linear, x = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    y = linear(x)
    grads, weight_grads = backward_input(y, torch.ones_like(y), x)
    assert isinstance(weight_grads, WeightGrads)
    assert torch.equal(grads[0], linear.weight.detach().sum(0).expand(4, 3))
    assert weight_grads.held_bytes > 0
    assert linear.weight.grad is None
    weight_grads.accumulate()
    assert torch.equal(linear.weight.grad, torch.full((2, 3), 4.0))
    with pytest.raises(RuntimeError):
        weight_grads.accumulate()


def test_a_pipeline_of_a_name_and_a_model_as_documented():
    model = Mlp(in_features=3, hidden_size=4, out_features=2, num_layers=2)
    pipeline = Pipeline(model, "zb_h1", num_microbatches=2)
    assert len(pipeline.step(torch.ones(4, 3), target=torch.ones(4, 2))) == 2
    assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_a_pipeline_as_documented():
    """One rank, no process group; losses are a list, one per microbatch."""
    pipeline = Pipeline({0: nn.Linear(3, 2)}, plan("zb_h1", 1, 2), loss_fn=nn.functional.mse_loss)
    x, target = torch.ones(4, 3), torch.ones(4, 2)
    assert len(pipeline.step(x, target=target)) == 2
    assert len(pipeline.evaluate(x, target=target)) == 2
    assert type(replicate(x)) is not torch.Tensor


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    """`import zbpp.checkpoint.saving` put a module where `zbpp.checkpoint` was a function."""
    modules = {module.name for module in pkgutil.iter_modules(zbpp.__path__)}
    assert not modules & set(zbpp.__all__)
