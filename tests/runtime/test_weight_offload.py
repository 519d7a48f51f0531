"""Weights that live on the host: equal numbers to the last bit, with two blocks of weights on the device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import grads_of
from zbpp import Pipeline, backward_input
from zbpp.autograd import recompute
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.measure.live_tensors import live_bytes
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.runtime import StageWorker

SIZES = {"vocab_size": 20, "num_layers": 3, "hidden_size": 16, "num_heads": 4, "sequence_length": 8}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(20, (2, 8, 8), generator=generator)


def train(model, offload, *, schedule="zb_h1", num_stages=1, optimizer=adamw, change=lambda stage: None):
    """Losses of three steps and evaluations, and the weights after them."""
    torch.manual_seed(0)
    stages = {index: model.build_stage(index, num_stages) for index in range(num_stages)}
    weights = OffloadedWeights(stages) if offload else None
    for stage in stages.values():
        change(stage)
    pipeline = Pipeline(stages, schedule, loss_fn=model.loss, num_microbatches=4)
    trained = [*pipeline.parameters()]
    updates = optimizer(trained)
    losses = []
    for step in range(3):
        x, target = tokens(step)
        updates.zero_grad(set_to_none=step != 1)
        losses += pipeline.step(x, target=target)
        updates.step()
        losses += pipeline.evaluate(x, target=target)
    assert [*pipeline.parameters()] == trained or all(
        a is b for a, b in zip(pipeline.parameters(), trained, strict=True)
    )
    return torch.stack(losses), pipeline.state_dict(), weights


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def recompute_blocks(stage):
    for child in stage.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            recompute(block)


CASES = {
    "1f1b": {"schedule": "1f1b"},
    "momentum": {"optimizer": momentum},
    "two stages in a V": {"schedule": "zb_v", "num_stages": 2},
    "recompute": {"change": recompute_blocks},
    "recompute of the stage": {"change": recompute},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", [Llama(**SIZES), Gpt(**SIZES, dropout=0.1)], ids=["llama", "gpt"])
def test_a_model_trains_as_without_to_the_last_bit(model, name):
    assert_same(train(model, True, **CASES[name]), train(model, False, **CASES[name]))


# ---------------------------------------------------------------- memory


class Deep:
    """Ten equal layers, whose weights are far larger than their activations."""

    def build_stage(self, index, num_stages):
        layers = [nn.Linear(128, 128) for _ in range(10)]
        return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def steps_of_deep(is_offloaded, num_microbatches):
    """Losses of three steps, and the most live bytes on the device from offloading on."""
    torch.manual_seed(0)
    stages = {0: Deep().build_stage(0, 1)}
    losses = []

    def run():
        if is_offloaded:
            OffloadedWeights(stages)
        pipeline = Pipeline(stages, "zb_h1", loss_fn=F.mse_loss, num_microbatches=num_microbatches)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(2, 128, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            losses.extend(pipeline.step(x, target=x))
            optimizer.step()

    level = live_bytes(run, torch.device("cpu"))
    return torch.stack(losses), level.highest


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_model_trains_with_two_blocks_of_weights_on_the_device_and_equal_losses(num_microbatches):
    """Of gradients there are one block's with one microbatch, else those of all ten layers."""
    one = 4 * (128 * 128 + 128)
    plain, most_without = steps_of_deep(False, num_microbatches)
    losses, most = steps_of_deep(True, num_microbatches)
    assert torch.equal(losses, plain)
    activations = 2 * 20 * 128 * 4 * 2  # outputs and their gradients
    assert most <= (3 if num_microbatches == 1 else 2 + 10) * one + activations
    assert most_without >= 10 * one  # its gradients alone: its weights were allocated before


# ---------------------------------------------------------------- kinds of blocks


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum(0)


class Everything(nn.Module):
    """Weights in a Function, in a chain that computes, in a product of weights, and in norms."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.randn(6)), nn.LayerNorm(6)
        self.left, self.right = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        x = self.norm(Scale.apply(x, self.scale))
        x = F.linear(x, torch.tanh(self.left) * self.left)
        return self.frozen(x @ (self.left @ self.right))


def images():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Sequential(nn.Conv2d(4, 2, 3), nn.Flatten())
    ).to(memory_format=torch.channels_last)


class InPlace(nn.Linear):
    """Changes its input in place."""

    def forward(self, x):
        x += super().forward(torch.tanh(x))
        return x


BLOCKS = {
    "in place": (lambda: nn.Sequential(nn.Linear(6, 6), InPlace(6, 6), InPlace(6, 6)), (8, 6)),
    "everything": (lambda: nn.Sequential(Everything(), nn.Linear(6, 6), Everything()), (8, 6)),
    "images": (images, (8, 3, 8, 8)),
    "one block": (lambda: nn.Linear(6, 6), (8, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (8, 3, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6)), None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_weight_gets_its_gradient(name):
    make, shape = BLOCKS[name]
    sides = []
    for offload in (False, True):
        torch.manual_seed(1)
        module = make()
        x = torch.randint(9, (8, 3)) if shape is None else torch.randn(shape)
        if offload:
            OffloadedWeights({0: module})
        pipeline = Pipeline({0: module}, "zb_h1", loss_fn=lambda y, _: y.square().mean(), num_microbatches=2)
        losses = [*pipeline.step(x, target=x), *pipeline.step(x, target=x)]
        sides.append((torch.stack(losses), grads_of(module) | dict(module.named_buffers())))
    assert_same(sides[1], sides[0])


def test_without_a_pipeline():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain = copy.deepcopy(module)
    weights = OffloadedWeights({0: module})
    x, dy = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    (grad,), later = backward_input(module(x), dy, x)
    weights.around_w(0, StageWorker(0, module, is_last=True).accumulate)(0, later)
    (expected,), later = backward_input(plain(x), dy, x)
    later.accumulate()
    assert torch.equal(grad, expected)
    assert all(torch.equal(g, grads_of(plain)[name]) for name, g in grads_of(module).items())
    for each in (module, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert torch.equal(module(x), plain(x))  # no buffer has the weights of before
    with pytest.raises(TypeError, match="copy them before"):
        copy.deepcopy(module)


# ---------------------------------------------------------------- what is refused


class Holds(nn.Module):
    """A block that leaves its weight somewhere."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self, x)


class KeepsOnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight.detach()
        return x @ weight

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.weight.t(), None


def keep_in_attribute(module, x):
    module.kept = module.linear.weight.detach()
    return module.linear(x)


HOLDERS = {
    "returned": lambda module, x: (module.linear(x), module.linear.weight.t()),
    "attribute": keep_in_attribute,
    "ctx": lambda module, x: KeepsOnCtx.apply(x, module.linear.weight),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_block_that_keeps_its_weight_is_refused_in_its_first_forward(name):
    """The buffer will hold other weights: what was kept would change in silence."""
    stage = nn.Sequential(Holds(HOLDERS[name]))
    OffloadedWeights({0: stage})
    with pytest.raises(RuntimeError, match="forward of 0 of stage 0, something refers to a weight"):
        stage(torch.randn(2, 4))


def tied():
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage[1].weight = stage[0].weight
    return stage


def changed(change):
    stage = nn.Sequential(nn.Linear(4, 4))
    change(stage)
    return stage


REFUSED = {
    "0 of stage 0 and 1 of stage 0 share a parameter": tied,
    "scale of stage 0 belongs to no block": lambda: changed(
        lambda stage: stage.register_parameter("scale", nn.Parameter(torch.ones(4)))
    ),
    "another forward of its own": lambda: changed(lambda stage: recompute(stage[0])),
    "a main_grad": lambda: changed(lambda stage: setattr(stage[0].weight, "main_grad", torch.zeros(4, 4))),
    "offloaded already": lambda: changed(lambda stage: OffloadedWeights({0: stage})),
    "sparse": lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_stages_that_cannot_be_offloaded_are_refused_and_left_as_they_are(said):
    stage = REFUSED[said]()
    before = {name: each.data_ptr() for name, each in stage.named_parameters()}
    with pytest.raises(ValueError, match=said):
        OffloadedWeights({0: stage})
    assert {name: each.data_ptr() for name, each in stage.named_parameters()} == before


def test_a_weight_that_changes_between_f_and_b_is_refused():
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    OffloadedWeights({0: stage})
    x = torch.randn(2, 4, requires_grad=True)
    y = stage(x)
    torch.optim.SGD(stage.parameters(), lr=0.1)
    with torch.no_grad():
        stage[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="a weight of 1 of stage 0 was changed in place between F and B"):
        backward_input(y, torch.ones(2, 4), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_gradients_are_those_without():
    """Not run anywhere yet."""
    sides = []
    for offload in (False, True):
        torch.manual_seed(0)
        stages = {0: Deep().build_stage(0, 1)}
        if offload:
            OffloadedWeights(stages, "cuda")
            assert {each.device.type for each in stages[0].parameters()} == {"cpu"}
        else:
            stages[0].cuda()
        pipeline = Pipeline(stages, "zb_h1", loss_fn=F.mse_loss, num_microbatches=4)
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).cuda()
        losses = [*pipeline.step(x, target=x), *pipeline.step(x, target=x)]
        grads = {name: each.cpu() for name, each in grads_of(stages[0]).items()}
        sides.append((torch.stack(losses).cpu(), grads))
    assert_same(sides[1], sides[0])


# ---- What an attack found: silently wrong before


class CallsTheNext(nn.Module):
    """Its first block calls the second one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Outer(), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x, self.second)


class Outer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, inner):
        return super().forward(inner(x))


class Clamps(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_block_within_a_block_and_a_forward_that_changes_a_weight_are_refused():
    x = torch.randn(2, 4)
    nested = CallsTheNext()
    OffloadedWeights({0: nested})
    with pytest.raises(RuntimeError, match="second of stage 0 is called within the forward of first of st"):
        nested(x)
    clamping = nn.Sequential(Clamps(4, 4))
    OffloadedWeights({0: clamping})
    with pytest.raises(RuntimeError, match="0 of stage 0 changes a weight in place"):
        clamping(x)


def test_weights_that_get_other_memory_between_steps_are_taken_in():
    losses = []
    for offload in (False, True):
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if offload:
            OffloadedWeights({0: stage})
        pipeline = Pipeline({0: stage}, "1f1b", num_microbatches=2, loss_fn=F.mse_loss)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            losses.append(torch.stack(pipeline.step(x, target=x)))
            for parameter in pipeline.parameters():
                parameter.data = parameter.data * 0.5
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
    stage.zero_grad()
    stage[0].weight.data = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="got another shape or dtype after OffloadedWeights was made"):
        pipeline.step(x, target=x)
