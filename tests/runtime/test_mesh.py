"""Pipelines in a mesh: replicas get one gradient, that of one process over all their data."""

from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from helpers.processes import run_ranks
from helpers.toy_lm import ToyLm, batch, rows_of
from zbpp import Pipeline, Timetable, clip_grad_norm_, make_mesh, plan
from zbpp.features.reductions import reductions
from zbpp.features.reductions.reduce import can_average
from zbpp.runtime.processes.mesh import num_pipeline_ranks

M = 4
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "interleaved_zb")


def alone(is_tied, steps=2):
    """Losses, gradients (of two steps, added up), and their norm in one process."""
    model = ToyLm("object" if is_tied else "")
    whole = model.build_stage(0, 1)
    losses = []
    for step in range(steps):
        inputs, target = batch(step)
        loss = model.loss(whole(inputs), target)
        loss.backward()
        losses.append(loss.item())
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    return losses, grads, torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()


KINDS = {"untied": ToyLm, "tied": partial(ToyLm, "object"), "copies": partial(ToyLm, "copies")}
CASES = [*product(SCHEDULES, KINDS)]


def in_mesh(rank, degrees):
    """Per case what `alone` returns, as this process has it."""
    found = {}
    for case in CASES:
        schedule, kind = case
        model, mesh = KINDS[kind](), make_mesh(**degrees)
        with Pipeline(model, schedule, num_microbatches=M // 2, mesh=mesh) as pipeline:
            losses = []
            for step in range(2):
                inputs, target = rows_of(pipeline.place, *batch(step))
                mean = pipeline.step(inputs, target=target)
                losses.append(float(sum(mean) / len(mean)) if mean else None)
            norm = clip_grad_norm_(pipeline, 1e9).item()
            grads = {name: p.grad for name, p in pipeline.named_parameters()}
            found[case] = losses, grads, norm, pipeline.place.data_part
    return found


@pytest.fixture(scope="module")
def everyone():
    """What each process of two replicas has found. All cases run in the same processes."""
    return run_ranks(in_mesh, 4, {"replicate": 2})


def test_replicas_get_the_losses_and_gradients_of_one_process(everyone):
    """Two steps without zero_grad in between: gradients add up, those of copies, too."""
    for case in CASES:
        losses, grads, norm = alone(case[1] != "untied")
        parts = {}
        for found in everyone:
            some_losses, some_grads, some_norm, part = found[case]
            assert some_norm == pytest.approx(norm, rel=1e-12)
            parts[part] = [*parts.get(part, []), *(each for each in some_losses if each is not None)]
            for name, grad in some_grads.items():
                scale = grads[name].abs().max().item()
                torch.testing.assert_close(
                    grad, grads[name], rtol=0, atol=1e-12 * scale, msg=f"{case} {name}"
                )
        means = [sum(each) / len(parts) for each in zip(*parts.values(), strict=True)]
        assert means == pytest.approx(losses, rel=1e-12)
        # Replicas are equal to the last bit.
        by_name = {}
        for found in everyone:
            for name, grad in found[case][1].items():
                assert torch.equal(by_name.setdefault(name, grad), grad), name


def test_degrees_have_to_fit_the_number_of_processes():
    assert num_pipeline_ranks(8, replicate=2, shard=1, tensor=2) == 2
    with pytest.raises(
        ValueError, match="8 processes can't be divided into replicate=3 x shard=1 = 3: start"
    ):
        num_pipeline_ranks(8, replicate=3, shard=1)
    with pytest.raises(ValueError, match="replicate=0: write a number of processes, 1 or more"):
        num_pipeline_ranks(8, replicate=0)


class Statistics(nn.Module):
    """Changes buffers in three ways: by BatchNorm's kernel, in place as the data say, by assignment."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("counts", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("own", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.own += x.detach().sum()
        self.counts[int(x.sum() > 0)] += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm(x)


def small(part):
    torch.manual_seed(part)
    return nn.Sequential(nn.Linear(4, 4), Statistics())


def two_replicas(rank, what):
    """The state after three steps, or what is raised in the second one."""
    stage = small(rank)
    with patch.object(reductions, "can_average", (lambda *_: False) if what == "summed" else can_average):
        pipeline = Pipeline({0: stage}, plan("1f1b", 1, 2), F.mse_loss, mesh=make_mesh(replicate=2))
    try:
        for step in range(3):
            torch.manual_seed(10 * rank + step)
            x = torch.randn(8, 4)
            if step and what == "added":
                stage.add_module("adapter", nn.Linear(4, 4))
            pipeline.step(x, target=x)
        gradients = {f"gradient of {name}": each.grad for name, each in pipeline.named_parameters()}
        return pipeline.state_dict() | gradients | {"own": stage[1].own.clone()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if not pipeline.is_over:
            pipeline.end("test")


def buffers_with_ddp(rank):
    """The buffers after the three steps of `two_replicas`, by torch, with two microbatches each."""
    stage = DistributedDataParallel(small(rank))
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        first, second = torch.randn(8, 4).chunk(2)
        with stage.no_sync():
            F.mse_loss(stage(first), first).backward()
        F.mse_loss(stage(second), second).backward()
    return {name: value.clone() for name, value in stage.module.named_buffers() if name != "1.own"}


def sparse_on_one(rank):
    """What a replica says if one of them has an embedding with sparse gradients."""
    stage = small(rank).append(nn.Embedding(4, 4, sparse=rank == 1))
    try:
        Pipeline({0: stage}, plan("1f1b", 1, 2), F.mse_loss, mesh=make_mesh(replicate=2))
    except ValueError as error:
        return str(error)


def shards_on_a_gpu(rank):
    """What a process says of a stage on a GPU in a mesh of CPUs: FSDP2 would move it there without a word."""
    with FakeTensorMode():
        stage = nn.ParameterList([nn.Parameter(torch.empty(4, device="cuda"))])
    try:
        Pipeline({0: stage}, plan("1f1b", 1, 2), F.mse_loss, mesh=make_mesh(shard=2))
    except ValueError as error:
        return str(error)


def all_of_two_replicas(rank):
    return {what: two_replicas(rank, what) for what in ("fine", "summed", "added")} | {
        "buffers with ddp": buffers_with_ddp(rank),
        "sparse": sparse_on_one(rank),
        "on a GPU": shards_on_a_gpu(rank),
    }


def test_replicas_have_one_gradient_and_buffers_as_with_ddp_and_what_would_part_them_is_refused():
    """A step begins with the first replica's buffers, and each replica's rows change its own."""
    first, second = run_ranks(all_of_two_replicas, 2)
    assert first["fine"].pop("own") != second["fine"].pop("own")
    buffers = [
        {name: each["fine"].pop(name) for name in each["buffers with ddp"]} for each in (first, second)
    ]
    assert not torch.equal(buffers[0]["1.mean"], buffers[1]["1.mean"])
    for mine, each in zip(buffers, (first, second), strict=True):
        torch.testing.assert_close(mine, each["buffers with ddp"])
        assert mine["1.counts"].sum() == 6
        assert mine["1.norm.num_batches_tracked"] == 6
    for name, value in first["fine"].items():
        assert torch.equal(value, first["summed"][name]), name  # without ReduceOp.AVG
        assert torch.equal(value, second["fine"][name]), name
    for found in (first, second):
        assert "2 of stage 0 makes sparse gradients" in found["sparse"]
        assert 'write make_mesh(..., device_type="cuda")' in found["on a GPU"]
        assert "parameters were added or replaced after the Pipeline was made" in found["added"]


def tied_in_a_v(rank):
    """Rank 0 of a V completes its first stage before its last one, which has the same weight."""
    timetable = Timetable.parse(
        "0F0 0F1 3F0 3B0 3F1 0B0 3B1 0B1 0W0 0W1 3W0 3W1\n1F0 1F1 2F0 2F1 2B0 1B0 2B1 1B1 2W0 1W0 2W1 1W1"
    )
    model = ToyLm("object")
    with Pipeline(model, timetable, mesh=make_mesh(replicate=2)) as pipeline:
        inputs, target = rows_of(pipeline.place, *batch(0))
        pipeline.step(inputs, target=target)
        return {name: p.grad for name, p in pipeline.named_parameters()}


def test_a_parameter_of_two_stages_is_reduced_after_the_last_w_of_both():
    _, grads, _ = alone(is_tied=True, steps=1)
    for found in run_ranks(tied_in_a_v, 4):
        for name, grad in found.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-12, msg=name)
