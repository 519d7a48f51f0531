"""What holds for every model: the cut changes nothing, and sizes that do not fit are refused."""

import pytest
import torch

from zbpp.models.emulated import Emulated
from zbpp.models.gpt import Gpt
from zbpp.models.layers import token_loss
from zbpp.models.llama import Llama
from zbpp.models.mlp import Mlp
from zbpp.partition import split_layers
from zbpp.stage_api import takes_slices

GPT = {"vocab_size": 19, "num_layers": 5, "hidden_size": 16, "num_heads": 4, "sequence_length": 8}
LLAMA = {**GPT, "num_kv_heads": 2}
MLP = {"num_layers": 5, "in_features": 3, "hidden_size": 7, "out_features": 2}
EMULATED = {"num_layers": 1, "f": 1, "b": 1, "w": 1}


def tokens():
    return torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(1))


def features():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


MODELS = [
    pytest.param(Gpt, GPT, tokens, id="gpt"),
    pytest.param(Llama, LLAMA, tokens, id="llama"),
    pytest.param(Mlp, MLP, features, id="mlp"),
]


def stages_of(model, num_stages):
    return [model.build_stage(index, num_stages) for index in range(num_stages)]


def parameters_of(model, num_stages):
    """(name, parameter) of all stages, in stage order."""
    return [pair for stage in stages_of(model, num_stages) for pair in stage.named_parameters()]


def whole(model):
    return model.build_stage(0, 1)


@pytest.mark.parametrize(("cls", "sizes", "batch"), MODELS)
def test_names_weights_and_outputs_do_not_depend_on_the_cut(cls, sizes, batch):
    model, uncut = cls(**sizes), parameters_of(cls(**sizes), 1)
    for num_stages in (2, 3, 4):
        cut, x = parameters_of(model, num_stages), batch()
        assert [name for name, _ in cut] == [name for name, _ in uncut]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(cut, uncut, strict=True))
        for stage in stages_of(model, num_stages):
            x = stage(x)
        assert torch.equal(x, whole(model)(batch()))


@pytest.mark.parametrize(("cls", "sizes", "batch"), MODELS)
def test_weights_depend_on_seed_and_name(cls, sizes, batch):
    matrices = [weight for _, weight in parameters_of(cls(**sizes), 1) if weight.ndim == 2]
    others = [weight for _, weight in parameters_of(cls(**sizes, seed=1), 1) if weight.ndim == 2]
    drawn = [weight.flatten()[0].item() for weight in matrices + others]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("cls", "sizes"), [(Gpt, GPT), (Llama, LLAMA)])
def test_weights_have_gpt2s_scale(cls, sizes):
    model = whole(cls(**{**sizes, "hidden_size": 128, "num_layers": 2}))
    residual = {"attention.output.weight": 0.01, "mlp.down.weight": 0.01}  # 0.02 / sqrt(2 * 2 layers)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            expected = residual.get(name.partition(".")[2], 0.02)
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name
            assert abs(weight.mean().item()) < expected / 5, name
        else:
            assert torch.all(weight == (0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize(("cls", "sizes"), [(Gpt, GPT), (Llama, LLAMA)])
def test_a_tied_head_has_the_embeddings_weight_whatever_the_cut(cls, sizes, num_stages):
    model, untied = cls(**sizes, tie_embeddings=True), cls(**sizes)
    stages = stages_of(model, num_stages)
    ((head, embedding),) = model.tied().items()
    first, last = stages[0].get_parameter(embedding), stages[-1].get_parameter(head)
    assert (first is last) == (num_stages == 1)
    assert torch.equal(first, last)
    assert torch.equal(first, whole(untied).get_parameter(embedding))
    assert not torch.equal(last, whole(untied).get_parameter(head))
    assert untied.tied() == {}
    counts = [sum(each.numel() for each in whole(each).parameters()) for each in (untied, model)]
    assert counts[0] - counts[1] == first.numel()


def test_token_loss_is_the_mean_negative_log_probability():
    """In float32 at least, whatever the logits are."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 8, 19, generator=generator, dtype=torch.float64)
    picked = logits.log_softmax(-1).gather(-1, tokens()[..., None])
    assert Gpt(**GPT).loss(logits, tokens()).item() == pytest.approx(-picked.mean().item(), rel=1e-14)
    assert Gpt(**GPT).loss(logits.bfloat16(), tokens()).dtype == torch.float32


def test_a_microbatch_without_a_target_has_no_loss_and_no_gradient():
    """With some targets the loss is torch's own mean over them."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    none = torch.full((2, 3), -100)
    loss = token_loss(logits, none)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
    some = none.clone()
    some[1, :2] = torch.tensor([4, 0])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some.flatten())
    torch.testing.assert_close(token_loss(logits, some), expected, rtol=1e-12, atol=0)


def test_mlp_is_linear_layers_with_relu_between():
    model = Mlp(**{**MLP, "num_layers": 3})
    weights = [weight for _, weight in parameters_of(model, 1) if weight.ndim == 2]
    x = features()
    for weight in weights[:-1]:
        x = torch.clamp(x @ weight.T, min=0)
    torch.testing.assert_close(whole(model)(features()), x @ weights[-1].T)


def test_layers_are_split_evenly_or_as_told():
    """Earlier stages take the rest."""
    for num_layers, num_stages, expected in ((8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (6, 1, [6])):
        assert list(map(len, split_layers(num_layers, num_stages))) == expected
    assert list(map(len, stages_of(Mlp(**MLP, layers_per_stage=[1, 3, 1]), 3))) == [1, 3, 1]


REFUSALS = [
    (
        Gpt,
        GPT,
        {"num_heads": 5},
        "divisible by num_heads=5: write hidden_size=15 or 20",
    ),
    (Gpt, GPT, {"dropout": 1.0}, "dropout=1.0"),
    (Gpt, GPT, {"num_layers": 0}, "num_layers=0"),
    (Llama, LLAMA, {"num_heads": 3}, "num_heads=3"),
    (Llama, LLAMA, {"num_kv_heads": 3}, "num_kv_heads=3"),
    (Llama, LLAMA, {"num_kv_heads": 0}, "num_kv_heads=0"),
    (Llama, LLAMA, {"hidden_size": 12}, "heads of 3 numbers"),
    (Llama, LLAMA, {"rope_theta": float("nan")}, "rope_theta=nan"),
    (Mlp, MLP, {"hidden_size": 0}, "hidden_size=0"),
    (Emulated, EMULATED, {"hidden_size": 0}, "hidden_size=0"),
    (Emulated, EMULATED, {"num_layers": 3, "f": [1, 2]}, r"f=\[1, 2\] has 2 times for 3 layers"),
    (Emulated, EMULATED, {"b": -1}, "b=-1"),
    (Emulated, EMULATED, {"w": float("inf")}, "w=inf"),
    # cuts into 6 stages
    (Mlp, MLP, {"layers_per_stage": None}, "num_layers=5"),
    (Mlp, MLP, {"layers_per_stage": [3, 2]}, r"layers_per_stage=\[3, 2\] is for 2 stages"),
    (Mlp, MLP, {"layers_per_stage": 3}, "layers_per_stage=3 is no list of whole numbers"),
    (Mlp, MLP, {"layers_per_stage": [2, 0, 1, 1, 0, 1]}, "leaves stage 1 empty"),
    (Mlp, MLP, {"layers_per_stage": [1, 1, 1, 1, 1, 3]}, "adds up to 8"),
]


@pytest.mark.parametrize(("cls", "sizes", "change", "message"), REFUSALS)
def test_sizes_and_cuts_that_do_not_fit_are_refused(cls, sizes, change, message):
    with pytest.raises(ValueError, match=message):
        cls(**{**sizes, **change}).build_stage(0, 6)


@pytest.mark.parametrize(
    ("index", "num_stages", "message"), [(3, 3, "stage 3"), (-1, 3, "stage -1"), (0, 0, "num_stages=0")]
)
def test_a_stage_out_of_range_is_refused(index, num_stages, message):
    with pytest.raises(ValueError, match=message):
        Mlp(**MLP).build_stage(index, num_stages)


@pytest.mark.parametrize(("cls", "sizes"), [(Gpt, GPT), (Llama, LLAMA)])
def test_a_sequence_longer_than_the_model_is_refused(cls, sizes):
    with pytest.raises(ValueError, match="sequence_length=8"):
        cls(**sizes).build_stage(0, 2)(torch.zeros(1, 9, dtype=torch.int64))


def test_a_stage_takes_slices_or_says_that_it_mixes_no_time():
    """A convolution along time would see nothing of earlier slices."""
    assert not takes_slices(whole(Mlp(**MLP)), 0)
    assert not takes_slices(whole(Emulated(**EMULATED)), 0)
    stage = torch.nn.Conv1d(3, 3, 2)
    with pytest.raises(ValueError, match="stage 4, a Conv1d, can't be run in slices .* mixes_time = False"):
        takes_slices(stage, 4)
    stage.mixes_time = False
    assert not takes_slices(stage, 4)
