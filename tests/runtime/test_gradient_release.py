"""Weights updated inside the step: losses and weights of the ordinary loop, to the last bit."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from helpers.processes import run_ranks
from helpers.toy_lm import HIDDEN, ROWS, VOCAB, ToyLm, batch
from zbpp import GradientRelease, Pipeline, Timetable, clip_grad_norm_, make_mesh
from zbpp.features.reductions.norm import norm_of, squares_in_mesh

M, STEPS = 4, 5
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def trained(pipeline, optimizer, *, released, steps=range(STEPS), scheduler=None):
    """Losses and, at the end, weights; the ordinary loop steps the optimizer itself."""
    losses = []
    for step in steps:
        inputs, target = batch(step)
        rows = ROWS // pipeline.place.num_data_parts
        part = slice(pipeline.place.data_part * rows, (pipeline.place.data_part + 1) * rows)
        losses += map(float, pipeline.step(inputs[part], target=target[part]))
        if released:
            assert all(each.grad is None for each in pipeline.parameters())
        else:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    weights = {name: each.detach() for name, each in pipeline.named_parameters()}
    return losses, {name: getattr(each, "_local_tensor", each).clone() for name, each in weights.items()}


def run(make_optimizer, schedule, *, released, is_tied=False, **options):
    with Pipeline(ToyLm("copies" if is_tied else ""), schedule, num_microbatches=M, **options) as pipeline:
        optimizer = make_optimizer(pipeline.parameters())
        scheduler = StepLR(optimizer, 2, 0.5)
        if released:
            pipeline.use(GradientRelease(optimizer))
        return trained(pipeline, optimizer, released=released, scheduler=scheduler)


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_weights_are_those_of_the_ordinary_step(name):
    """Two stages in one process, which share the embedding's weight; the learning rate falls."""
    losses, weights = run(OPTIMIZERS[name], "zb_v", released=True, is_tied=True)
    same((losses, weights), run(OPTIMIZERS[name], "zb_v", released=False, is_tied=True))
    assert len(set(losses)) == len(losses) == M * STEPS


MESHES = [
    ("two ranks", {}, "zb_h1", True),
    ("four stages", {}, "zb_v", False),
    ("replicas", {"replicate": 2}, "zb_v", True),
    ("shards", {"shard": 2}, "zb_v", False),
]


def gradients_at_updates():
    """How many gradients exist at each update of two replicas with two stages; how many each stage has."""
    with Pipeline(ToyLm(), "zb_v", num_microbatches=M, mesh=make_mesh(replicate=2)) as pipeline:
        parameters, seen = list(pipeline.parameters()), []
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        pipeline.use(GradientRelease(optimizer))
        update = optimizer.step

        def step():
            seen.append(sum(each.grad is not None for each in parameters))
            update()

        optimizer.step = step  # as a learning rate schedule wraps it
        trained(pipeline, optimizer, released=True, steps=range(1))
        return seen, [len(list(stage.parameters())) for stage in pipeline.stages.values()]


def in_meshes(rank):
    found = {"updates": gradients_at_updates()}
    for name, degrees, schedule, is_tied in MESHES:
        for released in (True, False):
            mesh = make_mesh(**degrees) if degrees else None
            options = {"mesh": mesh, "is_tied": is_tied}
            found[name, released] = run(OPTIMIZERS["adamw"], schedule, released=released, **options)
    return found


def test_two_processes_train_as_with_the_ordinary_step():
    """Ranks, replicas, shards, tied copies; replicas and copies of a parameter stay equal."""
    everyone = run_ranks(in_meshes, 2)
    for found in everyone:
        seen, sizes = found["updates"]
        assert seen == [sum(sizes), sum(sizes) - sizes[0]]  # a stage's gradients go before the next update
        for name, *_ in MESHES:
            same(found[name, True], found[name, False])
    first, second = (found["replicas", True][1] for found in everyone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    own, copy = (everyone[rank]["two ranks", True][1] for rank in (0, 1))
    assert torch.equal(own["embedding.weight"], copy["head.weight"])
    assert any(found["two ranks", True][0] for found in everyone)


def on_one_rank(schedule="zb_v", model=None, **options):
    return Pipeline(model or ToyLm(), schedule, num_microbatches=M, **options)


def released(make_optimizer=OPTIMIZERS["adamw"], **options):
    pipeline = on_one_rank(**options)
    optimizer = make_optimizer(pipeline.parameters())
    pipeline.use(GradientRelease(optimizer))
    return pipeline, optimizer


class ClipsByItself(torch.optim.SGD):
    """Clips by the norm of all gradients, as LAMB does in some libraries."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Scaled(torch.optim.SGD):
    """Updates each parameter by itself, which nobody can know of a class of the user's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    "make", [torch.optim.LBFGS, lambda p: ClipsByItself(p, lr=0.1), lambda p: Scaled(p, lr=0.1)]
)
def test_an_optimizer_that_may_update_parameters_together_is_refused(make):
    pipeline = on_one_rank()
    with pytest.raises(ValueError, match="none of torch.optim's or torch-optimi's.*write per_parameter=True"):
        pipeline.use(GradientRelease(make(pipeline.parameters())))
    assert pipeline.released is None


def test_what_needs_all_gradients_is_refused_before_anything_runs():
    pipeline, optimizer = released()
    inputs, target = batch(0)
    with pytest.raises(RuntimeError, match="releases gradients.*such as optimi.StableAdamW"):
        clip_grad_norm_(pipeline, 1.0)
    pipeline.loss_scale = 1024.0
    with pytest.raises(ValueError, match=r"loss_scale=1024 .*write pipeline.loss_scale = 1"):
        pipeline.step(inputs, target=target)
    pipeline.loss_scale = 1.0
    next(pipeline.parameters()).grad = torch.ones_like(next(pipeline.parameters()))
    with pytest.raises(ValueError, match="gradients of several steps don't add up"):
        pipeline.step(inputs, target=target)
    optimizer.zero_grad()
    pipeline.step(inputs, target=target)


class Fails(nn.Module):
    """Fails in B of a microbatch: behind it in the pipeline, stages may have been updated already."""

    def __init__(self):
        super().__init__()
        self.num_backwards = 0

    def forward(self, x):
        x = x * 1.0
        x.register_hook(self.count)
        return x

    def count(self, _):
        self.num_backwards += 1
        if self.num_backwards == M:
            raise RuntimeError("planned")


def test_no_step_follows_one_that_failed_after_an_update():
    """The last stage has done all its work when the first one's last B fails."""
    first = nn.Sequential(nn.Embedding(VOCAB, HIDDEN).double(), Fails())
    last = nn.Linear(HIDDEN, VOCAB).double()
    timetable = Timetable.parse("0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1BW0 1BW1 1BW2 1BW3 0BW0 0BW1 0BW2 0BW3")
    pipeline = Pipeline({0: first, 1: last}, timetable, ToyLm().loss)
    before = last.weight.detach().clone()
    pipeline.use(GradientRelease(torch.optim.SGD(pipeline.parameters(), lr=0.1)))
    inputs, target = batch(0)
    with pytest.raises(RuntimeError, match="planned") as caught:
        pipeline.step(inputs, target=target)
    assert "some of its weights and optimizer states have been updated" in "\n".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="have been updated.*: make a new Pipeline"):
        pipeline.finish_update()  # as a checkpoint does: it would hold the weights of no step
    assert not torch.equal(before, last.weight)
    with pytest.raises(
        RuntimeError, match="earlier call failed .*planned.* load weights and optimizer states"
    ):
        pipeline.step(inputs, target=target)
    with pytest.raises(RuntimeError, match="load weights"):
        pipeline.evaluate(inputs, target=target)
    pipeline.close()


def test_the_norm_of_released_gradients_is_the_norm_that_clipping_would_have_found():
    pipeline = on_one_rank()
    pipeline.use(GradientRelease(OPTIMIZERS["adamw"](pipeline.parameters()), keep_squares=True))
    inputs, target = batch(0)
    pipeline.step(inputs, target=target)
    plain = on_one_rank()
    plain.step(inputs, target=target)
    assert norm_of([squares_in_mesh(pipeline)]) == clip_grad_norm_(plain, 1e9).item() > 0
