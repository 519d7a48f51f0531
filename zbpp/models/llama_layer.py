"""One layer of a Llama, and the sizes that a Llama is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.models.experts import MixtureOfExperts
from zbpp.models.flops import head_in_layers
from zbpp.models.layers import (
    Block,
    check_divides,
    check_length,
    check_positive,
    merge_heads,
    split_heads,
)


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """The sizes of a Llama, by the names of Llama's arguments. Raises ValueError for sizes that don't fit."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    sequence_length: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    experts: int | None
    experts_per_token: int
    balance_loss: float

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size, num_layers=self.num_layers, sequence_length=self.sequence_length
        )
        check_positive(intermediate_size=self.intermediate_size)
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta}: write a number above 0, such as 10000")
        check_heads(self.hidden_size, self.num_heads, self.num_kv_heads)
        if self.experts is not None:
            check_experts(self.experts, self.experts_per_token, self.balance_loss)

    @property
    def head_size(self) -> int:
        """The numbers in one head."""
        return self.hidden_size // self.num_heads

    def block(self) -> Block:
        """One layer."""
        rotary = Rotary(self.head_size, self.sequence_length, self.rope_theta)
        return Block(
            attention_norm=nn.RMSNorm(self.hidden_size, eps=self.norm_eps),
            attention=Attention(self.hidden_size, self.num_heads, self.num_kv_heads, rotary),
            mlp_norm=nn.RMSNorm(self.hidden_size, eps=self.norm_eps),
            mlp=self._mlp(),
        )

    def _mlp(self) -> nn.Module:
        if self.experts is None:
            return SwiGlu(self.hidden_size, self.intermediate_size)
        sizes = self.hidden_size, self.intermediate_size, self.experts, self.experts_per_token
        return MixtureOfExperts(*sizes, self.balance_loss)

    def head_in_layers(self) -> float:
        """The cost of the head, as a multiple of a layer's."""
        hidden, kv_size = self.hidden_size, self.head_size * self.num_kv_heads
        num_mlps = 1 if self.experts is None else self.experts_per_token
        return head_in_layers(
            layer_parameters=hidden * (2 * hidden + 2 * kv_size + 3 * num_mlps * self.intermediate_size),
            hidden_size=hidden,
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
        )

    def divided(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides among ranks."""
        names = ("num_heads", "num_kv_heads", "intermediate_size")
        return {name: getattr(self, name) for name in names}

    def library_config(self) -> Any:
        """The sizes as transformers' LlamaConfig; with experts as its MixtralConfig."""
        from transformers import LlamaConfig, MixtralConfig

        sizes: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.experts is None:
            return LlamaConfig(**sizes)
        return MixtralConfig(
            **sizes,
            num_local_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            router_aux_loss_coef=self.balance_loss,
        )


class Rotary(nn.Module):
    """Rotates each pair of numbers (i, i + d/2) of a head by the angle position x theta^(-2i/d).

    [batch, head, time, d] in and out. The pairs are those of Hugging Face's Llama. position_ids [batch,
    time]: by default from 0 on.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, sequence_length: int, theta: float) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        # float64 until the table is made: at position 10,000 a float32 angle is off by 1e-3.
        # On the CPU: stages are built under torch.device("meta"), where tensors have no values.
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size
        positions = torch.arange(sequence_length, dtype=torch.float64, device="cpu")
        angles = positions[:, None] * theta**-exponents
        # Not in the state dict: the tables follow from the model's sizes.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        time = x.shape[-2]
        check_length(time, self.sequence_length)
        if position_ids is None:
            cos, sin = self.cos[:time], self.sin[:time]
        else:
            cos, sin = self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, [batch, time, hidden] in and out.

    position_ids and mask: see documents.py; None: one document a row.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        kv_size = hidden_size // num_heads * num_kv_heads
        self.head_size = hidden_size // num_heads
        self.is_grouped = num_kv_heads != num_heads
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, kv_size, bias=False)
        self.value = nn.Linear(hidden_size, kv_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        query = self.rotary(split_heads(self.query(x), self.head_size), position_ids)
        key = self.rotary(split_heads(self.key(x), self.head_size), position_ids)
        value = split_heads(self.value(x), self.head_size)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        projected: Tensor = self.output(merge_heads(mixed))
        return projected


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


def default_intermediate(hidden_size: int) -> int:
    """8/3 hidden_size, rounded up to a multiple of 64: its three matrices are as large as a GPT's two."""
    return -(-8 * hidden_size // (3 * 64)) * 64


def check_experts(experts: int, experts_per_token: int, balance_loss: float) -> None:
    """Raises ValueError unless each token can go to `experts_per_token` different experts."""
    check_positive(experts=experts, experts_per_token=experts_per_token)
    if experts_per_token > experts:
        raise ValueError(
            f"experts_per_token={experts_per_token} is more than experts={experts}: write 1 to {experts}"
        )
    if not 0 <= balance_loss < math.inf:
        raise ValueError(f"balance_loss={balance_loss}: write 0 or more, such as 0.01")


def check_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless all heads have the same even size and are shared evenly by the kv heads."""
    check_positive(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_divides("hidden_size", hidden_size, "num_heads", num_heads)
    check_divides("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    head_size = hidden_size // num_heads
    if head_size % 2:
        raise ValueError(
            f"hidden_size={hidden_size} with num_heads={num_heads} gives heads of {head_size} numbers, and "
            f"rotary positions need an even size: write hidden_size={(head_size + 1) * num_heads}"
        )
