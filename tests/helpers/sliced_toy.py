"""A small model whose attention takes sequences in slices, and the schedules that have slices."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from zbpp.stage_api import IGNORED, mean_over_tokens

WORDS, SIZE, TIME = 11, 8, 12
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb"]
SCHEDULES += ["zb_v", "v_half", "v_min", "dualpipe_v"]


class Attention(nn.Module):
    """Causal attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x, sequence_slice=None):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        start = 0
        if sequence_slice is not None:
            key = sequence_slice.whole((self, "key"), key)
            value = sequence_slice.whole((self, "value"), value)
            start = sequence_slice.start
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=x.device).tril(start)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Stage(nn.Sequential):
    def forward(self, x, sequence_slice=None, scale=None):
        for module in self:
            x = module(x, sequence_slice) if isinstance(module, Attention) else module(x)
        if scale is not None:
            x = x * scale.unsqueeze(-1)
        zbpp.auxiliary_loss("size", 0.1 * x.square().mean(dim=(-2, -1)).mean())
        return x


class Toy:
    """Four layers of attention between an embedding and a head, under any cut."""

    stage = Stage

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        layers = {f"layer_{i}": Attention() for i in range(4)}
        self.parts = {"embedding": nn.Embedding(WORDS, SIZE), **layers, "head": nn.Linear(SIZE, WORDS)}
        for each in self.parts.values():
            each.to(dtype)

    def build_stage(self, index, num_stages):
        size = 4 // num_stages
        names = [f"layer_{i}" for i in range(index * size, (index + 1) * size)]
        names = [*["embedding"] * (index == 0), *names, *["head"] * (index == num_stages - 1)]
        return self.stage(OrderedDict((name, self.parts[name]) for name in names))

    @mean_over_tokens
    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def grads_of(stages):
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}
