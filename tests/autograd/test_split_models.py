"""The split backward of whole models: attention, recurrent, convolutional, and Hugging Face's, unmodified."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import assert_equals_plain, leaf, linear_weights

# ---------------------------------------------------------------- torch's own modules


@pytest.mark.parametrize("needs_weights", [False, True])
def test_self_attention_is_deferred(needs_weights):
    facts = assert_equals_plain(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: leaf(2, 5, 8),
        lambda module, x: module(x, x, x, need_weights=needs_weights)[: 1 + needs_weights],
    )
    # The packed bias goes through a view of its own: batch_first transposes the input.
    assert {"in_proj_weight", "out_proj.weight", "out_proj.bias"} <= facts.deferred


def test_cross_attention_is_deferred():
    """Three linear layers share one packed weight, each a part of it."""
    facts = assert_equals_plain(
        lambda: nn.MultiheadAttention(8, 2, dropout=0.2),
        lambda: (leaf(5, 2, 8), leaf(6, 2, 8), leaf(6, 2, 8)),
        lambda module, q, k, v: module(q, k, v)[0],
    )
    assert {"in_proj_weight", "out_proj.weight"} <= facts.deferred


def test_attention_with_separate_weights_and_added_keys_is_right():
    facts = assert_equals_plain(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        lambda: (leaf(5, 2, 8), leaf(6, 2, 6), leaf(6, 2, 4)),
        lambda module, q, k, v: module(q, k, v)[0],
    )
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= facts.deferred


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_is_deferred_but_for_its_norms(norm_first):
    facts = assert_equals_plain(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, norm_first=norm_first, batch_first=True),
        lambda: leaf(2, 5, 8),
    )
    assert {"linear1.weight", "linear2.weight", "self_attn.in_proj_weight"} <= facts.deferred
    norms = {f"norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert norms <= facts.computed <= norms | {"self_attn.in_proj_bias"}


def test_a_transformer_of_torch_is_right():
    assert_equals_plain(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda: (leaf(2, 5, 8), leaf(2, 4, 8)),
    )


RECURRENT = {
    "LSTM": lambda: nn.LSTM(4, 3, num_layers=2),
    "bidirectional LSTM": lambda: nn.LSTM(4, 3, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(4, 3, proj_size=2),
    "GRU": lambda: nn.GRU(4, 3),
    "RNN": lambda: nn.RNN(4, 3),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_waits_for_every_time_step(name):
    """Its weights are used once per step, and its output's parts are a tuple."""

    def call(module, x):
        output, hidden = module(x)
        return (output, *(hidden if isinstance(hidden, tuple) else (hidden,)))

    facts = assert_equals_plain(RECURRENT[name], lambda: leaf(6, 2, 4), call)
    assert {"weight_ih_l0", "weight_hh_l0"} <= facts.deferred


# ---------------------------------------------------------------- written as in torchvision and timm


class BasicBlock(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != outer:
            shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outer))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


@pytest.mark.parametrize("needs_grad", [False, True], ids=["images", "activations"])
def test_a_resnet_is_deferred_but_for_its_norms(needs_grad):
    facts = assert_equals_plain(ResNet, lambda: torch.randn(2, 3, 24, 24).requires_grad_(needs_grad))
    convolutions = {n for n, m in ResNet().named_modules() if isinstance(m, nn.Conv2d)}
    assert facts.deferred == {f"{name}.weight" for name in convolutions} | {"fc.weight", "fc.bias"}


class VitBlock(nn.Module):
    def __init__(self, size, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.scale1, self.num_heads = nn.Parameter(torch.full((size,), 0.1)), num_heads

    def forward(self, x):
        batch, length, size = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        attention = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.scale1 * self.proj((attention @ v).transpose(1, 2).reshape(batch, length, size))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, size))
        self.positions = nn.Parameter(torch.randn(1, 17, size))
        self.blocks = nn.Sequential(VitBlock(size, 2), VitBlock(size, 2))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def test_a_vit_is_deferred_but_for_norms_and_tokens():
    facts = assert_equals_plain(Vit, lambda: torch.randn(2, 3, 16, 16))
    assert facts.deferred == linear_weights(Vit()) | {"patches.weight", "patches.bias"}
    assert {"token", "positions", "blocks.0.scale1"} <= facts.computed


class Unet(nn.Module):
    """Skip connections across a transposed convolution, two heads."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Conv2d(5, 2, 1)

    def forward(self, x):
        low = F.silu(self.down(x))
        up = self.norm(self.up(torch.cat([low, F.silu(self.middle(low))], 1)))
        return self.out(torch.cat([up, F.interpolate(low.mean(1, keepdim=True), scale_factor=2)], 1)), low


def test_a_unet_is_deferred_but_for_its_norm():
    facts = assert_equals_plain(Unet, lambda: leaf(2, 1, 8, 8))
    assert {"down.weight", "middle.weight", "up.weight", "out.weight"} <= facts.deferred


# ---------------------------------------------------------------- Hugging Face, from configs, unmodified


def hugging_face(name, **settings):
    """A maker of causal LMs."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, **settings}
    config = getattr(transformers, f"{name}Config")(**small)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


LLAMA_LIKE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


def tokens():
    return torch.randint(31, (2, 7))


def with_loss(model, ids):
    found = model(input_ids=ids, labels=ids)
    return found.loss, found.logits


def test_llama_of_hugging_face():
    make_model = hugging_face("Llama", **LLAMA_LIKE)
    facts = assert_equals_plain(make_model, tokens, with_loss)
    linears = linear_weights(make_model())
    assert len(linears) == 3 * 7 + 1
    assert facts.deferred == linears | {"model.embed_tokens.weight"}


def test_llama_of_hugging_face_as_it_returns():
    """Its ModelOutput is a mapping; a Cache and a loss of None would be passed over."""
    make_model = hugging_face("Llama", **LLAMA_LIKE)
    assert_equals_plain(
        make_model, tokens, lambda model, ids: model(input_ids=ids, output_hidden_states=False)
    )


def test_llama_of_hugging_face_from_embeddings():
    """A middle stage: what comes in needs grad."""
    make_model = hugging_face("Llama", **LLAMA_LIKE)
    facts = assert_equals_plain(
        make_model, lambda: leaf(2, 7, 16), lambda model, x: model(inputs_embeds=x).logits
    )
    assert facts.deferred == linear_weights(make_model())


def test_gpt2_of_hugging_face():
    """Conv1D layers, and a head tied to the embedding: all uses wait, so both do."""
    make_model = hugging_face("GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=16)
    facts = assert_equals_plain(make_model, tokens, with_loss)
    model = make_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    conv1d = {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    assert len(conv1d) == 2 * 4
    assert {f"{name}.weight" for name in conv1d} <= facts.deferred
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= facts.deferred
    assert {name.split(".")[-2] for name in facts.computed} == {"ln_1", "ln_2", "ln_f"}


def test_qwen3_of_hugging_face():
    """Norms on queries and keys, tied embeddings."""
    make_model = hugging_face("Qwen3", **(LLAMA_LIKE | {"head_dim": 4, "tie_word_embeddings": True}))
    facts = assert_equals_plain(make_model, tokens, with_loss)
    assert facts.deferred == linear_weights(make_model()) - {"lm_head.weight"} | {"model.embed_tokens.weight"}


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_of_hugging_face(experts):
    """A router that data decides, one weight for all experts, an auxiliary loss over all routers."""
    make_model = hugging_face(
        "Mixtral",
        **LLAMA_LIKE,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        sliding_window=None,
        experts_implementation=experts,
    )
    dtype, tolerance = (torch.float32, 1e-5) if experts == "grouped_mm" else (torch.float64, 1e-12)
    facts = assert_equals_plain(make_model, tokens, with_loss, dtype=dtype, tolerance=tolerance)
    weights = {
        f"model.layers.{i}.mlp.experts.{name}" for i in range(3) for name in ("gate_up_proj", "down_proj")
    }
    assert linear_weights(make_model()) <= facts.deferred
    assert weights <= facts.deferred
