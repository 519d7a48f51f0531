"""The Llama against one written from the papers: complex rotations, repeated heads, a plain softmax."""

import pytest
import torch

from zbpp.models.llama import Llama
from zbpp.models.llama_layer import Rotary, default_intermediate

SIZES = {"vocab_size": 19, "num_layers": 2, "hidden_size": 24, "num_heads": 4, "sequence_length": 8}
THETA, EPS = 500.0, 1e-5


def rotate(x):
    """RoPE: the pair (i, i + d/2) is one complex number, turned by position * theta^(-2i/d)."""
    size, time = x.shape[-1], x.shape[-2]
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    powers = torch.tensor([THETA ** (-2 * i / size) for i in range(size // 2)], dtype=x.dtype)
    angles = torch.arange(time, dtype=x.dtype)[:, None] * powers
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def heads(x, weight, num_heads):
    return torch.stack((x @ weight.T).chunk(num_heads, dim=-1), dim=1)


def naive_attention(x, weights, num_heads, num_kv_heads):
    """Query head h uses key and value head h // (num_heads / num_kv_heads)."""
    query = rotate(heads(x, weights["query.weight"], num_heads))
    key = rotate(heads(x, weights["key.weight"], num_kv_heads))
    value = heads(x, weights["value.weight"], num_kv_heads)
    outputs = []
    for head in range(num_heads):
        group = head // (num_heads // num_kv_heads)
        scores = query[:, head] @ key[:, group].transpose(-1, -2) / query.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, group])
    return torch.cat(outputs, dim=-1) @ weights["output.weight"].T


def naive_norm(x, scale):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale


def naive_mlp(x, weights):
    gate = x @ weights["gate.weight"].T
    return (gate / (1 + torch.exp(-gate)) * (x @ weights["up.weight"].T)) @ weights["down.weight"].T


def naive_llama(tokens, model, num_heads, num_kv_heads):
    x = model.embedding.weight[tokens]
    for layer in (model.layer_0, model.layer_1):
        normed = naive_norm(x, layer.attention_norm.weight)
        x = x + naive_attention(normed, layer.attention.state_dict(), num_heads, num_kv_heads)
        x = x + naive_mlp(naive_norm(x, layer.mlp_norm.weight), layer.mlp.state_dict())
    return naive_norm(x, model.norm.weight) @ model.head.weight.T


def perturbed(model):
    """Weights large enough that attention is far from uniform, and scales away from 1."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def close(actual, expected):
    # The rotation table is kept in float32, whatever the model is.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_llama_is_the_naive_one(num_kv_heads):
    llama = Llama(**SIZES, num_kv_heads=num_kv_heads, rope_theta=THETA, norm_eps=EPS)
    model = perturbed(llama.build_stage(0, 1).double())
    tokens = torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(1))
    close(model(tokens), naive_llama(tokens, model, 4, num_kv_heads))


def test_rotation_keeps_the_dtype_of_half_precision():
    x = torch.ones(1, 1, 8, 6, dtype=torch.bfloat16)
    assert Rotary(6, 8, THETA)(x).dtype == torch.bfloat16


@pytest.mark.parametrize(("hidden_size", "expected"), [(24, 64), (768, 2048), (4096, 10944)])
def test_the_default_intermediate_size_is_eight_thirds(hidden_size, expected):
    assert default_intermediate(hidden_size) == expected
    assert 0 <= expected - 8 * hidden_size / 3 < 64
