"""find_non_finite against hooks of plain torch on the whole model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from zbpp import Pipeline, find_non_finite, plan
from zbpp.autograd.compiled.compiled_forward import compile_stage

M, ROWS, WIDTH = 4, 8, 6


class Spoil(nn.Module):
    """The identity, but for rows that are marked by a 3 in the first column of the batch."""

    def __init__(self, forward=None, backward=None):
        super().__init__()
        self.spoiled, self.spoils_gradient = forward, backward

    def forward(self, x):
        marked = (x.detach()[:, :1] == 3).expand_as(x)
        if self.spoiled is not None:
            x = x.masked_fill(marked, self.spoiled)
        if self.spoils_gradient is not None and bool(marked.any()):
            x.register_hook(lambda gradient: gradient.masked_fill(marked, math.nan))
        return x


class Keep(nn.Module):
    """Linear, tanh and dropout that leave the first column alone, which marks rows."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH - 1), nn.Dropout(0.3)

    def forward(self, x):
        return torch.cat([x[:, :1], self.drop(self.linear(x).tanh())], dim=1)


class Model:
    def __init__(self, spoils=None, place=0):
        self.spoils, self.place = spoils, place

    def layers(self):
        torch.manual_seed(0)
        layers = [nn.Sequential(Keep(), Spoil()) for _ in range(4)]
        layers[self.place][1] = Spoil(**(self.spoils or {}))
        return layers

    def build_stage(self, index, num_stages):
        size = 4 // num_stages
        mine = list(enumerate(self.layers()))[size * index : size * (index + 1)]
        return nn.Sequential(*[]) if not mine else _named({f"layer{i}": layer for i, layer in mine})

    def loss(self, output, target):
        return F.mse_loss(output, target)


def _named(modules):
    stage = nn.Sequential()
    for name, module in modules.items():
        stage.add_module(name, module)
    return stage


def batch(marked=None):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    if marked is not None:
        x[marked, 0] = 3
    return x, y


def plain_first_output(model, x):
    """The first module of the whole model whose output is not finite, by forward hooks of plain torch."""
    whole, found = _named({f"layer{i}": layer for i, layer in enumerate(model.layers())}), []
    for name, module in whole.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: None if output.isfinite().all() else found.append(name)
        )
    whole(x)
    return found[0]


def one_rank(model, schedule="zb_v", **options):
    return Pipeline(model, plan(schedule, 1, M), **options)


def test_a_steps_values_were_finite_or_the_step_is_left_as_it_was():
    x, y = batch()
    with one_rank(Model()) as pipeline:
        before = {name: each.clone() for name, each in pipeline.state_dict().items()}
        losses, state = pipeline.step(x, target=y), torch.get_rng_state()
        assert find_non_finite(pipeline, x, target=y) is None
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(before[name], each) for name, each in pipeline.state_dict().items())
        assert pipeline.num_steps == 1
        assert all(each.grad is None for each in pipeline.parameters())
        following = pipeline.step(x, target=y)
    with one_rank(Model()) as other:
        assert [torch.stack(other.step(x, target=y)).tolist() for _ in range(2)] == [
            torch.stack(each).tolist() for each in (losses, following)
        ]


@pytest.mark.parametrize("value, word", [(math.nan, "NaN"), (math.inf, "Infinity")])
def test_the_first_output_is_that_of_forward_hooks_on_the_whole_model(value, word):
    x, y = batch(marked=5)  # of microbatch 2
    for place in (0, 2):
        model = Model({"forward": value}, place)
        expected = plain_first_output(model, x)
        with one_rank(model) as pipeline:
            pipeline.step(x, target=y)
            found = find_non_finite(pipeline, x, target=y)
        assert (found.kind, found.value, found.name) == ("output", word, expected) == (
            "output", word, f"layer{place}.1",
        )  # fmt: skip
        assert (found.stage, found.microbatch) == (place // 2, 2)
        assert str(found) == (
            f"{word} first appeared in the output of layer{place}.1, stage {place // 2}, microbatch 2 "
            "(its input is finite)"
        )


@pytest.mark.parametrize("what", ["input", "target", "parameter", "loss", "auxiliary loss", "mask"])
def test_the_other_places(what):
    model, (x, y) = Model(), batch()
    if what == "input":
        x[3] = math.nan
    elif what == "target":
        y[3] = math.inf
    elif what == "loss":
        model.loss = lambda output, target: (
            F.mse_loss(output, target) * (math.nan if bool((target == 7).any()) else 1)
        )
        y[3, 2] = 7
    with one_rank(model) as pipeline:
        if what == "parameter":
            with torch.no_grad():
                pipeline.stages[1].layer3[0].linear.bias[2] = math.nan
        elif what == "auxiliary loss":
            root = pipeline.stages[0].layer1[1]
            root.forward = lambda x: (zbpp.auxiliary_loss("z", x.sum().abs() * math.inf), x)[1]
        elif what == "mask":  # -Infinity on purpose, and never a NaN
            pipeline.stages[1].layer3[1] = Masked()
        pipeline.step(x, target=y)
        found = find_non_finite(pipeline, x, target=y)
    if what == "mask":
        assert found is None
        return
    assert (
        str(found).partition(" first appeared in the ")[2]
        == {
            "input": "output of layer0.0.linear, stage 0, microbatch 1 (NaN in its input)",
            "target": "loss, stage 1, microbatch 1",
            "parameter": "output of layer3.0.linear, stage 1, microbatch 0 (NaN in its parameters)",
            "loss": "loss, stage 1, microbatch 1",
            "auxiliary loss": "auxiliary loss of z, stage 0, microbatch 0",
        }[what]
    )
    assert found.value == ("Infinity" if what in ("target", "auxiliary loss") else "NaN")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fill = Fill()

    def forward(self, x):
        return self.fill(x).nan_to_num(neginf=0.0)


class Fill(nn.Module):
    def forward(self, x):
        filled = x.masked_fill(x.detach() > x.detach().median(), -math.inf)
        assert filled.isneginf().any()
        return filled


def made_nan(x):
    """The square root of zeros, times zero: 0 in the forward, 0 * Infinity = NaN in the backward."""
    marked = x.detach()[:, :1] == 3
    return (x - torch.where(marked, x.detach(), x.detach() - 1)).sqrt() * torch.where(marked, 0.0, 1.0)


class Root(nn.Module):
    def forward(self, x):
        return made_nan(x)


def test_a_compiled_stage_is_searched_eager_and_stays_compiled():
    """It stayed eager for the rest of the run, since the search puts hooks on it."""
    torch.manual_seed(0)
    stage, (x, y) = nn.Sequential(Keep(), Root(), Keep()), batch(marked=5)
    compile_stage(stage, backend="eager")
    with Pipeline({0: stage}, plan("zb_h1", 1, M), F.mse_loss) as pipeline:
        pipeline.step(x, target=y)
        assert str(find_non_finite(pipeline, x, target=y)).startswith(
            "NaN first appeared in the gradient at the output of 0, stage 0, microbatch 2"
        )
        pipeline.step(x, target=y)
    assert [len(each) for each in stage.forward.bound.values()] == [1]
