"""Stages of a Llama, whose weights are made on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_check.page import Here
from zbpp.models.layers import Block
from zbpp.models.llama_layer import Attention, Rotary, SwiGlu


class Sizes(NamedTuple):
    """tokens: of a microbatch of one row."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tokens: int

    @property
    def layer_weights(self) -> int:
        """Of the matrices of a layer."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    def flops(self, layers: int) -> dict[str, float]:
        """Operations of F, B and W of some layers; B of attention computes its scores again."""
        products = 2.0 * self.layer_weights * self.tokens * layers
        attention = 2.0 * self.tokens**2 * self.hidden * layers  # causal: half of the scores
        return {"F": products + attention, "B": products + 2.5 * attention, "W": products}


LLAMA_8B = Sizes(4096, 32, 8, 14336, 128256, 8192)
LLAMA_1B = Sizes(2048, 32, 8, 8192, 32000, 4096)
MIDDLE = Sizes(1024, 16, 16, 2752, 256, 512)  # so small that the host's work shows
SMALL = Sizes(64, 4, 2, 128, 64, 64)


def blocks(sizes: Sizes, layers: int, here: Here) -> list[nn.Module]:
    """Layers whose weights are drawn on the device."""
    torch.manual_seed(0)
    made = []
    with torch.device(here.device):
        for _ in range(layers):
            rotary = Rotary(sizes.hidden // sizes.heads, sizes.tokens, 500000.0)
            block = Block(
                attention_norm=nn.RMSNorm(sizes.hidden),
                attention=Attention(sizes.hidden, sizes.heads, sizes.kv_heads, rotary),
                mlp_norm=nn.RMSNorm(sizes.hidden),
                mlp=SwiGlu(sizes.hidden, sizes.intermediate),
            )
            made.append(block.to(here.device, here.dtype))
    return made


def stage_of(layers: Iterable[nn.Module], *, main_grad: bool = False) -> nn.Sequential:
    """A stage whose parameters have gradients of zeros: `.grad`, or `main_grad` in float32."""
    stage = nn.Sequential(*layers)
    for parameter in stage.parameters():
        if main_grad:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        else:
            parameter.grad = torch.zeros_like(parameter)
    return stage


def x_and_dy(sizes: Sizes, here: Here) -> tuple[Tensor, Tensor]:
    """A microbatch of one row, and the gradient of its output."""
    generator = torch.Generator(here.device).manual_seed(0)
    shape = 2, 1, sizes.tokens, sizes.hidden
    x, dy = torch.randn(shape, generator=generator, device=here.device, dtype=here.dtype).unbind()
    return x, dy


def llama_stages(
    sizes: Sizes, layers: int, owned: Iterable[int], num_stages: int, here: Here
) -> dict[int, nn.Module]:
    """{stage: module} of a language model: the embedding is in the first one, norm and head in the last.

    The weights depend on the number of stages.
    """
    made: dict[int, nn.Module] = {}
    for stage in owned:
        parts = blocks(sizes, layers // num_stages, here)
        with torch.device(here.device):
            if stage == 0:
                parts.insert(0, nn.Embedding(sizes.vocab, sizes.hidden, dtype=here.dtype))
            if stage == num_stages - 1:
                parts.append(nn.RMSNorm(sizes.hidden, dtype=here.dtype))
                parts.append(nn.Linear(sizes.hidden, sizes.vocab, bias=False, dtype=here.dtype))
        made[stage] = nn.Sequential(*parts)
    return made


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def token_batch(sizes: Sizes, rows: int, here: Here) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator(here.device).manual_seed(0)
    drawn = torch.randint(sizes.vocab, (rows, sizes.tokens + 1), generator=generator, device=here.device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def saved_mib(sizes: Sizes, layers: int) -> float:
    """About what F keeps for backward: a layer's inputs of products, of attention, of norms and of SwiGLU."""
    kv = sizes.hidden // sizes.heads * sizes.kv_heads
    return 2.0 * layers * sizes.tokens * (7 * sizes.hidden + 3 * kv + 4 * sizes.intermediate) / 2**20
