"""Kahan sums, and the norm over all stages against torch's own on the whole model."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import Pipeline, make_mesh, plan
from zbpp.config import OptimizerConfig
from zbpp.data import Data, RandomRegression
from zbpp.features.squares import squares_of
from zbpp.job.world import fake_world
from zbpp.models.gpt import Gpt
from zbpp.run.optimizer import optimizer_of
from zbpp.runtime.processes.dtensors import local_of
from zbpp.training.optim import host_threads
from zbpp.training.optim.host_threads import update_on_all_cores
from zbpp.training.optim.optimizer import OPTIMIZERS
from zbpp.training.trainer import Trainer

VOCAB, TIME, BATCH = 17, 6, 8


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_dtensors_beside_plain_parameters_are_updated_where_torch_updates_a_group_in_one_call(
    monkeypatch, name
):
    """As it does on a GPU by default."""
    adam = sys.modules["torch.optim.adam"]  # torch.optim.adam is a function
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    options = {"learning_rate": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    found = []
    for is_split in (False, True):
        with fake_world(1):
            mesh = init_device_mesh("cpu", (1,))
            parameters = [nn.Parameter(torch.full((4,), number)) for number in (1.0, 2.0)]
            if is_split:
                parameters[0] = nn.Parameter(DTensor.from_local(parameters[0].data, mesh, [Shard(0)]))
            for each in parameters:
                each.grad = torch.ones_like(each)
            OPTIMIZERS[name](parameters, **options).step()
            found.append([local_of(each.detach()) for each in parameters])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def ways_to_update(rank):
    """The option foreach of the groups with parameters; rank 1 has a DTensor beside a plain weight."""
    mesh, stage = make_mesh(tensor=1), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank == 1:
        weight = stage[0].weight.data
        stage[0].weight = nn.Parameter(DTensor.from_local(weight, mesh["tensor"], [Replicate()]))
    with Pipeline({rank: stage}, plan("zb_h1", 2, 2), nn.functional.mse_loss, mesh=mesh) as pipeline:
        groups = optimizer_of(pipeline, OptimizerConfig()).param_groups
        return [group["foreach"] for group in groups if group["params"]]


def test_all_ranks_update_a_group_alike():
    """Copies of a tied weight would drift apart if a rank with DTensors updated its copy by other kernels."""
    assert run_ranks(ways_to_update, 2) == [[False, None]] * 2


def exact(gradient):
    """The sum of squares, rounded once."""
    return math.fsum(abs(number) ** 2 for number in gradient.flatten().tolist())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_squared_norms_are_taken_in_float64(dtype):
    torch.manual_seed(0)
    gradients = [
        torch.full((1000,), 1e-4, dtype=dtype),
        torch.randn(30, 20, dtype=dtype).t(),
        torch.empty(0, dtype=dtype),
        torch.randn(4, 5, 6, 7, dtype=dtype).to(memory_format=torch.channels_last),
        torch.tensor(3.0, dtype=dtype),
    ]
    found = squares_of(gradients, CPU)
    assert found.tolist() == pytest.approx([*map(exact, gradients)], rel=1e-13)
    assert squares_of([torch.full((2,), 1e30)], CPU).item() == pytest.approx(2e60)  # overflows in float32


def test_a_large_gradient_is_cast_in_pieces_and_a_small_one_as_before():
    """A gradient of 16 bits was cast to float64 as a whole: four times its bytes."""
    torch.manual_seed(0)
    large, small = torch.randn(3 * 2**22).bfloat16(), torch.randn(300)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        squares = squares_of([large, small], CPU)
    assert squares[0].item() == pytest.approx(large.double().square().sum().item(), rel=1e-13)
    assert squares[1] == torch.linalg.vector_norm(small, dtype=torch.float64).square()  # to the last bit
    assert max(each.cpu_memory_usage for each in profiled.events()) <= 8 * 2**22


class Tokens(RandomRegression):
    """Random tokens instead of random numbers."""

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (BATCH, TIME + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


def tokens():
    source = Tokens(in_features=1, out_features=1, batch_size=BATCH, seed=0)
    return Data(source, source, 1, BATCH * TIME, fingerprint="")


def gpt():
    return Gpt(vocab_size=VOCAB, num_layers=4, hidden_size=8, num_heads=2, sequence_length=TIME)


@float64()
def clip(rank, schedule, num_ranks, clip_norm):
    """(norm, clipped gradients of this rank) of one training step."""
    model, timetable = gpt(), plan(schedule, num_ranks, 4)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    trainer = Trainer(
        pipeline=Pipeline(stages, timetable, model.loss),
        optimizer=torch.optim.SGD(parameters.values(), lr=0.0),
        data=tokens(),
        learning_rate=lambda step: 1.0,
        clip_norm=clip_norm,
    )
    (metrics,) = trainer.run(1)
    return metrics["grad_norm"], {name: p.grad for name, p in parameters.items()}


@float64()
def plain_clip(clip_norm):
    """What torch's clip_grad_norm_ makes of the whole model's gradients."""
    model = gpt()
    module = model.build_stage(0, 1)
    inputs, target = tokens().train.batch(0)
    model.loss(module(inputs), target).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
    return norm.item(), {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 1), ("zb_v", 1), ("zb_h1", 2), ("1f1b", 4)])
def test_the_norm_over_all_stages_is_torchs_of_the_whole_model_whatever_the_cut(schedule, num_ranks):
    """Clipping too, by torch's formula."""
    clip_norm = 0.1
    results = run_ranks(clip, num_ranks, schedule, num_ranks, clip_norm)
    norms = {norm for norm, _ in results}
    expected_norm, expected = plain_clip(clip_norm)
    assert expected_norm > clip_norm
    assert norms == {clip(0, "gpipe", 1, clip_norm)[0]}  # to the last bit
    assert norms.pop() == pytest.approx(expected_norm, rel=1e-12)
    found = {name: grad for _, grads in results for name, grad in grads.items()}
    assert found.keys() == expected.keys()
    floor = 1e-6 * max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-11, atol=1e-6 * floor, msg=name)


def updated(optimizer_class, num_threads, monkeypatch=None, **options):
    """Weights after three updates, and how many threads torch had within them."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(100_003, dtype=each)) for each in (torch.float32, torch.bfloat16)]
    gradients = [torch.randn_like(each) for each in weights]
    optimizer, found = optimizer_class(weights, lr=0.01, **options), []
    if num_threads > 1:
        monkeypatch.setattr(host_threads, "cores_of_process", lambda: num_threads)
        update_on_all_cores(optimizer)
    optimizer.register_step_pre_hook(lambda *_: found.append(torch.get_num_threads()))
    for _ in range(3):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    assert torch.get_num_threads() == 1
    return weights, found


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_weights_on_the_host_are_updated_by_more_threads_to_the_same_bits(monkeypatch, optimizer_class):
    torch.set_num_threads(1)
    expected, _ = updated(optimizer_class, 1)
    weights, threads = updated(optimizer_class, 3, monkeypatch)
    assert threads == [3, 3, 3]
    assert all(map(torch.equal, weights, expected))


def test_an_optimizer_whose_rounding_depends_on_threads_keeps_one(monkeypatch):
    torch.set_num_threads(1)
    assert updated(torch.optim.SGD, 3, monkeypatch, momentum=0.9)[1] == [1, 1, 1]
