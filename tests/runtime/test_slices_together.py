"""Sequences in slices beside all else that a pipeline can do: gradients are those of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from helpers.graph_maker import EmulatedGraphs
from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.toy_lm import rows_of
from zbpp import CudaGraphs, HeadAtOnce, Pipeline, make_mesh, plan
from zbpp.autograd import recompute
from zbpp.autograd.compiled import compile_stage
from zbpp.models.llama import Llama
from zbpp.observers.non_finite import find_non_finite
from zbpp.stage_api import IGNORED, blocks_of, mean_over_tokens

WORDS, TIME, M, ROWS = 31, 12, 4, 8
BOUNDS = (0, 5, 9, 12)


def llama(**options):
    sizes = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}
    return Llama(vocab_size=WORDS, sequence_length=TIME, **sizes, **options)


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (rows, TIME + 1), generator=generator)
    target = tokens[:, 1:].clone()
    target[0, :7] = target[5, 6:] = IGNORED
    return tokens[:, :-1], target


def whole(**options):
    """(loss, gradients) of plain autograd over whole sequences."""
    model = llama(**options)
    stage = model.build_stage(0, 1).double()
    x, target = batch()
    loss = model.loss(stage(x), target)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in stage.named_parameters()}


def nothing(stage):
    pass


def block_by_block(stage):
    for block in blocks_of(stage):
        recompute(block)


def with_main_grad(stage):
    for each in stage.parameters():
        each.main_grad = torch.zeros_like(each)


TOGETHER = {
    "alone": ({}, nothing, ()),
    "blocks recompute": ({}, block_by_block, ()),
    "stages recompute": ({}, recompute, ()),
    "the head at once": ({}, nothing, (HeadAtOnce,)),
    "the head again": ({"head": "recompute"}, nothing, (HeadAtOnce,)),
    "whole logits": ({"head": "whole"}, nothing, ()),
    "main gradients": ({}, with_main_grad, ()),
    "tied": ({"tie_embeddings": True}, nothing, ()),
    "experts": ({"experts": 4, "balance_loss": 0.0}, nothing, ()),
}


def sliced(rank, name, schedule="zb_v", num_ranks=1, degrees=None, compiled=nothing):
    """(losses, gradients) of this rank."""
    torch.set_default_dtype(torch.float64)
    options, prepare, extras = TOGETHER[name]
    mesh = None if degrees is None else make_mesh(**degrees, device_type="cpu")
    timetable, model = plan(schedule, num_ranks, M, num_slices=len(BOUNDS) - 1), llama(**options)
    here = rank if mesh is None else mesh.get_local_rank("pipeline")
    stages = {s: model.build_stage(s, timetable.num_stages).double() for s in timetable.stages_of(here)}
    if degrees is not None and "tensor" in degrees:
        for stage in stages.values():
            model.parallelize(stage, mesh["tensor"])
    for stage in stages.values():
        prepare(stage)
        compiled(stage)
    if name == "tied":
        _tie(stages)
    made = [each() for each in extras]
    with Pipeline(stages, timetable, model.loss, mesh=mesh, slice_bounds=BOUNDS, extras=made) as pipeline:
        x, target = rows_of(pipeline.place, *batch())
        losses = [each.item() for each in pipeline.step(x, target=target)]
        return losses, {name: full(each) for name, each in pipeline.named_parameters()}


def _tie(stages):
    """One Parameter where a rank has both places; else the last stage declares its copy."""
    if len(stages) > 1:
        stages[max(stages)].head.weight = stages[0].embedding.weight
    elif 0 not in stages:
        stages[max(stages)].tied_parameters = {"head.weight": "embedding.weight"}


def full(parameter):
    grad = getattr(parameter, "main_grad", parameter.grad)
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def alone(rank):
    return {name: sliced(rank, name) for name in TOGETHER}


def compiled(rank, whole):
    """(losses, gradients, what was compiled) of this rank."""
    said, cache = [], {}

    def by_zbpp(stage):
        compile_stage(stage, whole=whole, backend="eager", cache=cache, say=said.append)

    found = sliced(rank, "alone", "zb_v", 2, compiled=by_zbpp)
    return *found, [each for each in said if each.endswith("compiling")]


@pytest.mark.slow  # Dynamo traces a layer's parts once per length of a slice
@pytest.mark.parametrize("is_whole", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_attention_of_compiled_stages_stays_eager_and_the_rest_is_compiled_once_per_length(is_whole):
    """The lengths are 5, 4 and 3; all layers share what is compiled."""
    ranks = run_ranks(compiled, 2, is_whole)
    loss, expected = whole()
    assert sum(each for losses, *_ in ranks for each in losses) / M == pytest.approx(loss, rel=1e-12)
    assert_close({name: grad for _, own, _ in ranks for name, grad in own.items()}, expected, 1e-12)
    for *_, said in ranks:
        assert len(said) == 3
        assert all("mlp" in each for each in said)


def by_torch_compile(rank, is_wrapped, bounds):
    """(sum of losses, gradients, numbers of graphs made in the first step and later) of this rank."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    made = CompileCounterWithBackend("eager")
    timetable, model = plan("zb_h1", 2, M, num_slices=len(bounds) - 1), llama()
    stage = model.build_stage(rank, 2).double()
    if is_wrapped:
        stage = torch.compile(stage, backend=made)
    else:
        stage.compile(backend=made)
    numbers, (x, target) = [], batch()
    with Pipeline({rank: stage}, timetable, model.loss, slice_bounds=bounds) as pipeline:
        for _ in range(2):
            stage.zero_grad()
            losses = pipeline.step(x, target=target)
            numbers.append(made.frame_count)
    grads = {name.removeprefix("_orig_mod."): each.grad for name, each in stage.named_parameters()}
    return sum(each.item() for each in losses), grads, numbers


@pytest.mark.slow  # Dynamo traces stages on two ranks
@pytest.mark.parametrize(
    ("is_wrapped", "bounds"),
    [
        pytest.param(True, BOUNDS, marks=pytest.mark.nightly),
        (False, (0, 3, 5, 7, 8, 9, 10, 11, 12)),
    ],
)
def test_torch_compile_makes_graphs_for_all_lengths_and_leaves_the_past_to_python(is_wrapped, bounds):
    """Eight lengths and starts need no more graphs than three: the second one makes them dynamic."""
    ranks = run_ranks(by_torch_compile, 2, is_wrapped, bounds)
    loss, expected = whole()
    assert sum(found for found, *_ in ranks) / M == pytest.approx(loss, rel=1e-12)
    assert_close({name: grad for _, own, _ in ranks for name, grad in own.items()}, expected, 1e-12)
    for *_, (first, both) in ranks:
        assert 0 < first <= 12
        assert both == first


def test_alone_with_each_feature():
    (found,) = run_ranks(alone, 1)
    for name, (losses, grads) in found.items():
        loss, expected = whole(**TOGETHER[name][0])
        assert sum(losses) / M == pytest.approx(loss, rel=1e-12), name
        assert_close({each: grads[each] for each in expected}, expected, 1e-12)


MESHES = {
    "pipeline": ("blocks recompute", "1f1b", 2, None),
    "copies of a tied parameter": ("tied", "zb_h1", 2, None),
    "replicas": ("alone", "zb_v", 1, {"replicate": 2}),
    "shards": ("blocks recompute", "zb_v", 1, {"shard": 2}),
    "tensor": ("alone", "zb_h1", 1, {"tensor": 2}),
}


def in_meshes(rank):
    return {name: sliced(rank, *case) for name, case in MESHES.items()}


def test_in_meshes():
    """The losses of replicas and shards are those of their own rows: their mean is that of all."""
    ranks = run_ranks(in_meshes, 2)
    for name, (case, *_, degrees) in MESHES.items():
        loss, expected = whole(**TOGETHER[case][0])
        losses = [each for rank in ranks for each in rank[name][0]]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12), name
        grads = {each: grad for rank in ranks for each, grad in rank[name][1].items()}
        assert_close({each: grads[each] for each in expected}, expected, 1e-12)
        if degrees is not None:
            assert all(torch.equal(ranks[0][name][1][each], grads[each]) for each in expected)


# ---------------------------------------------------------------- what is refused


def pipeline_of(bounds=BOUNDS, num_slices=3, model=None, **options):
    model = llama() if model is None else model
    return Pipeline(model, plan("1f1b", 1, M, num_slices=num_slices), slice_bounds=bounds, **options)


def test_bounds_that_do_not_fit_the_timetable_are_refused():
    for bounds, words in (
        (12, "slice_bounds=12: write where each slice begins, from 0 on, and the sequence's end, in tokens"),
        ((0, 6, 12), "has 2 slices, the timetable has 3"),
    ):
        with pytest.raises(ValueError, match=words):
            pipeline_of(bounds)


def test_sequences_of_another_length_are_refused_but_whole_ones_run():
    x, target = batch()
    with pipeline_of() as pipeline:
        with pytest.raises(ValueError, match=r"argument 0 has shape \[8, 10\].*sequences of 12 tokens"):
            pipeline.step(x[:, :10], target=target[:, :10])
        with pytest.raises(ValueError, match=r"target has shape \[8\]"):
            pipeline.step(x, target=target[:, 0])
        with pytest.raises(ValueError, match="microbatch 1 have 9 tokens in one argument, and 12 in another"):
            pipeline.step(zbpp.per_microbatch([x[:2], x[:2, :9], x[:2], x[:2]]), target=target)
        assert pipeline.predict(x[:3, :7]).shape == (3, 7, WORDS)
        losses, outputs = pipeline.evaluate_as_one(x[:3, :7], target=target[:3, :7], return_outputs=True)
        assert len(losses) == 1
        assert outputs.shape == (3, 7, WORDS)
        _, outputs = pipeline.evaluate(x, target=target, return_outputs=True)
        assert torch.equal(outputs.argmax(-1), pipeline.predict(x).argmax(-1))


class Summing(nn.Linear):
    """Mixes time, and takes no sequence_slice."""

    def forward(self, x):
        return super().forward(x.cumsum(1))


class Tokenwise(nn.Linear):
    mixes_time = False


@mean_over_tokens
def counted(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def test_stages_and_losses_that_can_not_come_in_slices_are_refused():
    timetable = plan("1f1b", 1, M, num_slices=3)
    with pytest.raises(ValueError, match="Summing, can't be run in slices"):
        Pipeline({0: Summing(4, 4)}, timetable, counted, slice_bounds=BOUNDS)
    with pytest.raises(ValueError, match="mark it by @zbpp.stage_api.mean_over_tokens"):
        Pipeline({0: Tokenwise(4, 4)}, timetable, nn.functional.mse_loss, slice_bounds=BOUNDS)
    x, target = torch.randn(ROWS, TIME, 4), torch.randint(4, (ROWS, TIME))
    with Pipeline({0: Tokenwise(4, 4)}, timetable, counted, slice_bounds=BOUNDS) as pipeline:
        losses = pipeline.step(x, target=target)
        expected = counted(pipeline.stages[0](x), target)
    assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-6)


def test_cuda_graphs_are_refused():
    with pytest.raises(ValueError, match="slices doesn't go with cuda_graphs: a graph has the lengths of"):
        pipeline_of(extras=[CudaGraphs(EmulatedGraphs())])


# ---------------------------------------------------------------- one failure


class Broken(Tokenwise):
    """Its output for token 7 is NaN in F of the second slice."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.shape[1] != 4 else y + torch.where(torch.arange(4) == 2, torch.nan, 0.0)[:, None]


def test_the_first_value_that_is_not_finite_is_found_in_its_slice():
    timetable = plan("zb_h1", 1, M, num_slices=3)
    x, target = torch.randn(ROWS, TIME, 4), torch.randint(4, (ROWS, TIME))
    with Pipeline({0: Broken(4, 4)}, timetable, counted, slice_bounds=BOUNDS) as pipeline:
        pipeline.step(x, target=target)
        found = find_non_finite(pipeline, x, target=target)
    assert "stage 0, microbatch 0.1" in str(found)
