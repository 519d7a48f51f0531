"""Sequences divided over processes: losses, gradients and outputs are those of one process."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from helpers.processes import run_ranks
from zbpp import OverlapExchange, Pipeline, clip_grad_norm_, make_mesh, per_microbatch, plan, replicate
from zbpp.autograd import backward_input
from zbpp.autograd.weight_grads import ComputedTask
from zbpp.features.context.sequence_parts import SequenceParts
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.runtime.call.feed import Call
from zbpp.runtime.processes.dtensors import whole_of
from zbpp.stage_api import mean_over

M, ROWS, TIME, VOCABULARY = 4, 8, 12, 32
SCHEDULES = ("1f1b", "zb_h1", "zb_v")
SLICED = ("1f1b in slices", "zb_h1 in slices")  # their sums have the slices' order
BOUNDS = [0, 8, 12]
SIZES = {"vocab_size": VOCABULARY, "num_layers": 4, "hidden_size": 16, "num_heads": 4}
SIZES["sequence_length"] = TIME


class _Float64:
    """A model whose stages compute in float64."""

    def build_stage(self, index, num_stages):
        return super().build_stage(index, num_stages).double()


class Llama64(_Float64, Llama):
    pass


class Gpt64(_Float64, Gpt):
    pass


MODELS = {
    "llama": lambda: Llama64(**SIZES, num_kv_heads=2),
    "gpt": lambda: Gpt64(**SIZES, tie_embeddings=True),
}


def data(kind, rows=ROWS):
    """(arguments of stage 0, target). Parts of sequences have different numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (rows, TIME + 1), generator=generator)
    x, target = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    target[0, :7] = -100
    target[3] = -100
    if kind == "documents":
        positions = torch.cat([torch.arange(5), torch.arange(TIME - 5)]).expand(rows, -1)
        return (x, positions.contiguous()), target
    return (x,), target


def alone(name, kind):
    """{name: gradient}, loss and output in one process, by plain autograd."""
    model = MODELS[name]()
    whole = model.build_stage(0, 1)
    args, target = data(kind)
    output = whole(*args)
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
    loss.backward()
    grads = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    return grads, loss.item(), output.detach()


def num_tasks(name, num_stages):
    """Per stage, how many gradients wait for W in one process."""
    model, found = MODELS[name](), []
    received = (torch.randint(VOCABULARY, (2, TIME)),)
    for index in range(num_stages):
        output = model.build_stage(index, num_stages)(*received)
        inputs = [each for each in received if each.requires_grad]
        _, weight_grads = backward_input([output], [torch.ones_like(output)], inputs)
        found.append(num_deferred(weight_grads))
        received = (output.detach().requires_grad_(),)
    return found


def num_deferred(weight_grads):
    """How many gradients W computes. Those that B has computed wait for a W, but not in a BW."""
    return sum(not isinstance(each, ComputedTask) for each in weight_grads._tasks)


CASES = [*product(MODELS, ("ignored",), ("zb_h1", "zb_v", *SLICED))]
CASES += [*product(MODELS, ("documents",), ("zb_h1", "zb_h1 in slices"))]
AT_NIGHT = [
    *product(MODELS, ("documents",), ("1f1b", "zb_v", "1f1b in slices")),
    *product(MODELS, ("ignored",), ("1f1b", "zb_h1")),
]


def planned(schedule):
    """Options of a Pipeline of two ranks."""
    if schedule in SCHEDULES:
        return {"timetable": schedule, "num_microbatches": M}
    return {"timetable": plan(schedule.split()[0], 2, M, num_slices=2), "slice_bounds": BOUNDS}


def in_context(rank, degrees, cases):
    """Per case: losses, gradients, norm, numbers of tasks in each W, the evaluation's losses and outputs."""
    found = {}
    for case in cases:
        name, kind, schedule = case
        model, mesh, seen = MODELS[name](), make_mesh(**degrees), {}
        with Pipeline(model, **planned(schedule), mesh=mesh) as pipeline:
            for stage, worker in pipeline._rank.workers.items():
                count_tasks(worker, seen.setdefault(stage, set()))
            args, target = data(kind)
            part = slice(pipeline.place.data_part, None, pipeline.place.num_data_parts)
            args, target = [each[part] for each in args], target[part]
            losses = pipeline.step(*args, target=target)
            grads = {n: p.grad.clone() for n, p in pipeline.named_parameters()}
            norm = clip_grad_norm_(pipeline, 1e9).item()
            evaluated, outputs, metrics = pipeline.evaluate(
                *args, target=target, return_outputs=True, metrics=lambda output, target: {"one": 1.0}
            )
            predicted = pipeline.predict(*args)
            found[case] = losses, grads, norm, seen, evaluated, outputs, metrics, predicted
    return found


def count_tasks(worker, seen):
    """Note how many gradients wait in each W of a stage."""
    run_w = worker.run_w

    def count(microbatch, weight_grads):
        seen.add(num_deferred(weight_grads))
        run_w(microbatch, weight_grads)

    worker.run_w = count


def close(found, expected, scale=None):
    scale = expected.abs().max().item() if scale is None else scale
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * max(scale, 1e-9))


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(in_context, 4, {"context": 2}, CASES)


@pytest.mark.parametrize("name, kind", [*product(MODELS, ("ignored", "documents"))])
def test_context_has_the_losses_gradients_and_outputs_of_one_process(everyone, name, kind):
    """Pipeline of 2 x context of 2, under several plans; a process returns those of whole sequences."""
    assert_is_alone(everyone, name, kind, CASES)


@pytest.mark.nightly
def test_context_has_the_losses_gradients_and_outputs_of_one_process_under_all_plans():
    everyone = run_ranks(in_context, 4, {"context": 2}, AT_NIGHT)
    for name, kind in product(MODELS, ("ignored", "documents")):
        assert_is_alone(everyone, name, kind, AT_NIGHT)


def assert_is_alone(everyone, name, kind, cases):
    grads, loss, output = alone(name, kind)
    norm = torch.stack([each.norm() for each in set(grads.values())]).norm().item()
    schedules = [schedule for *case, schedule in cases if case == [name, kind]]
    for schedule, found in product(schedules, everyone):
        losses, mine, some_norm, _, evaluated, outputs, metrics, predicted = found[name, kind, schedule]
        for parameter, grad in mine.items():
            close(grad, grads[parameter], max(grads[parameter].abs().max().item(), 1e-6))
        assert some_norm == pytest.approx(norm, rel=1e-12)
        if losses:
            assert sum(losses).item() / M == pytest.approx(loss, rel=1e-12)
            assert sum(evaluated).item() / M == pytest.approx(loss, rel=1e-12)
            close(outputs, output)
            close(predicted, output)
            assert metrics == {"one": 1.0}
        else:
            assert outputs is None
            assert predicted is None
            assert not metrics
    by_name = {}
    for schedule, found in product(schedules, everyone):
        for parameter, grad in found[name, kind, schedule][1].items():
            if schedule == "zb_v" and parameter in MODELS[name]().tied().values():
                continue  # two stages of one rank add to it, in the timetable's order
            key = schedule in SLICED, parameter
            assert torch.equal(by_name.setdefault(key, grad), grad), (schedule, parameter)


def test_every_linear_waits_for_w_as_without_context(everyone):
    for (name, kind, schedule), found in product(CASES, everyone):
        expected = num_tasks(name, 4 if schedule == "zb_v" else 2)
        for stage, seen in found[name, kind, schedule][3].items():
            assert seen == {expected[stage]}, (name, kind, schedule, stage)


COMPOSED = {
    "replicate": ({"context": 2, "replicate": 2}, ()),
    "shard": ({"context": 2, "shard": 2}, ()),
    "tensor": ({"context": 2, "tensor": 2}, ()),  # gpt alone: llama has two key heads
    "overlap": ({"context": 2}, (OverlapExchange,)),
    "context of 4": ({"context": 4}, ()),
}


@pytest.mark.parametrize("what", COMPOSED)
def test_context_goes_with_other_dimensions(what):
    degrees, extras = COMPOSED[what]
    names = ["gpt"] if what in ("context of 4", "tensor") else MODELS  # llama has two key heads
    cases = [(name, "ignored", "zb_h1") for name in names]
    everyone = run_ranks(in_composed, 4, degrees, cases, extras)
    for case, found in product(cases, everyone):
        grads, _, _ = alone(case[0], "ignored")
        for parameter, grad in found[case].items():
            close(grad, grads[parameter], max(grads[parameter].abs().max().item(), 1e-6))


def in_composed(rank, degrees, cases, extras):
    """Per case, the whole gradients."""
    found = {}
    for name, kind, schedule in cases:
        model, mesh = MODELS[name](), make_mesh(**degrees)
        extra = [each() for each in extras]
        with Pipeline(model, schedule, num_microbatches=M, mesh=mesh, extras=extra) as pipeline:
            args, target = data(kind)
            part = slice(pipeline.place.data_part, None, pipeline.place.num_data_parts)
            pipeline.step(*[each[part] for each in args], target=target[part])
            found[name, kind, schedule] = {
                name: whole_of(each.grad).clone() for name, each in pipeline.named_parameters()
            }
    return found


class Still(torch.nn.Linear):
    mixes_time = False


def tokenwise(output, target):
    return (output - target).square().mean()


counted = mean_over(lambda target: target[..., 0].numel())


def refusals(rank):
    """What a Pipeline or a step says, by the case."""
    mesh, found = make_mesh(context=2), {}
    x = torch.randn(4, 6, 8)
    cases = {
        "no context": (torch.nn.Linear(8, 8), counted(tokenwise), x, x),
        "no mark": (Still(8, 8), lambda output, target: output.mean(), x, x),
        "odd length": (Still(8, 8), counted(tokenwise), x[:, :5], x[:, :5]),
        "flat target": (Still(8, 8), counted(tokenwise), x, x[:, 0]),
        "per_microbatch": (Still(8, 8), counted(tokenwise), per_microbatch([x, x]), x),
        "fine": (Still(8, 8), counted(tokenwise), x, x),
    }
    for name, (stage, loss_fn, args, target) in cases.items():
        found[name] = ""
        try:
            pipeline = Pipeline({0: stage}, "zb_h1", loss_fn, num_microbatches=2, mesh=mesh)
            pipeline.step(args, target=target)
        except ValueError as error:
            found[name] = str(error)
    return found


WORDS = {
    "no context": "holds no Context",
    "no mark": "mark it by zbpp.stage_api.mean_over_tokens",
    "odd length": "a sequence of 5 tokens doesn't split over context=2 processes: give 4 or 6 tokens",
    "flat target": "the target has no dimension 1 of this size",
    "per_microbatch": "per_microbatch(...) doesn't go with",
    "fine": "",
}


def test_what_context_cant_go_with_is_refused_in_one_line():
    for found in run_ranks(refusals, 2):
        assert found.keys() == WORDS.keys()
        for name, text in found.items():
            assert WORDS[name] in text if WORDS[name] else not text, (name, text)
            assert "\n" not in text


def divided_keywords(rank):
    """The shapes of keywords on a rank without stage 0, by what it is given beside them; or the refusal."""
    group = torch.distributed.group.WORLD
    of_tokens, of_rows, x = torch.ones(4, 6), torch.ones(4, 10), torch.ones(4, 6, 8)
    keywords, found = {"of_rows": of_rows, "of_tokens": of_tokens}, {}
    cases = {"inputs": ((x,), None, ()), "target": ((), of_tokens, ()), "bounds": ((), None, (0, 4, 6))}
    for name, (args, target, bounds) in (cases | {"nothing": ((), None, ())}).items():
        parts = SequenceParts(group, has_inputs=False)
        try:
            divided = parts.of(Call(args, target, keywords, slice_bounds=bounds)).kwargs
            found[name] = {key: list(each.shape) for key, each in divided.items()}
        except ValueError as error:
            found[name] = str(error)
    return found


def test_a_rank_without_the_length_of_sequences_divides_no_keyword_by_guess():
    for found in run_ranks(divided_keywords, 2):
        for name in ("inputs", "target", "bounds"):
            assert found[name] == {"of_rows": [4, 10], "of_tokens": [4, 3]}
        assert "of_rows has 10 entries along dimension 1, which may be tokens or not" in found["nothing"]


def caller_gradients(rank, bounds):
    """{name: gradient} of what the caller passes: by a graph, as a leaf, and whole for each microbatch."""
    model, mesh = MODELS["gpt"](), make_mesh(context=2)
    options = {"num_slices": len(bounds) - 1} if bounds else {}
    stages, target = scaled_stages(model), data("ignored")[1]
    passed = passed_tensors()
    timetable = plan("zb_v", 1, M, **options)
    with Pipeline(stages, timetable, model.loss, mesh=mesh, slice_bounds=bounds) as pipeline:
        pipeline.step(passed["x"] * 2, target=target, gain=passed["gain"], bias=replicate(passed["bias"]))
    return {name: each.grad for name, each in passed.items()}


def scaled_stages(model):
    """A stage that takes keywords, before the last one of a gpt, which ignores them."""
    return {0: Scale(), 1: Ignoring(model.build_stage(1, 2))}


class Scale(torch.nn.Module):
    mixes_time = False

    def forward(self, x, gain, bias):
        return x * gain[:, :, None] + bias


class Ignoring(torch.nn.Module):
    """A stage that is given the keywords of another one."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x, sequence_slice=None, **keywords):
        return self.stage(x, sequence_slice=sequence_slice)


def passed_tensors():
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (ROWS, TIME, 16), "gain": (ROWS, TIME), "bias": (16,)}
    options = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return {name: torch.randn(shape, **options) for name, shape in shapes.items()}


@pytest.mark.parametrize("bounds", [(), (0, 8, 12)], ids=["whole", "in slices"])
def test_the_callers_tensors_get_the_gradients_of_whole_sequences(bounds):
    """On each process, as without context: not those of its own part, times the number of processes."""
    model, passed = MODELS["gpt"](), passed_tensors()
    stages = scaled_stages(model)
    output = stages[1](stages[0](passed["x"] * 2, passed["gain"], passed["bias"]))
    target = data("ignored")[1]
    F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100).backward()
    for found in run_ranks(caller_gradients, 2, bounds):
        for name, each in passed.items():
            close(found[name], each.grad)
