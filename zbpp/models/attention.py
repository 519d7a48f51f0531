"""Causal attention of the last tokens of a sequence: queries of a slice see the keys of all tokens so far.

Torch's is_causal aligns the first query with the first key. Here the last query is aligned with the last key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Attention in which no query sees a later key: [batch, head, time, d] -> [batch, head, time, d].

    query: of the last `time` tokens. key, value: [batch, group, seen, d], of all tokens so far; each group is
    shared by head / group heads. mask: bool [..., time, seen], True where a query sees a key; None: wherever
    the key is not later. dropout: the probability that a score is dropped.
    Without a mask and without dropout no mask is stored where torch has a kernel for it: on a CPU, and on a
    GPU as its flash and memory-efficient attention allow.
    """
    time, seen = query.shape[-2], key.shape[-2]
    if mask is None and time < seen:
        if query.device.type == "cpu" and not dropout:
            return _CausalTail.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's
        mask = _lower_right(query, key, value, dropout)
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=is_grouped
    )


def _lower_right(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """The mask: torch's own object without memory where a kernel of the GPU takes it, else a tensor."""
    time, seen = query.shape[-2], key.shape[-2]
    if query.is_cuda:
        is_grouped = query.shape[1] != key.shape[1]
        params = SDPAParams(query, key, value, None, dropout, False, is_grouped)
        if can_use_flash_attention(params) or can_use_efficient_attention(params):
            from torch.nn.attention.bias import causal_lower_right  # imports Dynamo: a second of a core

            return causal_lower_right(time, seen)
    return torch.ones(time, seen, dtype=torch.bool, device=query.device).tril(seen - time)


class _CausalTail(torch.autograd.Function):
    """The CPU's kernel on two blocks of keys: those of the slice, causally, and those before it.

    The two results are joined by their logsumexp. The backward of each block is the kernel's own, given the
    joint result and logsumexp, as in ring attention (arXiv:2310.01889).
    """

    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        start = key.shape[-2] - query.shape[-2]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own, own_sum = kernel(query, key[..., start:, :], value[..., start:, :], 0.0, True)
        past, past_sum = kernel(query, key[..., :start, :], value[..., :start, :], 0.0, False)
        both = torch.logaddexp(own_sum, past_sum)
        shares = ((each - both).exp().unsqueeze(-1) for each in (own_sum, past_sum))
        output: Tensor = (own * next(shares) + past * next(shares)).to(own.dtype)
        ctx.save_for_backward(query, key, value, output, both)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, output, both = ctx.saved_tensors
        start = key.shape[-2] - query.shape[-2]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        own = kernel(grad, query, key[..., start:, :], value[..., start:, :], output, both, 0.0, True)
        past = kernel(grad, query, key[..., :start, :], value[..., :start, :], output, both, 0.0, False)
        return own[0] + past[0], torch.cat([past[1], own[1]], -2), torch.cat([past[2], own[2]], -2)
