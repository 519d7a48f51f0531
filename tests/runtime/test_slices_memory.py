"""What the first rank of a pipeline holds of sequences in slices: (p + S - 1) / S microbatches, not p."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zbpp import plan
from zbpp.measure.live_tensors import LiveTensors
from zbpp.measure.microbatch_memory import past_of, slice_keywords
from zbpp.models import layers, llama_layer
from zbpp.models.llama import Llama
from zbpp.runtime.call.feed import Feed, LossGradients
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Op

TOKENS, HIDDEN, P, M = 4096, 4096, 4, 8
MIB = 2**20


class Flash(torch.autograd.Function):
    """Keeps what FlashAttention keeps for backward: q, k, v, the output and its logsumexp."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *_ = ctx.saved_tensors
        like = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (key, value))
        return torch.empty_like(query), *like


def held_by_first_rank(num_slices):
    """(the most MiB between two actions, those of keys, values and their gradients at the most)."""
    bounds = [TOKENS * k // num_slices for k in range(num_slices + 1)] if num_slices > 1 else []
    model = Llama(
        vocab_size=128256, num_layers=P, hidden_size=HIDDEN, num_heads=32, num_kv_heads=8,
        intermediate_size=14336, sequence_length=TOKENS, layers_per_stage=[1] * P,
    )  # fmt: skip
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        stage = model.build_stage(0, P)
        torch.set_default_dtype(torch.float32)
        worker = StageWorker(0, stage, is_last=False)
        ids, ends = torch.zeros(1, TOKENS, dtype=torch.long), [*bounds[1:]] or [TOKENS]
        slices = [(ids[:, end - TOKENS // num_slices : end],) for end in ends]
        pasts = {microbatch: past_of(0, stage, bounds) for microbatch in range(M)}
        keywords = [each for past in pasts.values() for each in slice_keywords(past, num_slices)]
        worker.begin(Feed(slices * M, keywords, None, None, LossGradients(1 / M)))
        for each in stage.parameters():
            each.grad = torch.zeros_like(each)
        with LiveTensors() as live:
            before, most, past = live.mark(), 0, 0
            for action in plan("1f1b", P, M, num_slices=num_slices).rows[0]:
                if action.op == Op.F:
                    worker.forward(action.microbatch, ())
                else:
                    grad = torch.empty(1, TOKENS // num_slices, HIDDEN, dtype=torch.bfloat16)
                    worker.backward(action.microbatch, (grad,))
                    del grad
                most = max(most, live.now - before)
                past = max(past, sum(each.held_bytes for each in pasts.values() if each is not None))
    return most / MIB, past / MIB


def test_the_first_rank_holds_fewer_microbatches(monkeypatch):
    """Llama-3-8B's sizes, a layer a stage, on fake tensors; within 3 % of the formula."""
    monkeypatch.setattr(llama_layer, "causal_attention", lambda q, k, v, *_, **__: Flash.apply(q, k, v))
    monkeypatch.setattr(
        layers, "initial_values", lambda name, shape, *_: torch.empty(shape, dtype=torch.bfloat16)
    )
    whole, _ = held_by_first_rank(1)
    microbatch = whole / P
    for num_slices in (2, 4, 8):
        found, past = held_by_first_rank(num_slices)
        # Keys and values: 8 heads of 128 numbers each, for as many microbatches as are under way.
        ahead = (P + num_slices - 1) / num_slices
        own = 2 * TOKENS * 8 * 128 * 2 / MIB
        expected = ahead * (microbatch - own) + past
        assert found == pytest.approx(expected, rel=0.03)
