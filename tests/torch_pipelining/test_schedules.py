"""torch's Schedule classes on zbpp: what torch's runtime and plain autograd compute."""

import copy
import gc
import warnings
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zbpp
from helpers.processes import open_things, run_ranks
from zbpp import torch_pipelining as door
from zbpp import torchtitan
from zbpp.models.layers import token_loss
from zbpp.schedule import Op
from zbpp.torch_pipelining.refusal import unknown_arguments

SIZE, ROWS, MICROBATCHES = 8, 16, 4
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.double()

    def forward(self, x, scale=1.0):
        return self.second(self.first(x).relu()) * scale + x


def loss_fn(output, target, weight=1.0):
    return weight * nn.functional.mse_loss(output, target)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, ROWS, SIZE, generator=generator, dtype=torch.float64)


def placed(name, num_ranks):
    """{rank: its stages} as torch's schedules place them."""
    if name in SINGLE:
        return {rank: [rank] for rank in range(num_ranks)}
    last = 2 * num_ranks - 1
    return {rank: [rank, last - rank if name in V else rank + num_ranks] for rank in range(num_ranks)}


def made(source, name, rank, num_ranks, blocks, wrap=lambda each: each, group=None, **options):
    """A schedule of `source` (torch's module or the door) over this rank's blocks."""
    count = num_ranks if name in SINGLE else 2 * num_ranks
    stages = [
        pipelining.PipelineStage(wrap(blocks[each]), each, count, torch.device("cpu"), group=group)
        for each in placed(name, num_ranks)[rank]
    ]
    kind = getattr(source, name)
    return kind(stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=loss_fn, **options), stages


def stepped(schedule, stages, x, y, method="step", **more):
    losses = []
    first = any(each.is_first for each in stages)
    last = any(each.is_last for each in stages)
    out = getattr(schedule, method)(
        *([x] if first else []), target=y if last else None, losses=losses, **more
    )
    return out, losses


def grads(blocks, mine):
    return {f"{each}.{name}": p.grad for each in mine for name, p in blocks[each].named_parameters()}


def compared(rank, name, num_ranks, options):
    """Two steps and an eval, on torch's runtime and through the door."""
    count = num_ranks if name in SINGLE else 2 * num_ranks
    results = []
    for source in (pipelining, door):
        blocks = [Block(each) for each in range(count)]
        schedule, stages = made(source, name, rank, num_ranks, blocks, **options)
        x, y = batch()
        x.requires_grad_()
        found = []
        for seed in range(2):
            out, losses = stepped(schedule, stages, x, y + seed)
            mine = placed(name, num_ranks)[rank]
            found.append((out, losses, {k: g.clone() for k, g in grads(blocks, mine).items()}, x.grad))
            x.grad = None
            for each in mine:
                blocks[each].zero_grad()
        if name not in V:  # torch's own runtime fails there
            found.append(stepped(schedule, stages, x.detach(), y, "eval"))
        results.append(found)
        if source is door:
            assert vars(schedule)["_zbpp_engine"].reason == ""
            assert isinstance(schedule, getattr(pipelining, name))
    return results


def assert_alike(theirs, ours):
    flat_theirs, spec = torch.utils._pytree.tree_flatten(theirs)
    flat_ours, same = torch.utils._pytree.tree_flatten(ours)
    assert spec == same
    for one, other in zip(flat_theirs, flat_ours, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other.detach(), one.detach(), rtol=1e-12, atol=1e-12)
        else:
            assert one == other


@pytest.mark.parametrize("name", [*SINGLE, *LOOPED, *V])
def test_a_schedule_has_torchs_losses_outputs_and_gradients(name):
    for theirs, ours in run_ranks(compared, 2, name, 2, {}):
        assert_alike(theirs, ours)


def test_gradients_that_are_not_scaled_and_a_target_for_three_ranks():
    for theirs, ours in run_ranks(compared, 3, "Schedule1F1B", 3, {"scale_grads": False}):
        assert_alike(theirs, ours)


def evaluated(rank):
    schedule, stages = made(door, "ScheduleZBVZeroBubble", rank, 2, [Block(each) for each in range(4)])
    return stepped(schedule, stages, *batch(), "eval")


def test_eval_on_a_v_where_torchs_own_fails():
    x, y = batch()
    blocks = [Block(each) for each in range(4)]
    (out, losses), _ = run_ranks(evaluated, 2)
    assert_alike(losses, plain_losses(blocks, x, y))
    assert_alike(out, nn.Sequential(*blocks)(x))


def of_many_kinds(rank):
    """loss_kwargs, keywords of a stage, no outputs, a replaced submodule, a plan of zbpp's, install."""
    told = {}
    x, y = batch()
    name = "ScheduleInterleavedZeroBubble"
    blocks = [Block(each) for each in range(4)]
    schedule, stages = made(door, name, rank, 2, blocks)
    out, losses = stepped(schedule, stages, x, y, loss_kwargs={"weight": 3.0}, return_outputs=False)
    told["weighted"], told["no outputs"] = losses, out
    told["keyword"] = stepped(schedule, stages, x, y, scale=2.0)[1]
    stages[0].submod = Block(10 + rank)
    told["replaced"] = stepped(schedule, stages, x, y)[1]
    door.use_plan(schedule, "zb_auto", placement="looped", time_limit=0.1)
    told["planned"] = stepped(schedule, stages, x, y)[1]
    door.install()
    theirs, stages = made(pipelining, name, rank, 2, [Block(each) for each in range(4)])
    told["installed"] = stepped(theirs, stages, x, y)[1]
    told["is on zbpp"] = vars(theirs)["_zbpp_engine"].reason
    door.uninstall()
    assert torchs.PipelineScheduleMulti._step_microbatches.__module__ == torchs.__name__
    return told


def plain_losses(blocks, x, y, weight=1.0, scale=1.0):
    found = []
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        for each in blocks:
            part = each(part, scale)
        found.append(loss_fn(part, target, weight).detach())
    return found


def test_what_torchs_users_do_with_a_schedule():
    first, told = run_ranks(of_many_kinds, 2)
    x, y = batch()
    blocks = [Block(each) for each in range(4)]
    assert first["weighted"] == []
    assert told["no outputs"] is None
    assert_alike(told["weighted"], plain_losses(blocks, x, y, weight=3.0))
    assert_alike(told["keyword"], plain_losses(blocks, x, y, scale=2.0))
    replaced = [Block(10), Block(11), Block(2), Block(3)]
    assert_alike(told["replaced"], plain_losses(replaced, x, y))
    assert_alike(told["planned"], plain_losses(replaced, x, y))
    assert_alike(told["installed"], plain_losses(blocks, x, y))
    assert told["is on zbpp"] == ""


def parity_of(schedule, stages, pair):
    """What zbpp.parity says of two steps of a schedule, and what has run on torch's runtime."""
    report = zbpp.parity(
        lambda pair: stepped(schedule, stages, *pair)[1],
        stages,
        whole=lambda: nn.Sequential(*map(Block, range(stages[0].num_stages))),
        batch=tuple(pair),
        loss_fn=loss_fn,
        num_microbatches=MICROBATCHES,
        names=lambda stage, name: f"{stage}.{name}",
    )
    return report.verdict, door.fallbacks


def with_data_parallel(rank, kind, name):
    """Two ranks of a pipeline times two processes with different rows. Groups of the user's own."""
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    rows = [dist.new_group(each) for each in ([0, 2], [1, 3])]
    pipeline, data = rows[rank % 2], pairs[rank // 2]
    mesh = dist.device_mesh.DeviceMesh.from_group(data, "cpu", mesh_dim_names=("dp",))

    def wrap(block):
        if kind == "ddp":
            return DistributedDataParallel(block, process_group=data)
        return fully_shard(block, mesh=mesh)

    blocks = [Block(each) for each in range(4)]
    schedule, stages = made(door, name, rank // 2, 2, blocks, wrap=wrap, group=pipeline)
    return parity_of(schedule, stages, batch(rank % 2))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ScheduleInterleavedZeroBubble", "ddp"),
        ("ScheduleZBVZeroBubble", "fully_shard"),
        pytest.param("ScheduleInterleavedZeroBubble", "fully_shard", marks=pytest.mark.nightly),
        pytest.param("ScheduleZBVZeroBubble", "ddp", marks=pytest.mark.nightly),
    ],
)
def test_data_parallel_stages_have_the_mean_of_all_rows_gradients(kind, name):
    """torch skips this for interleaved zero bubble (pytorch #144530)."""
    for verdict, listed in run_ranks(with_data_parallel, 4, kind, name, fresh=True):
        assert verdict.startswith("EQUAL")
        assert listed == []


def with_tensor_parallel(rank):
    """One rank of a pipeline, two data-parallel times two tensor-parallel processes."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))

    def wrap(block):
        parallelize_module(block, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        return fully_shard(block, mesh=mesh["dp"])

    name, blocks = "ScheduleInterleavedZeroBubble", [Block(each) for each in range(2)]
    schedule, stages = made(door, name, 0, 1, blocks, wrap, mesh["pp"].get_group())
    return parity_of(schedule, stages, batch(mesh["dp"].get_local_rank()))


def test_fully_shard_around_tensor_parallel_stages():
    for verdict, listed in run_ranks(with_tensor_parallel, 4, fresh=True):
        assert verdict.startswith("EQUAL")
        assert listed == []


def with_a_language_model(rank):
    """A step whose loss overwrites logits where nobody else reads them."""
    torch.manual_seed(0)
    heads = [nn.Linear(SIZE, SIZE).double() for _ in range(2)]
    stage = pipelining.PipelineStage(heads[rank], rank, 2, torch.device("cpu"))
    schedule = door.Schedule1F1B(stage, MICROBATCHES, loss_fn=token_loss)
    x = torch.randn(ROWS, 3, SIZE, dtype=torch.float64)
    target = torch.randint(SIZE, (ROWS, 3))
    out, _ = stepped(schedule, [stage], x, target)
    assert vars(schedule)["_zbpp_engine"].reason == ""
    return out, heads[1](heads[0](x)).detach()


def test_outputs_are_those_of_the_model_though_a_loss_overwrites_logits():
    out, expected = run_ranks(with_a_language_model, 2)[1]
    assert_alike(expected, out)


class Told(Block):
    """Takes the keywords that a schedule adds to each forward, and keeps those of real forwards."""

    def __init__(self, number):
        super().__init__(number)
        self.told = []

    def forward(self, x, pipeline_stage_info=None):
        info = pipeline_stage_info
        if info is not None and not info.is_metadata_inference:
            self.told.append((info.stage_index, info.microbatch_index))
        return super().forward(x)


class Newer(door.ScheduleInterleavedZeroBubble):
    """Takes arguments that torch 2.13 has not. The class counts as torch's by its module."""

    __module__ = torchs.__name__

    def __init__(self, *args, pass_pipeline_stage_info=False, kept=1, not_kept=None, **more):
        super().__init__(*args, **more)
        self._pass_pipeline_stage_info, self._kept = pass_pipeline_stage_info, kept
        if not_kept is None:
            self.not_kept = None

    def _stage_forward_kwargs(self, stage, microbatch_index, kwargs):
        if not self._pass_pipeline_stage_info:
            return kwargs
        info = SimpleNamespace(
            stage_index=stage.stage_index, microbatch_index=microbatch_index, is_metadata_inference=False
        )
        return kwargs | {"pipeline_stage_info": info}


def told_of_forwards(rank):
    """What forwards are told, with the argument and without, in two steps and an eval; the last losses."""
    told = []
    name = "ScheduleInterleavedZeroBubble"
    torchs_own = "pass_pipeline_stage_info" in signature(getattr(pipelining, name)).parameters
    source = door if torchs_own else SimpleNamespace(**{name: Newer})
    for options in ({"pass_pipeline_stage_info": True}, {}):
        blocks = [Told(each) for each in range(4)]
        schedule, stages = made(source, name, rank, 2, blocks, **options)
        for method in ("step", "step", "eval"):
            _, losses = stepped(schedule, stages, *batch(), method)
        assert vars(schedule)["_zbpp_engine"].reason == ""
        told.append([blocks[each].told for each in placed(name, 2)[rank]])
    return told, losses


def test_a_forward_is_told_its_stage_and_its_microbatch_if_the_schedule_says_so():
    blocks = [Block(each) for each in range(4)]
    for rank, ((told, untold), losses) in enumerate(run_ranks(told_of_forwards, 2)):
        expected = [[(stage, each) for each in range(MICROBATCHES)] * 3 for stage in (rank, rank + 2)]
        assert told == expected
        assert untold == [[], []]
        assert_alike(losses, plain_losses(blocks, *batch()) if rank else [])


def with_newer_arguments(rank):
    """The reasons for torch's runtime of schedules with arguments that zbpp does not know."""
    told = []
    source = SimpleNamespace(ScheduleInterleavedZeroBubble=Newer)
    for options in ({}, {"kept": 1}, {"kept": 2}, {"not_kept": 3}, {"kept": 0, "not_kept": 0}):
        blocks = [Block(each) for each in range(4)]
        schedule, stages = made(source, "ScheduleInterleavedZeroBubble", rank, 2, blocks, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, losses = stepped(schedule, stages, *batch())
        told.append(vars(schedule)["_zbpp_engine"].reason)
    return told, losses


def test_an_argument_that_zbpp_does_not_know_is_named():
    for told, _ in run_ranks(with_newer_arguments, 2, fresh=True):
        assert told[:2] == ["", ""]
        assert told[2:] == [
            f"this torch's Newer has {names}, which zbpp does not know"
            for names in ("kept", "not_kept", "kept, not_kept")
        ]


@pytest.mark.parametrize("name", [*SINGLE, *LOOPED, *V])
def test_each_argument_of_this_torchs_schedules_is_known(name):
    """By their signatures, as if no argument had its default value."""
    kind = getattr(pipelining, name)
    assert unknown_arguments(kind.__new__(kind)) == []


def without_target(rank):
    schedule, stages = made(door, "Schedule1F1B", rank, 2, [Block(0), Block(1)])
    x, y = batch()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        stepped(schedule, stages, x, None)
    _, losses = stepped(schedule, stages, x, y)  # made anew, on both ranks
    return str(caught.value), losses


def test_a_missing_target_is_an_error_on_all_ranks_and_the_next_step_runs():
    (other, _), (told, losses) = run_ranks(without_target, 2)
    assert "the last stage needs target=" in told
    assert "Connection closed" in other or "rank 1" in other
    assert len(losses) == MICROBATCHES


def on_torchs_runtime(rank):
    blocks = [Block(each) for each in range(4)]
    schedule, stages = made(door, "ScheduleInterleaved1F1B", rank, 2, blocks)
    if rank == 0:
        schedule.register_custom_function(torchs.OVERLAP_F_B, lambda action, ctx: None)
    x, y = batch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        losses = [stepped(schedule, stages, x, y)[1] for _ in range(2)][1]
    return (
        [str(each.message) for each in warned if "torch's own" in str(each.message)],
        door.fallbacks,
        losses,
    )


def test_what_only_torch_can_run_runs_there_and_says_so_once():
    x, y = batch()
    expected = plain_losses([Block(each) for each in range(4)], x, y)
    for rank, (warned, listed, losses) in enumerate(run_ranks(on_torchs_runtime, 2, fresh=True)):
        reason = "it has custom functions, which call torch's stages"
        assert warned == [f"ScheduleInterleaved1F1B runs on torch's own runtime: {reason}"]
        assert listed == [reason]
        assert_alike(losses, expected if rank else [])


def test_a_plan_or_an_option_that_does_not_exist_is_refused_where_it_is_named():
    with pytest.raises(ValueError, match="unknown schedule 'zb_outo'.*did you mean zb_auto"):
        door.use_plan(SimpleNamespace(), "zb_outo")
    with pytest.raises(TypeError, match="unexpected keyword argument 'plcement'"):
        door.use_plan(SimpleNamespace(), "zb_auto", plcement="v")


def dropped(rank, by_plan):
    """Pipelines that are given up: with their schedule, or for another plan of the same schedule."""
    x, y = batch()
    counts, kept = [], made(door, "Schedule1F1B", rank, 2, [Block(0), Block(1)])
    for _ in range(4):
        schedule, stages = kept if by_plan else made(door, "Schedule1F1B", rank, 2, [Block(0), Block(1)])
        if by_plan:
            door.use_plan(schedule, "zb_h1")
        stepped(schedule, stages, x, y)
        del schedule, stages
        gc.collect()
        dist.barrier()
        counts.append(open_things())
    return counts


@pytest.mark.parametrize("by_plan", [False, True])
def test_a_pipeline_that_is_given_up_leaves_no_groups_and_no_sockets(by_plan):
    for counts in run_ranks(dropped, 2, by_plan):
        (groups, sockets), (groups_later, sockets_later) = counts[1], counts[3]
        assert groups_later == groups
        assert sockets_later < sockets + 5  # sockets close late; a pipeline has ten


def test_names_are_torchs_names():
    assert all(hasattr(door, name) for name in pipelining.__all__)
    assert not hasattr(door, "no_name_of_torchs")
    assert door.get_schedule_class("zbvzerobubble") is door.ScheduleZBVZeroBubble
    copied = copy.copy(door.fallbacks)
    assert copied == []


class Chain(nn.Module):
    """Two blocks that torch traces. skips: the second one also takes the input of the first."""

    def __init__(self, skips):
        super().__init__()
        self.blocks = nn.ModuleList(Block(each) for each in range(3))
        self.skips = skips

    def forward(self, x):
        y = self.blocks[0](x)
        pipelining.pipe_split()
        z = self.blocks[1](y) * 2.0
        pipelining.pipe_split()
        return self.blocks[2](z + y if self.skips else z)


def traced(rank, skips):
    torch.manual_seed(0)
    x, y = batch()
    chain = Chain(skips)
    pipe = pipelining.pipeline(chain, mb_args=(x[: ROWS // MICROBATCHES],))
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = door.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch's runtime has no backward of skip connections.
        _, losses = stepped(schedule, [stage], x, y, "eval" if skips else "step")
    return vars(schedule)["_zbpp_engine"].reason, losses


@pytest.mark.parametrize("skips", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_that_torch_has_traced(skips):
    told = run_ranks(traced, 3, skips)
    chain, (x, y) = Chain(skips), batch()
    expected = [
        loss_fn(chain(part), target).detach()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    ]
    assert_alike(told[-1][1], expected)
    reason = "stages that are no neighbours pass tensors to each other" if skips else ""
    assert {each for each, _ in told} == {reason}


class Lists(Block):
    """Returns and takes a list of two tensors and a None."""

    def forward(self, x, y=None, nothing=None):
        out = super().forward(x if y is None else x + y)
        return [out, out * 0.5, None]


class End(Block):
    def forward(self, x, y, nothing):
        assert nothing is None
        return super().forward(x + y)


def of_odd_kinds(rank):
    """Lists and None between stages; a dw_builder; microbatches of several sizes."""
    x, y = batch()
    stage = pipelining.PipelineStage(
        [Lists(0), End(1)][rank], rank, 2, torch.device("cpu"), dw_builder=lambda: lambda: calls.append(1)
    )
    calls = []
    schedule = door.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    _, losses = stepped(schedule, [stage], x, y)
    sizes = [2, 6, 4, 4]
    schedule.dynamic_shapes = True
    vars(schedule).pop("_zbpp_engine")
    parts = [x.split(sizes), y.split(sizes)]
    given = [(each,) for each in parts[0]] if rank == 0 else None
    schedule._step_microbatches(given, None, list(parts[1]), uneven := [])
    return losses, len(calls), uneven


def test_lists_nones_a_dw_builder_and_microbatches_of_several_sizes():
    first, last = run_ranks(of_odd_kinds, 2)
    x, y = batch()
    head, end = Lists(0), End(1)
    for sizes, losses in ((4, last[0]), ([2, 6, 4, 4], last[2])):
        expected = [
            loss_fn(end(*head(part)), target).detach()
            for part, target in zip(x.split(sizes), y.split(sizes), strict=True)
        ]
        assert_alike(losses, expected)
    assert first[1] == last[1] == 2 * MICROBATCHES


class Expert(Block):
    """A block with a part that is sharded by itself."""

    def __init__(self, number):
        super().__init__(number)
        self.expert = Block(number + 100)

    def forward(self, x):
        return super().forward(x) + self.expert(x)


def with_experts(rank, expert_mesh):
    """Stages on the user's mesh, their experts on a second one: of the same processes, or of this one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    other = init_device_mesh("cpu", expert_mesh, mesh_dim_names=("pp", "edp", "ep"))
    name, pp = "ScheduleInterleavedZeroBubble", mesh["pp"].get_group()

    def wrap(block):
        fully_shard(block.expert, mesh=other["edp"])
        return fully_shard(block, mesh=mesh["dp"])

    blocks = [Expert(each) for each in range(4)]
    schedule, stages = made(door, name, dist.get_rank(pp), 2, blocks, wrap, pp)
    x, y = batch(mesh["dp"].get_local_rank())
    stepped(schedule, stages, x, y)
    found = grads(blocks, placed(name, 2)[dist.get_rank(pp)])
    return {key: grad.full_tensor() for key, grad in found.items()}, door.fallbacks


def grads_of(seed, blocks):
    """Plain autograd's gradients for one process's batch."""
    for x, y in zip(*(each.chunk(MICROBATCHES) for each in batch(seed)), strict=True):
        (loss_fn(nn.Sequential(*blocks)(x), y) / MICROBATCHES).backward()
    return grads(blocks, range(len(blocks)))


@pytest.mark.parametrize("expert_mesh", [(2, 2, 1), (2, 1, 2)], ids=["same processes", "alone"])
def test_experts_on_a_second_mesh(expert_mesh):
    plain = [grads_of(seed, [Expert(each) for each in range(4)]) for seed in range(2)]
    for rank, (found, listed) in enumerate(run_ranks(with_experts, 4, expert_mesh, fresh=True)):
        assert listed == []
        for key, grad in found.items():
            is_own = ".expert." in key and expert_mesh[1] == 1  # FSDP2 averages over the expert's mesh
            expected = plain[rank % 2][key] if is_own else (plain[0][key] + plain[1][key]) / 2
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def on_one_shard(rank):
    """FSDP2 holds the stages on meshes of one process each, as torchtitan does for its mixed precision."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    blocks = [Block(each) for each in range(4)]
    name = "ScheduleInterleavedZeroBubble"
    schedule, stages = made(
        door, name, rank, 2, blocks, lambda block: fully_shard(block, mesh=mesh["dp"]), mesh["pp"].get_group()
    )
    return parity_of(schedule, stages, batch())


def test_stages_on_a_mesh_of_one_process_run_here():
    for verdict, listed in run_ranks(on_one_shard, 2, fresh=True):
        assert verdict.startswith("EQUAL")
        assert listed == []


@dataclass
class Spec:
    """What zbpp.torchtitan reads of torchtitan's ModelSpec."""

    name: str
    pipelining_fn: Any


@dataclass
class Config:
    """What zbpp.torchtitan reads of torchtitan's Trainer.Config."""

    model_spec: Spec


def through_torchtitan(rank):
    def pipelining_fn(blocks):
        schedule, stages = made(pipelining, "ScheduleInterleaved1F1B", rank, 2, blocks)
        return schedule, stages, rank == 0, rank == 1

    blocks = [Block(each) for each in range(4)]
    config = torchtitan.on_zbpp(Config(Spec("llama3", pipelining_fn)), "interleaved_zb")
    schedule, stages, *_ = config.model_spec.pipelining_fn(blocks)
    losses = stepped(schedule, stages, *batch())[1]
    engine = vars(schedule)["_zbpp_engine"]
    has_w = any(action.op is Op.W for row in engine._pipeline.timetable.rows for action in row)
    return losses, has_w, isinstance(schedule, pipelining.ScheduleInterleaved1F1B)


def test_a_config_of_torchtitan_gets_a_plan_of_zbpp():
    expected = plain_losses([Block(each) for each in range(4)], *batch())
    for rank, (losses, has_w, is_torchs) in enumerate(run_ranks(through_torchtitan, 2, fresh=True)):
        assert has_w
        assert is_torchs
        assert_alike(losses, expected if rank else [])
    with pytest.raises(ValueError, match="torchtitan has no pipeline for flux"):
        torchtitan.on_zbpp(Config(Spec("flux", None)))


def test_a_config_of_any_of_torchtitans_models_is_found(tmp_path, monkeypatch):
    """One model's registry needs a package that is not here; a folder has none."""
    made = "def qwen3_debug(): return Config(Spec('qwen3', len))"
    registries = {
        "common": None,
        "flux": "import a_package_that_is_not_here",
        "llama3": "def llama3_debug(): raise AssertionError",
        "qwen3": f"from {__name__} import Config, Spec\n{made}",
    }
    for name, text in registries.items():
        folder = tmp_path / "torchtitan" / "models" / name
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "config_registry.py").write_text(text)
            (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert torchtitan.qwen3_debug().model_spec.name == "qwen3"
    with pytest.raises(AttributeError, match="no model of torchtitan's has a config qwen4"):
        torchtitan.qwen4  # noqa: B018  # its lookup raises
