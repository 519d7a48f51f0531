"""A traced module's stages against the module itself: plain autograd, float64."""

import copy

import pytest
import torch
from helpers.processes import run_ranks
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.nn import functional as F

from zbpp import Pipeline, plan, trace_stages
from zbpp.cutting.stage import TracedStage

NUM_MICROBATCHES = 4


class Tied(nn.Module):
    """A decoder whose head is its embedding, with a mask by keyword and a skip over the middle."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.gate = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, tokens, *, is_scaled=True, mask=None):
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x * self.scale if is_scaled else x, src_key_padding_mask=mask)
        return {"logits": self.head(x + self.gate(first))}


class UNet(nn.Module):
    """Convolutions, each way down joined to the way up; an activation in place, statistics in a buffer."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.up2 = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        outer = self.down1(x)
        inner = F.relu(self.down2(outer))
        with torch.no_grad():
            level = outer.mean()
        y = self.up2(self.middle(inner) + inner).relu_()
        return self.up1(torch.cat([y, outer], 1)) - level


def bert():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "bert", vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def vit():
    from transformers import AutoConfig, AutoModelForImageClassification

    config = AutoConfig.for_model(
        "vit", hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=8,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def tokens(*shape):
    return torch.randint(12, shape)


def logits(output, target):
    return F.cross_entropy(output["logits"].flatten(0, -2), target.flatten())


# model, batch by microbatches (args, kwargs, target), split points, loss
MODELS = {
    "tied": (
        Tied,
        lambda: ((tokens(8, 5),), {"mask": torch.rand(8, 5) < 0.2, "is_scaled": True}, tokens(8, 5)),
        ["layers.1", "layers.2"],
        logits,
    ),
    "u-net": (
        UNet,
        lambda: ((torch.randn(8, 2, 8, 8).double(),), {}, torch.randn(8, 2, 8, 8).double()),
        {"down2": SplitPoint.END, "up2": SplitPoint.BEGINNING},
        F.mse_loss,
    ),
    "bert": (
        bert,
        lambda: (
            (),
            {"input_ids": tokens(8, 6), "attention_mask": (torch.rand(8, 6) < 0.8).long()},
            tokens(8) % 2,
        ),
        ["bert.encoder.layer.1", "bert.encoder.layer.2"],
        logits,
    ),
    "vit": (
        vit,
        lambda: ((), {"pixel_values": torch.randn(8, 3, 8, 8).double()}, tokens(8) % 2),
        ["vit.layers.1", "vit.layers.2"],
        logits,
    ),
}


def first_microbatch(args, kwargs):
    def cut(value):
        return value[: len(value) // NUM_MICROBATCHES] if isinstance(value, torch.Tensor) else value

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def made(kind):
    torch.manual_seed(0)
    make, batch, points, loss = MODELS[kind]
    module = make().double().train()
    return module, batch(), points, loss


def plain(module, args, kwargs, target, loss_fn):
    """Mean loss and gradients of autograd, one microbatch after the other."""
    def cuts(value):
        is_tensor = isinstance(value, torch.Tensor)
        return value.chunk(NUM_MICROBATCHES) if is_tensor else [value] * NUM_MICROBATCHES

    losses = []
    for index in range(NUM_MICROBATCHES):
        outputs = module(*[cuts(each)[index] for each in args], **{n: cuts(v)[index] for n, v in kwargs.items()})
        loss = loss_fn(outputs, cuts(target)[index])
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


def assert_same_gradients(found, expected):
    largest = max(each.grad.abs().max() for each in expected.values() if each.grad is not None)
    for name, parameter in expected.items():
        if parameter.grad is None:
            assert found[name].grad is None
            continue
        bound = 1e-12 * max(parameter.grad.abs().max(), 1e-6 * largest)
        assert (found[name].grad - parameter.grad).abs().max() <= bound, name


def named(stages):
    return {name: each for stage in stages.values() for name, each in stage.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_a_traced_module_are_plain_autograds(kind):
    """Skips over stages, a mask by keyword, a tied head, buffers, in-place activations, no_grad inside."""
    module, (args, kwargs, target), points, loss_fn = made(kind)
    whole = copy.deepcopy(module)
    example, example_kwargs = first_microbatch(args, kwargs)
    stages = trace_stages(module, example, points, example_kwargs=example_kwargs)
    timetable = plan("interleaved_zb", num_ranks=1, num_microbatches=NUM_MICROBATCHES, stages_per_rank=3)
    pipeline = Pipeline(stages, timetable, loss_fn)
    losses = pipeline.step(*args, target=target, **kwargs)
    torch.testing.assert_close(losses, plain(whole, args, kwargs, target, loss_fn), rtol=1e-12, atol=0)
    # The module's own parameters: an optimizer made from it sees the gradients.
    assert_same_gradients(dict(module.named_parameters()), dict(whole.named_parameters()))
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-12, atol=0)
    assert all(each is module.get_parameter(name) for name, each in named(stages).items())
    assert sorted(named(stages)) == sorted(dict(module.named_parameters()))
    states = [stage.state_dict() for stage in stages.values()]
    assert sorted(name for state in states for name in state) == sorted(module.state_dict())
