"""The public names and their signatures: what outside code relies on."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from inspect import Parameter

import pytest

import zbpp
from zbpp import (
    Costs,
    Pipeline,
    PlanError,
    backward_input,
    lower,
    plan,
    simulate,
)

NAMES = [
    "ActivationOffload", "SCHEDULES", "Costs", "CudaGraphs", "Extra", "Feature", "FewerBytes",
    "FlightRecorder", "GradientRelease", "HeadAtOnce", "Links", "LossScale", "MasterWeights",
    "MessagesAhead", "Observer", "OverlapExchange", "Pipeline", "PlanError",
    "PostValidation", "Recorder", "Timeline", "Timetable",
    "WeightGrads",
    "auxiliary_loss", "auxiliary_losses", "backward_input", "check_replicas", "checkpoint",
    "clip_grad_norm_", "find_non_finite", "linear_cross_entropy", "load", "lower", "make_mesh",
    "order_microbatches", "parity", "per_microbatch", "plan", "replicate", "save", "simulate", "split_layers",
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


def test_the_signature_of_plan():
    first, rest = parameters(plan)[:3], parameters(plan)[3:]
    assert first == [("name", POSITIONAL), ("num_ranks", POSITIONAL), ("num_microbatches", POSITIONAL)]
    assert {("costs", KEYWORD), ("memory_limit", KEYWORD), ("placement", KEYWORD)} <= set(rest)
    assert ("stages_per_rank", KEYWORD) in rest
    assert all(kind == KEYWORD for _, kind in rest)


def test_the_signature_of_costs_and_their_defaults():
    names = ["f", "b", "w", "bw", "comm", "saved", "deferred", "reduce", "host", "static", "exchange"]
    sizes, of_slices = ["memory_unit", "lengths", "quadratic"], ["slice_bounds", "past", "past_gradients"]
    assert [name for name, _ in parameters(Costs)] == [*names, *sizes, *of_slices, "links"]
    numbers = [1.0, 1.0, 1.0, None, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert list(defaults(Costs).values()) == [*numbers, "activations", (), None, (), 0.0, 0.0, None]


def test_the_signature_of_simulate_and_lower():
    assert parameters(simulate) == [("timetable", POSITIONAL), ("costs", POSITIONAL)]
    assert [name for name, _ in parameters(lower)] == ["timetable"]


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


def test_a_plan_that_cannot_be_made_is_a_plan_error_and_a_value_error():
    with pytest.raises(PlanError):
        plan("zb_h9", 2, 4)
    assert issubclass(PlanError, ValueError)


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    """`import zbpp.checkpoint.saving` put a module where `zbpp.checkpoint` was a function."""
    modules = {module.name for module in pkgutil.iter_modules(zbpp.__path__)}
    for name in modules & set(zbpp.__all__):
        value = getattr(zbpp, name)
        assert import_module(f"zbpp.{name}") is getattr(zbpp, name) is value


def test_packages_that_docs_name_need_no_import_of_their_own():
    code = (
        "import zbpp; zbpp.stage_api.mean_over_tokens, zbpp.torch_pipelining.install, zbpp.autograd.recompute"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
