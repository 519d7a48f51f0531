"""The parts of a Llama's layer, and checks of their sizes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.attention import causal_attention
from zbpp.models.layers import check_divides, check_length, check_positive, merge_heads, split_heads


class Rotary(nn.Module):
    """Rotates each pair of numbers (i, i + d/2) of a head by the angle position x theta^(-2i/d).

    [batch, head, time, d] in and out. The pairs are those of Hugging Face's Llama. position_ids [batch,
    time]: by default from `start` on.
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

    def forward(self, x: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
        if position_ids is None:
            end = start + x.shape[-2]
            check_length(end, self.sequence_length)
            cos, sin = self.cos[start:end], self.sin[start:end]
        else:
            cos, sin = self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, [batch, time, hidden] in and out.

    position_ids, mask and sequence_slice: see DocumentStage; None: one document a row, which comes whole.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        kv_size = hidden_size // num_heads * num_kv_heads
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, kv_size, bias=False)
        self.value = nn.Linear(hidden_size, kv_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rotary = rotary
        self.context = Context(num_heads=num_heads, num_kv_heads=num_kv_heads)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor:
        layers = (self.query, self.key, self.value)
        heads = (split_heads(layer(x), self.head_size) for layer in layers)
        query, key, value = self.context.to_heads(*heads)
        start = 0 if sequence_slice is None else sequence_slice.start
        query, key = (self.rotary(each, position_ids, start) for each in (query, key))
        if sequence_slice is not None:
            key = sequence_slice.whole((self, "key"), key)
            value = sequence_slice.whole((self, "value"), value)
        mixed = causal_attention(query, key, value, mask)
        projected: Tensor = self.output(merge_heads(self.context.to_tokens(mixed)))
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
