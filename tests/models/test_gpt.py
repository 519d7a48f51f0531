"""The GPT against torch's own transformer layer."""

import torch
from torch import nn

from zbpp.models.gpt import Gpt

SIZES = {"vocab_size": 19, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 8}

# ours -> nn.TransformerEncoderLayer's
NAMES = {
    "attention_norm": "norm1",
    "attention.query_key_value.": "self_attn.in_proj_",
    "attention.output": "self_attn.out_proj",
    "mlp_norm": "norm2",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
}


def renamed(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def torch_layer(block):
    layer = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation="gelu", norm_first=True, batch_first=True, dtype=torch.float64
    )
    state = {renamed(name): value for name, value in block.state_dict().items()}
    for name in ("self_attn.in_proj_weight", "self_attn.in_proj_bias"):
        # ours is ordered by head, torch's by query, key and value
        state[name] = state[name].unflatten(0, (4, 3, 4)).transpose(0, 1).flatten(0, 2)
    layer.load_state_dict(state)
    return layer


def perturbed(model):
    """Biases and scales away from 0 and 1, so that they count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def tokens():
    return torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(1))


def test_gpt_is_torchs_pre_norm_transformer():
    model = perturbed(Gpt(**SIZES).build_stage(0, 1).double())
    mask = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
    x = model.embedding.token.weight[tokens()] + model.embedding.position.weight
    for block in (model.layer_0, model.layer_1):
        x = torch_layer(block)(x, src_mask=mask)
    logits = model.head.weight @ model.norm(x)[..., None]
    torch.testing.assert_close(model(tokens()), logits[..., 0], rtol=1e-11, atol=1e-12)


def test_dropout_acts_in_training_only():
    model, plain = Gpt(**SIZES, dropout=0.5).build_stage(0, 1), Gpt(**SIZES).build_stage(0, 1)
    assert not torch.equal(model(tokens()), plain(tokens()))
    assert torch.equal(model.eval()(tokens()), plain(tokens()))
