"""Cases: whole models."""

import pytest
import torch
from torch import nn

from helpers.split import Case, leaf

RECURRENT = {
    "LSTM": lambda: nn.LSTM(4, 3, num_layers=2),
    "bidirectional LSTM": lambda: nn.LSTM(4, 3, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(4, 3, proj_size=2),
    "GRU": lambda: nn.GRU(4, 3),
    "RNN": lambda: nn.RNN(4, 3),
}


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


def self_attention(needs_weights=False) -> Case:
    return Case(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: leaf(2, 5, 8),
        lambda module, x: module(x, x, x, need_weights=needs_weights)[: 1 + needs_weights],
    )


def cross_attention() -> Case:
    return Case(
        lambda: nn.MultiheadAttention(8, 2, dropout=0.2),
        lambda: (leaf(5, 2, 8), leaf(6, 2, 8), leaf(6, 2, 8)),
        lambda module, q, k, v: module(q, k, v)[0],
    )


def attention_with_separate_weights() -> Case:
    return Case(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        lambda: (leaf(5, 2, 8), leaf(6, 2, 6), leaf(6, 2, 4)),
        lambda module, q, k, v: module(q, k, v)[0],
    )


def encoder_layer(norm_first=False) -> Case:
    return Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, norm_first=norm_first, batch_first=True),
        lambda: leaf(2, 5, 8),
    )


def transformer() -> Case:
    return Case(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda: (leaf(2, 5, 8), leaf(2, 4, 8)),
    )


def recurrent_network(name="LSTM") -> Case:
    def call(module, x):
        output, hidden = module(x)
        return (output, *(hidden if isinstance(hidden, tuple) else (hidden,)))

    return Case(RECURRENT[name], lambda: leaf(6, 2, 4), call)


def resnet(needs_grad=False) -> Case:
    return Case(ResNet, lambda: torch.randn(2, 3, 24, 24).requires_grad_(needs_grad))


def hf_llama() -> Case:
    make_model = hugging_face("Llama", **LLAMA_LIKE)
    return Case(make_model, tokens, with_loss)


def hf_gpt2() -> Case:
    make_model = hugging_face("GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return Case(make_model, tokens, with_loss)


def hf_mixtral(experts="eager") -> Case:
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
    return Case(make_model, tokens, with_loss, dtype=dtype, tolerance=tolerance)
