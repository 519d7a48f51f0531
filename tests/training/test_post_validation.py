"""Post-validation against the synchronous run: the same losses and weights, to the last bit."""

import math
from itertools import chain, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from helpers.processes import run_ranks
from zbpp import Feature, LossScale, Pipeline, PostValidation, clip_grad_norm_, make_mesh, plan
from zbpp.data import Data
from zbpp.features.post_validation.posts import Posts
from zbpp.features.post_validation.validation import validation_of
from zbpp.job.agreement import AgreementError
from zbpp.job.errors import CommunicationError
from zbpp.run.optimizer import build_masters
from zbpp.run.stages import move_stages
from zbpp.runtime.processes.dtensors import local_of
from zbpp.training.optim.precision import PRECISIONS
from zbpp.training.trainer import Trainer

M, ROWS, WIDTH, STEPS = 8, 32, 6, 10
# Some steps are clipped by force. In others the norm of all stages is just above the threshold, and that of
# each rank below: ranks update, and take it back.
CLIP = 5.5
CLIPPED = (3, 7)
INFINITE = 5  # no rank has gradients
POISONED = 8  # the first stage's are infinite, other ranks update


class Model:
    """Layers with dropout, whose seeds must come again, and with BatchNorm, whose statistics must go back."""

    num_layers = 8

    def __init__(self, norm=nn.BatchNorm1d):
        self.norm = norm

    def build_stage(self, index, num_stages):
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), self.norm(WIDTH), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(self.num_layers)
        ]
        mine = layers[len(layers) * index // num_stages : len(layers) * (index + 1) // num_stages]
        return nn.Sequential(*mine)

    def loss(self, output, target):
        return F.mse_loss(output, target)


class SplitModel(Model):
    """Pairs of linears that are split over the mesh's tensor dimension."""

    num_layers = 2  # DTensors are slow

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        for layer in stage:
            layer[0] = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        return stage

    def parallelize(self, stage, mesh):
        for layer in stage:
            parallelize_module(layer[0], mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def batch(step, part=0):
    """part: replicas and shards get different rows."""
    generator = torch.Generator().manual_seed(step + 1000 * part)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    if step in CLIPPED:
        y = y * 1e4
    if step == INFINITE:
        y[ROWS // 2] = math.inf
    return x, y


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


class Infinite(torch.autograd.Function):
    """The identity; its gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def poison(pipeline, now):
    """Let gradients of the first stage's first layer be infinite at one step, and no others."""
    if 0 in pipeline.stages:
        layer = next(each for each in pipeline.stages[0].modules() if isinstance(each, nn.Linear))
        layer.register_forward_hook(
            lambda module, inputs, output: Infinite.apply(output) if now[0] == POISONED else output
        )


def synchronous(pipeline, optimizer, scheduler):
    losses, norms, now = [], [], [0]
    poison(pipeline, now)
    for step in range(STEPS):
        now[0], (x, y) = step, batch(step, pipeline.place.data_part)
        optimizer.zero_grad()
        losses.append([each.item() for each in pipeline.step(x, target=y)])
        norm = clip_grad_norm_(pipeline, CLIP).item()
        if math.isfinite(norm):
            optimizer.step()
        scheduler.step()
        norms.append(norm)
    return losses, norms


def validated(pipeline, optimizer, scheduler):
    losses, norms, now = [], [], [0]
    poison(pipeline, now)
    steps = PostValidation(pipeline, optimizer, clip_norm=CLIP)
    for step in range(STEPS):
        now[0], (x, y) = step, batch(step, pipeline.place.data_part)
        losses.append([each.item() for each in steps.step(x, target=y)])
        scheduler.step()
        if step:
            norms.append(steps.norm)
    steps.finish_update()
    norms.append(steps.norm)
    assert steps.num_redone == sum(not norm <= CLIP for norm in norms)
    assert steps.num_redone > len(CLIPPED)
    if 0 not in pipeline.stages:
        assert steps.num_taken_back > 0  # at least that of the poisoned step
    return losses, norms


def trained(num_ranks, schedule, run, make=adamw, model=Model(), **options):  # noqa: B008  # it has no state
    """Losses and norms of a run, and the weights and buffers at its end."""
    with Pipeline(model, plan(schedule, num_ranks, M), **options) as pipeline:
        optimizer = make(pipeline.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses, norms = run(pipeline, optimizer, scheduler)
        state = {name: local_of(each).clone() for name, each in pipeline.state_dict().items()}
        kept = tree_map(
            lambda each: local_of(each) if isinstance(each, torch.Tensor) else each, optimizer.state_dict()
        )
        return losses, norms, state, kept


def assert_same(one, other):
    """Equal to the last bit, NaN equal to NaN."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other or (one != one and other != other)


def both(rank, num_ranks, schedules, **options):
    """Per schedule the synchronous run and the validated one."""
    return {
        schedule: [trained(num_ranks, schedule, run, **options) for run in (synchronous, validated)]
        for schedule in schedules
    }


@pytest.mark.parametrize("num_ranks, schedules", [(1, ["1f1b", "zb_v"]), (2, ["zb_h1", "zb_v"])])
def test_forced_clips_and_a_forced_inf_give_the_synchronous_runs_losses(num_ranks, schedules):
    if num_ranks == 1:
        everyone = [both(0, 1, schedules)]
    else:
        everyone = run_ranks(both, num_ranks, num_ranks, schedules)
    for found in everyone:
        for schedule in schedules:
            expected, got = found[schedule]
            norms = dict(enumerate(expected[1]))
            assert [step for step in norms if not math.isfinite(norms[step])] == [INFINITE, POISONED]
            assert {*CLIPPED} <= {step for step in norms if norms[step] > CLIP}
            assert any(norm <= CLIP for norm in norms.values())
            assert_same(expected, got)


def in_meshes(rank):
    """Both runs of this process in each mesh."""
    meshes = [(make_mesh(**degrees), model) for degrees, model in MESHES]
    return [both(rank, mesh.size(0), ["zb_h1"], model=model, mesh=mesh)["zb_h1"] for mesh, model in meshes]


MESHES = [({"replicate": 2}, Model()), ({"shard": 2}, Model()), ({"tensor": 2}, SplitModel())]


def test_two_ranks_with_replicas_shards_or_tensor_parallel_parts_give_the_synchronous_losses():
    for expected, got in chain(*run_ranks(in_meshes, 4)):
        norms = expected[1]
        assert [step for step in range(STEPS) if not math.isfinite(norms[step])] == [INFINITE, POISONED]
        assert {*CLIPPED} <= {step for step in range(STEPS) if norms[step] > CLIP}
        assert any(norm <= CLIP for norm in norms)
        assert_same(expected, got)


# ---- The trainer


class Batches:
    def batch(self, step):
        return batch(step)


def trainer_of(post_validation, precision="mixed_float16", **options):
    chosen, model = PRECISIONS[precision], Model(nn.LayerNorm)
    stages = {index: model.build_stage(index, 2) for index in range(2)}
    move_stages(stages, torch.device("cpu"), chosen)
    pipeline = Pipeline(stages, plan("zb_v", 1, M), chosen.widened(model.loss))
    masters = build_masters(pipeline, chosen)
    options.setdefault("num_recorded", 1)
    return Trainer(
        pipeline=pipeline,
        optimizer=adamw((masters or pipeline).parameters()),
        data=Data(Batches(), Batches(), 1, ROWS, "row", ""),
        learning_rate=lambda step: 1 / (step + 1),
        clip_norm=CLIP,
        masters=masters,
        loss_scale=LossScale(2.0**12, growth_interval=2) if chosen.is_scaled else None,
        post_validation=post_validation,
        **options,
    )


def history_of(trainer, num_steps=STEPS):
    """The metrics without the times, and the weights at the end."""
    history = [
        {name: value for name, value in each.items() if "second" not in name}
        for each in trainer.run(num_steps)
    ]
    return history, [each.detach().clone() for each in trainer.pipeline.parameters()]


def test_a_trainer_with_masters_and_a_loss_scale_has_the_synchronous_runs_metrics():
    """The loss scale grows at some steps and is halved at others: F's of the last stage depend on it."""
    expected = history_of(trainer_of(False, evaluate_every=4))
    trainer = trainer_of(True, evaluate_every=4)
    assert_same(expected, history_of(trainer))
    scales = [each["loss_scale"] for each in expected[0]]
    assert any(b > a for a, b in pairwise(scales))
    assert any(b < a for a, b in pairwise(scales))
    assert {each["skipped"] for each in expected[0]} == {True, False}
    assert trainer._update.num_redone > 2


def test_the_metrics_of_a_step_come_when_the_next_step_has_passed_its_gate():
    trainer = trainer_of(True, "float32", num_recorded=0)
    running = trainer.run(STEPS)
    assert [next(running)["step"], trainer.pipeline.num_steps] == [1, 2]
    assert validation_of(trainer.pipeline).pending is not None
    assert [each["step"] for each in running] == [*range(2, STEPS + 1)]
    assert validation_of(trainer.pipeline).pending is None


# ---- What is refused


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.mul_(2))


def test_a_stage_that_changes_its_inputs_is_refused_before_the_second_step():
    with Pipeline({0: ChangesItsInput()}, plan("1f1b", 1, M), F.mse_loss) as pipeline:
        steps = PostValidation(pipeline, adamw(pipeline.parameters()))
        x, y = batch(0)
        steps.step(x.clone(), target=y)
        with pytest.raises(ValueError, match="changes its inputs, its targets or a frozen param"):
            steps.finish_update()


class Releasing(Feature):
    """A feature that goes by the name of gradient release, and can be used on one rank alone."""

    name = "gradient_release"


def refused(rank):
    model, timetable = Model(), plan("1f1b", 2, M)
    with Pipeline({rank: model.build_stage(rank, 2)}, timetable, model.loss) as pipeline:
        optimizer = adamw(pipeline.parameters())
        if rank:
            pipeline.use(Releasing())
        with pytest.raises(ValueError, match="gradient release drops the gradients"):
            PostValidation(pipeline, optimizer)
        posts, found = Posts(pipeline.place, timeout=1.0), []
        if rank == 0:
            with pytest.raises(CommunicationError, match="rank 0 waits .* on rank 1: after 1 s"):
                posts.post("mine").collect()
        posts = Posts(pipeline.place, timeout=100.0)
        for number in range(5):
            ticket = posts.post((rank, number))
            found.append(ticket.collect() == pipeline.place.gather((rank, number)))
        left = [posts._store.check([f"{number}/{rank}"]) for number in range(5)]
        posts.give_up("it was told to")
        if rank == 0:
            with pytest.raises(CommunicationError, match="told to"):
                posts.post("mine").collect()
    return found, left


def test_a_gather_in_two_halves_and_what_one_rank_refuses_all_refuse():
    for found, left in run_ranks(refused, 2):
        assert found == [True] * 5
        assert left == [False] * 3 + [True] * 2  # a value is removed when everybody has read it


# ---- What an attack found: silently wrong before


def habits(change):
    """The losses of a loop that does something by habit before each step."""
    with Pipeline({0: Model().build_stage(0, 1)}, plan("zb_h1", 1, M), F.mse_loss) as pipeline:
        optimizer = adamw(pipeline.parameters())
        steps, losses = PostValidation(pipeline, optimizer, clip_norm=CLIP), []
        for step in range(5):
            steps = change(steps, pipeline, optimizer) or steps
            x, y = batch(step)
            losses.append([each.item() for each in steps.step(x, target=y)])
        steps.finish_update()
        return losses


def test_zero_grad_by_habit_and_a_second_post_validation_change_nothing():
    expected = habits(lambda *_: None)
    assert habits(lambda steps, pipeline, optimizer: optimizer.zero_grad()) == expected

    def again(steps, pipeline, optimizer):
        return PostValidation(pipeline, optimizer, clip_norm=CLIP)

    assert habits(again) == expected


class Fails(torch.optim.SGD):
    """Its step raises where it is told to."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("out of order")
        return super().step(closure)


def test_after_an_update_that_failed_nothing_goes_on():
    pipeline = Pipeline({0: Model().build_stage(0, 1)}, plan("1f1b", 1, M), F.mse_loss)
    optimizer = Fails(pipeline.parameters(), lr=0.1)
    steps = PostValidation(pipeline, optimizer)
    x, y = batch(0)
    steps.step(x, target=y)
    steps.finish_update()
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of order"):
        steps.step(x, target=y)
    for call in (pipeline.state_dict, lambda: steps.step(x, target=y), pipeline.finish_update):
        with pytest.raises(RuntimeError, match=r"an update failed .*out of order"):
            call()


def read_on_some_ranks(rank, readers):
    """The losses where some ranks read their weights after each step, and others don't."""
    with Pipeline(Model(), plan("zb_h1", 2, M), timeout=100.0) as pipeline:
        steps, losses = PostValidation(pipeline, adamw(pipeline.parameters()), clip_norm=CLIP), []
        for step in range(5):
            x, y = batch(step)
            losses.append([each.item() for each in steps.step(x, target=y)])
            if rank in readers:
                pipeline.state_dict()
        steps.finish_update()
        return losses, steps.num_redone


def said(call):
    """The text of the error that a call raises."""
    with pytest.raises((AgreementError, CommunicationError)) as raised:
        call()
    return str(raised.value)


def disagreeing(rank):
    """Runs in which some ranks read weights; then what each rank is told where ranks make different calls."""
    found = [read_on_some_ranks(rank, readers) for readers in ((), (0,), (1,))]
    told, (x, y) = [], batch(0)
    with Pipeline(Model(), plan("1f1b", 2, M)) as pipeline:
        optimizer = adamw(pipeline.parameters())
        told.append(said(lambda: PostValidation(pipeline, optimizer, clip_norm=1.0 + rank)))
    pipeline = Pipeline(Model(), plan("1f1b", 2, M))
    steps = PostValidation(pipeline, adamw(pipeline.parameters()))
    steps.step(x, target=y)
    told.append(said(lambda: (pipeline if rank else steps).step(x, target=y)))
    return found, told


def test_ranks_that_read_weights_make_no_difference_and_other_differences_are_told_at_once():
    both_found, both_told = zip(*run_ranks(disagreeing, 2, timeout=60.0), strict=True)
    for found in both_found:
        assert found[0] == found[1] == found[2]
        assert found[0][1] >= 2
    for clip, bare in both_told:
        assert "clip_norm: 1.0 on rank 0; 2.0 on rank 1" in clip
        assert "is in PostValidation.step()" in bare
