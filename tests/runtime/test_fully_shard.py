"""Stages that FSDP2 shards train as one process trains the whole model over all data."""

import functools
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbpp
from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from helpers.toy_lm import HIDDEN, ROWS, ToyLm, batch, rows_of
from zbpp import Pipeline, Timetable, checkpoint, clip_grad_norm_, make_mesh
from zbpp.autograd import recompute
from zbpp.runtime import CommunicationError

M = 2


KINDS = {
    "untied": ToyLm,
    "tied": functools.partial(ToyLm, "object"),
    "copies": functools.partial(ToyLm, "copies"),
}


def full(named):
    """Whole plain tensors: of sharded ones, what all shards together have. Collective."""
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named}


def train(parameters, step_of, clip):
    """Two steps of AdamW with clipping, then two whose gradients add up. Returns losses and norms."""
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(4):
        losses.append(step_of(step))
        if step < 2:
            norms.append(float(clip(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    norms.append(float(clip(1e9)))
    return losses, norms


def alone(kind):
    """Losses, norms, then gradients and weights after `train` in one process."""
    model = KINDS[kind]()
    whole = model.build_stage(0, 1)

    def step(number):
        inputs, target = batch(number)
        loss = model.loss(whole(inputs), target)
        loss.backward()
        return loss.item()

    def clip(most):
        return torch.nn.utils.clip_grad_norm_(whole.parameters(), most)

    losses, norms = train(whole.parameters, step, clip)
    named = [*whole.named_parameters(remove_duplicate=False)]
    return losses, norms, {name: p.grad for name, p in named}, {name: p.detach() for name, p in named}


def in_mesh(rank, degrees, cases):
    """Per case (schedule, kind, reshard) what `alone` returns, as this process has it."""
    found = {}
    for case in cases:
        schedule, kind, reshard = case
        mesh = make_mesh(**degrees)
        model = KINDS[kind]()
        with Pipeline(model, schedule, num_microbatches=M, mesh=mesh, reshard=reshard) as pipeline:

            def step(number, pipeline=pipeline):
                inputs, target = rows_of(pipeline.place, *batch(number))
                losses = pipeline.step(inputs, target=target)
                return float(sum(losses) / len(losses)) if losses else None

            def clip(most, pipeline=pipeline):
                return clip_grad_norm_(pipeline, most)

            losses, norms = train(pipeline.parameters, step, clip)
            assert all(each.placements[-1].is_shard() for each in pipeline.parameters())
            named = [*pipeline.named_parameters()]
            grads, weights = full((n, p.grad) for n, p in named), full((n, p.detach()) for n, p in named)
            found[case] = losses, norms, grads, weights, pipeline.place.data_part
    return found


def close(one, other):
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def check(everyone, cases):
    for case in cases:
        kind = case[1].replace("copies", "tied")
        tolerance = 1e-12
        losses, norms, grads, weights = alone(kind)
        parts = {}
        for found in everyone:
            some_losses, some_norms, some_grads, some_weights, part = found[case]
            assert some_norms == pytest.approx(norms, rel=tolerance), case
            for mine, whole in ((some_grads, grads), (some_weights, weights)):
                for name, value in mine.items():
                    scale = whole[name].abs().max().item()
                    message = f"{case} {name}"
                    torch.testing.assert_close(
                        value, whole[name], rtol=0, atol=tolerance * scale, msg=message
                    )
            if some_losses[0] is not None:
                parts[part] = some_losses
        means = [sum(each) / len(parts) for each in zip(*parts.values(), strict=True)]
        assert means == pytest.approx(losses, rel=tolerance), case


CASES = [(schedule, "untied", "step") for schedule in ("1f1b", "interleaved_zb")]
CASES += [("interleaved_zb", "tied", "step"), ("zb_h1", "copies", "step")]
CASES += [("zb_h1", "tied", "microbatch"), ("zb_v", "untied", "microbatch")]
AT_NIGHT = [(schedule, "untied", "step") for schedule in ("zb_h1", "zb_v")]
AT_NIGHT += [(schedule, "tied", "step") for schedule in ("1f1b", "zb_h1")]


@pytest.mark.parametrize("cases", [CASES, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)])
def test_shards_train_as_one_process_does(cases):
    """Clipped AdamW, then gradients of two steps added up: to 1e-12, whenever weights are freed."""
    check(run_ranks(in_mesh, 4, {"shard": 2}, cases), cases)


def test_shards_and_replicas_together():
    """HSDP: reduce-scatter over shards, all-reduce over replicas; tied copies stay one parameter."""
    cases = [
        ("zb_h1", "copies", "step"),
        ("zb_h1", "tied", "microbatch"),
    ]
    check(run_ranks(in_mesh, 8, {"replicate": 2, "shard": 2}, cases), cases)


class Odd(nn.Module):
    """Weights that W reads itself: as the input of a layer, as a factor of another weight, in a chain."""

    def __init__(self, seed, how):
        super().__init__()
        torch.manual_seed(seed)
        self.queries = nn.Parameter(torch.randn(4, HIDDEN))
        self.over_queries = nn.Linear(HIDDEN, HIDDEN)
        self.a, self.b = nn.Parameter(torch.randn(HIDDEN, 2)), nn.Parameter(torch.randn(2, HIDDEN))
        self.squared = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.unused = nn.Linear(HIDDEN, 1)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.how = how

    def forward(self, x):
        run = {"plain": lambda f, *args: f(*args), "inside": checkpoint}[self.how]
        return run(self.inner, x)

    def inner(self, x):
        x = x + self.over_queries(self.queries)
        x = x @ (self.a @ self.b) + F.linear(x, self.squared.pow(2))
        return self.shared(self.convolution(torch.tanh(self.shared(self.frozen(x)))))


class OddModel:
    def __init__(self, how="plain"):
        self.blocks = [Odd(seed, how).double() for seed in range(4)]

    def build_stage(self, index, num_stages):
        size = len(self.blocks) // num_stages
        stage = nn.Sequential()
        for number in range(index * size, (index + 1) * size):
            stage.add_module(f"block_{number}", self.blocks[number])
        return stage

    def loss(self, output, target):
        return F.mse_loss(output, target)


def odd_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, ROWS, 4, HIDDEN, generator=generator, dtype=torch.float64)


def odd_stages(rank, cases):
    """Per case the gradients after two steps."""
    found = {}
    for case in cases:
        how, reshard, schedule = case
        mesh, model = make_mesh(shard=2), OddModel("inside" if how == "inside" else "plain")
        stages = model
        if how == "around":
            num_stages = 4 if schedule == "zb_v" else 2
            owned = {0: [0, 3], 1: [1, 2]}[rank // 2] if num_stages == 4 else [rank // 2]
            stages = {index: model.build_stage(index, num_stages) for index in owned}
            for stage in stages.values():
                for block in stage:
                    recompute(block)
        with Pipeline(
            stages, schedule, model.loss, num_microbatches=M, mesh=mesh, reshard=reshard
        ) as pipeline:
            for step in range(2):
                inputs, target = rows_of(pipeline.place, *odd_batch(step))
                pipeline.step(inputs, target=target)
            named = [(n, p.grad) for n, p in pipeline.named_parameters() if p.grad is not None]
            found[case] = full(named)
    return found


ODD = [("plain", "step", "zb_h1"), ("inside", "microbatch", "zb_v"), ("around", "microbatch", "zb_v")]
ODD_AT_NIGHT = [("plain", "microbatch", "zb_h1"), ("inside", "step", "zb_v"), ("around", "step", "zb_v")]


@pytest.mark.parametrize("cases", [ODD, pytest.param(ODD_AT_NIGHT, marks=pytest.mark.nightly)])
def test_weights_that_w_reads_and_recomputed_blocks(cases):
    model = OddModel()
    whole = model.build_stage(0, 1)
    for step in range(2):
        inputs, target = odd_batch(step)
        model.loss(whole(inputs), target).backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    everyone = run_ranks(odd_stages, 4, cases)
    for case in cases:
        names = set()
        for found in everyone:
            names |= found[case].keys()
            for name, grad in found[case].items():
                assert close(grad, expected[name]), (case, name, (grad - expected[name]).abs().max())
        assert names == expected.keys(), case


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks(num, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num))).to(dtype)


def squared(output, target):
    return F.mse_loss(output.float(), target)


MANY = 320


def mixed_in_pipeline(rank):
    """One row, MANY times: the mean over microbatches is the gradient of one. All W's come at the end."""
    ops = [" ".join(f"{{0}}{op}{number}" for op in "FBW" for number in range(MANY))] * 2
    timetable = Timetable.parse("\n".join(row.format(stage) for stage, row in enumerate(ops)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh, both = make_mesh(shard=2), blocks(2)
    stages = {rank // 2: both[rank // 2 : rank // 2 + 1]}
    with Pipeline(stages, timetable, squared, mesh=mesh, mp_policy=policy) as pipeline:
        x, target = torch.ones(MANY, HIDDEN), torch.zeros(MANY, HIDDEN)
        pipeline.step(x, target=target)
        weight = next(pipeline.parameters())
        assert weight.dtype == weight.grad.dtype == torch.float32
        return full((name, p.grad) for name, p in pipeline.named_parameters())


def mixed_alone(rank):
    """The same in plain FSDP2, with one microbatch."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = blocks(2)
    mesh = make_mesh(shard=2)["shard"]
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    squared(model(torch.ones(1, HIDDEN)), torch.zeros(1, HIDDEN)).backward()
    return full((name, p.grad) for name, p in model.named_parameters())


def test_bfloat16_weights_sum_their_gradients_in_float32():
    """A bfloat16 sum of 320 equal numbers is off by half and more; one product rounds to 0.4 %."""
    expected = run_ranks(mixed_alone, 2)[0]
    everyone = run_ranks(mixed_in_pipeline, 4)
    for grads in everyone:
        for name, grad in grads.items():
            whole = expected[name]
            torch.testing.assert_close(grad, whole, rtol=0.01, atol=0.01 * whole.abs().max().item())


def refused(make):
    """What the Pipeline of this process says, or nothing."""
    try:
        make().close()
    except ValueError as error:
        return str(error)
    return ""


def compiled():
    from zbpp.autograd.compiled import compile_stage

    stage = blocks(1)
    compile_stage(stage, backend="eager")
    return stage


def refusals(rank):
    """What is wrong on rank 1 of each pipeline alone, and what every process says."""
    mesh, replicas = make_mesh(shard=2), make_mesh(replicate=2)
    bare = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replicate"))

    def wrapped(on, *, root=True, ignored=False):
        stage = blocks(1)
        parameters = {stage[0].up.bias} if ignored else None
        fully_shard(stage[0], mesh=on, ignored_params=parameters)
        return fully_shard(stage, mesh=on, ignored_params=parameters) if root else stage

    stages = {
        "no shards": (bare, lambda: wrapped(bare["replicate"])),
        "over replicas": (replicas, lambda: wrapped(replicas["replicate"])),
        "other mesh": (mesh, lambda: wrapped(init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))),
        "no root": (mesh, lambda: wrapped(mesh["shard"], root=False)),
        "ignored": (mesh, lambda: wrapped(mesh["shard"], ignored=True)),
        "compiled": (mesh, compiled),
        "of FSDP2": (mesh, lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)),
    }
    said = {}
    for name, (on, make) in stages.items():
        every = wrapped(mesh["shard"]) if on is mesh else blocks(1)
        stage = make() if rank // 2 or name == "other mesh" else every
        said[name] = refused(
            lambda: Pipeline({rank // 2: stage}, "zb_h1", F.mse_loss, num_microbatches=2, mesh=on)  # noqa: B023
        )
    stage = {rank // 2: blocks(1)}
    options = {"num_microbatches": 2, "loss_fn": F.mse_loss}
    said["reshard"] = refused(lambda: Pipeline(stage, "1f1b", mesh=mesh, reshard="often", **options))
    said["tied on one rank"] = refused(
        lambda: Pipeline(ToyLm("object"), "zb_v", num_microbatches=2, mesh=mesh)
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    said["policy"] = refused(lambda: Pipeline(stage, "1f1b", mesh=replicas, mp_policy=policy, **options))
    return said


REFUSALS = {
    "no shards": r"stage 1 is wrapped in FSDP2 .* no shards: write Pipeline\(\.\.\., mesh=zbpp.make_mesh\(sh",
    "over replicas": "stage 1 is wrapped in FSDP2 on another mesh .* write fully_shard",
    "other mesh": "stage . is wrapped in FSDP2 on another mesh .* write fully_shard",
    "no root": r"stage 1 has parts .* not wrapped itself: write fully_shard\(stage",
    "ignored": "stage 1 is wrapped in FSDP2 without its parameter 0.up.bias, whose gradients nobody .*: give",
    "compiled": "stage 1 can't be sharded: it is compiled, .* write compile=none",
    "of FSDP2": "stage 1 can't be sharded: FSDP does not support non-contiguous",
    "reshard": "reshard='often': write one of step, microbatch",
    "tied on one rank": r"embedding.weight of stage 0 and head.weight of stage 3 .* such as zb_h1",
    "policy": r"mp_policy is for stages that FSDP2 shards, .*: write mesh=zbpp.make_mesh\(shard=2\)",
}


def test_what_can_not_be_sharded_is_refused_on_every_process():
    for said in run_ranks(refusals, 4):
        for name, expected in REFUSALS.items():
            assert re.search(expected, said[name]), (name, said[name])


def pipeline_of(rank, mesh, stages=None, schedule="zb_h1", **options):
    stages = stages or {rank // 2: part_of_blocks(rank)}
    return Pipeline(stages, schedule, F.mse_loss, num_microbatches=M, mesh=mesh, **options)


def part_of_blocks(rank):
    both = blocks(4, torch.float64)
    stage = nn.Sequential()
    for number in (0, 1) if rank < 2 else (2, 3):
        stage.add_module(f"block_{number}", both[number])
    return stage


def block_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, ROWS, HIDDEN, generator=generator, dtype=torch.float64)


def run_step(pipeline, step):
    inputs, target = rows_of(pipeline.place, *block_batch(step))
    return pipeline.step(inputs, target=target)


def gradients(pipeline):
    return full((n, p.grad) for n, p in pipeline.named_parameters())


def wrapped_by_the_user(rank, mesh):
    stage = part_of_blocks(rank)
    for module in (*stage, stage):
        fully_shard(module, mesh=mesh["shard"], reshard_after_forward=True)
    before = [*stage.parameters()]
    with pipeline_of(rank, mesh, {rank // 2: stage}) as pipeline:
        assert [*map(id, pipeline.parameters())] == [*map(id, before)]
        run_step(pipeline, 0)
        return gradients(pipeline)


def replanned(rank, mesh):
    """Another timetable in the middle, and messages that say their layout."""
    pipeline = pipeline_of(rank, mesh, dynamic_shapes=True, reshard="microbatch")
    run_step(pipeline, 0)
    pipeline.use_timetable(zbpp.plan("1f1b", 2, M))
    for each in pipeline.parameters():
        each.grad = None
    run_step(pipeline, 0)
    pipeline.close()
    return gradients(pipeline)


def loaded(rank, mesh):
    """Whole tensors and shards of a state dict; the weights before are others."""
    first = pipeline_of(rank, mesh)
    whole = blocks(4, torch.float64).state_dict()
    whole = {f"block_{name}": value for name, value in whole.items()}
    shards = {name: each.clone() for name, each in first.state_dict().items()}
    first.close()
    for state in (whole, shards):
        stage = part_of_blocks(rank)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.fill_(7)
        with pipeline_of(rank, mesh, {rank // 2: stage}) as pipeline:
            pipeline.evaluate(*rows_of(pipeline.place, block_batch(0)[0]), target=torch.zeros(4, HIDDEN))
            pipeline.load_state_dict(state)
            assert pipeline.state_dict().keys() == shards.keys()
            run_step(pipeline, 0)
    return gradients(pipeline)


def after_a_failure(rank, mesh):
    """The stages of a pipeline that failed in a step go on in another one."""
    stages = {rank // 2: part_of_blocks(rank)}
    pipeline = pipeline_of(rank, mesh, stages)

    def fail(*_):
        raise KeyError("planted")

    handle = stages[rank // 2][-1].register_forward_hook(fail)
    message = ""
    try:
        run_step(pipeline, 0)
    except (KeyError, CommunicationError) as error:
        message = str(error)
    assert message
    handle.remove()
    with pytest.raises(RuntimeError, match="make a new Pipeline"):
        run_step(pipeline, 0)
    with pipeline_of(rank, mesh, stages) as another:
        run_step(another, 0)
        return gradients(another)


def random_timetables(rank, mesh):
    """Any order that can run: no deadlock between pipelines, and the same gradients."""
    found = []
    rng = random.Random(13)
    while len(found) < 12:
        timetable = random_timetable(rng, most_ranks=2, most_microbatches=3)
        if timetable.num_ranks < 2 or timetable.num_stages > 4 or ROWS // 2 % timetable.num_microbatches:
            continue
        both = blocks(4, torch.float64)
        cuts = [4 * index // timetable.num_stages for index in range(timetable.num_stages + 1)]
        stages = {}
        for index in timetable.stages_of(rank // 2):
            stages[index] = nn.Sequential()
            for number in range(cuts[index], cuts[index + 1]):
                stages[index].add_module(f"block_{number}", both[number])
        reshard = rng.choice(("step", "microbatch"))
        with Pipeline(stages, timetable, F.mse_loss, mesh=mesh, reshard=reshard) as pipeline:
            run_step(pipeline, 0)
            found.append(gradients(pipeline))
    return found


class ScaledLoss(nn.Module):
    """A loss with a weight of its own, which no stage has."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def weighted_loss(rank, mesh):
    stages = {rank // 2: part_of_blocks(rank)}
    with Pipeline(stages, "zb_h1", ScaledLoss(), num_microbatches=M, mesh=mesh) as pipeline:
        run_step(pipeline, 0)
        return gradients(pipeline)


def uses(rank):
    mesh = make_mesh(shard=2)
    cases = [wrapped_by_the_user, replanned, loaded, after_a_failure, weighted_loss]
    found = {case.__name__: case(rank, mesh) for case in cases}
    found["weighted loss of replicas"] = weighted_loss(rank, make_mesh(replicate=2))
    for number, grads in enumerate(random_timetables(rank, mesh)):
        found[f"random timetable {number}"] = grads
    return found


def test_stages_of_the_user_other_timetables_loading_and_failures():
    whole = blocks(4, torch.float64)
    inputs, target = block_batch(0)
    loss = ScaledLoss()
    loss(whole(inputs), target).backward()
    expected = {f"block_{name}": p.grad for name, p in whole.named_parameters()}
    expected["loss.scale"] = loss.scale.grad
    for found in run_ranks(uses, 4):
        for case, grads in found.items():
            for name, grad in grads.items():
                assert close(grad, expected[name]), (case, name)


class Choice(nn.Module):
    """A block in which rows decide which layer runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = (nn.Linear(HIDDEN, HIDDEN).double() for _ in range(3))

    def forward(self, x):
        return self.first(x) if x.sum() > 0 else self.second(x)


def choices(rank):
    """Each process's rows run another layer; nobody's run the third. Then each layer is wrapped by itself."""
    x = torch.full((4, HIDDEN), 1.0 - 2 * (rank % 2), dtype=torch.float64)
    mesh, found = make_mesh(shard=2), []
    for is_wrapped in (False, True):
        stage = nn.Sequential(Choice()) if rank < 2 else nn.Identity()
        for layer in stage[0].children() if is_wrapped and rank < 2 else ():
            fully_shard(layer, mesh=mesh["shard"])
        if is_wrapped and rank < 2:
            fully_shard(stage, mesh=mesh["shard"])
        with pipeline_of(rank, mesh, {rank // 2: stage}, timeout=60.0) as pipeline:
            for _ in range(2):
                pipeline.step(x, target=torch.zeros_like(x))
                pipeline.evaluate(x, target=torch.zeros_like(x))
            unused = [n for n, p in pipeline.named_parameters() if p.grad is None]
            named = ((n, p.grad) for n, p in pipeline.named_parameters() if p.grad is not None)
            found.append((unused, full(named)))
    return found


def test_a_parameter_that_some_processes_use_gets_the_mean_and_one_that_none_uses_none():
    """As an expert that some processes' rows do not reach, be it gathered with its block or by itself."""
    model = Choice()
    for sign in (1.0, -1.0):
        x = torch.full((4, HIDDEN), sign, dtype=torch.float64)
        F.mse_loss(model(x), torch.zeros_like(x)).backward()  # two steps of half of it
    for unused, grads in (each for found in run_ranks(choices, 4)[:2] for each in found):
        assert unused == ["0.never.weight", "0.never.bias"]
        for name, parameter in model.named_parameters():
            assert name.startswith("never") or close(grads[f"0.{name}"], parameter.grad), name


def with_tensor_parallel(rank):
    """One stage: a colwise and a rowwise layer in each block, sharded beside. Gradients, norms, loading."""
    mesh, stage = make_mesh(shard=2, tensor=2), blocks(2, torch.float64)
    for block in stage:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with Pipeline({0: stage}, "zb_h1", F.mse_loss, num_microbatches=M, mesh=mesh) as pipeline:
        with torch.no_grad():
            for parameter in pipeline.parameters():
                parameter.mul_(3)
        pipeline.load_state_dict(blocks(2, torch.float64).state_dict())
        run_step(pipeline, 0)
        norms = [clip_grad_norm_(pipeline, most).item() for most in (0.1, 1e9)]
        return norms, gradients(pipeline)


def test_shards_beside_tensor_parallel_layers():
    whole = blocks(2, torch.float64)
    inputs, target = block_batch(0)
    F.mse_loss(whole(inputs), target).backward()
    expected = [torch.nn.utils.clip_grad_norm_(whole.parameters(), most).item() for most in (0.1, 1e9)]
    for norms, grads in run_ranks(with_tensor_parallel, 4):
        assert norms == pytest.approx(expected, rel=1e-12)
        for name, parameter in whole.named_parameters():
            assert close(grads[name], parameter.grad), name
