"""FlexAttention's BlockMask as an argument of a step: gradients are those of dense attention."""

import warnings
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import zbpp
from helpers.processes import run_ranks
from zbpp import torch_pipelining
from zbpp.runtime import BoundaryError
from zbpp.runtime.call.microbatch import into_microbatches

WIDTH, HEADS, TOKENS, ROWS, MICROBATCHES = 8, 2, 16, 8, 4


class Attention(nn.Module):
    """Takes a BlockMask, or the dense mask of the rows of x."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def attend(self, x, mask):
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=2))
        if isinstance(mask, flex.BlockMask):
            y = flex.flex_attention(q, k, v, block_mask=mask)
        else:
            y = scaled_dot_product_attention(q, k, v, mask[:, None])
        return x + self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, mask):
        return self.attend(x, mask)


class Checkpointed(Attention):
    def forward(self, x, mask):
        return zbpp.checkpoint(self.attend, x, mask)


class Compiled(Attention):
    """torch has no kernel for the backward on CPUs: the compiled graph runs eagerly."""

    def forward(self, x, mask):
        return torch.compile(self.attend, backend="aot_eager", fullgraph=True)(x, mask)


def drawn_batch():
    """x, target, and the number of the document that each token is in."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    return x, y, torch.randint(2, (ROWS, TOKENS), generator=generator).cumsum(1)


def of_documents(ids):
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def causal(b, h, q, kv):
    return q >= kv


def block_mask(mask_mod, rows):
    return flex.create_block_mask(mask_mod, rows, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=4)


def dense(is_of_documents, ids):
    order = torch.ones(TOKENS, TOKENS).tril().bool().expand(ROWS, -1, -1)
    return order & (ids[:, :, None] == ids[:, None]) if is_of_documents else order


@contextmanager
def trained_on_cpu():
    """Inside, uncompiled flex_attention trains on CPUs; torch refuses that, as the compiled one can't."""
    with patch.object(flex, "_validate_device", lambda *each: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def grads_of(blocks):
    return {
        f"{stage}.{name}": each.grad
        for stage, block in blocks.items()
        for name, each in block.named_parameters()
    }


def through_pipeline(rank, schedule, kind, is_of_documents):
    x, y, ids = drawn_batch()
    mask = block_mask(of_documents(ids), ROWS) if is_of_documents else block_mask(causal, None)
    timetable = zbpp.plan(schedule, 2, MICROBATCHES)
    blocks = {each: kind(each) for each, owner in enumerate(timetable.rank_of) if owner == rank}
    with trained_on_cpu(), zbpp.Pipeline(blocks, timetable, mse_loss) as pipeline:
        losses = pipeline.step(x, target=y, mask=mask)
    return losses, grads_of(blocks)


def through_torch(rank, name, kind, is_of_documents):
    x, y, ids = drawn_batch()
    mask = block_mask(of_documents(ids), ROWS) if is_of_documents else block_mask(causal, None)
    blocks = {each: kind(each) for each in (rank, 3 - rank if name == "ScheduleZBVZeroBubble" else rank + 2)}
    stages = [pipelining.PipelineStage(each, s, 4, torch.device("cpu")) for s, each in blocks.items()]
    schedule = getattr(torch_pipelining, name)(stages, MICROBATCHES, loss_fn=mse_loss)
    losses = []
    with trained_on_cpu():
        schedule.step(
            *([x] if 0 in blocks else []), target=y if 3 in blocks else None, losses=losses, mask=mask
        )
    assert torch_pipelining.fallbacks == []
    return losses, grads_of(blocks)


CASES = [
    (through_pipeline, "1f1b", Attention, False),
    (through_pipeline, "zb_v", Checkpointed, True),
    (through_pipeline, "zb_h1", Compiled, True),
    (through_torch, "ScheduleInterleavedZeroBubble", Attention, True),
]
AT_NIGHT = [
    (through_pipeline, "zb_h1", Attention, True),
    (through_torch, "ScheduleZBVZeroBubble", Attention, False),
    (through_torch, "ScheduleZBVZeroBubble", Checkpointed, True),
    (through_torch, "ScheduleInterleavedZeroBubble", Compiled, True),
]


@pytest.mark.parametrize(
    ("through", "schedule", "kind", "is_of_documents"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in AT_NIGHT)],
)
def test_gradients_are_those_of_dense_attention(through, schedule, kind, is_of_documents):
    found = run_ranks(through, 2, schedule, kind, is_of_documents)
    grads = found[0][1] | found[1][1]
    blocks = nn.ModuleList(Attention(each) for each in range(1 + max(int(name[0]) for name in grads)))
    output, target, ids = drawn_batch()
    for block in blocks:
        output = block(output, dense(is_of_documents, ids))
    loss = mse_loss(output, target)
    loss.backward()
    losses = found[0][0] or found[1][0]
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in blocks.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-14)


class FromDocuments(Attention):
    """Takes documents' numbers from the stage before, and makes its own mask."""

    def forward(self, x, ids):
        return super().forward(x, block_mask(of_documents(ids), len(ids))), ids


def with_documents(rank):
    x, y, ids = drawn_batch()
    block = FromDocuments(rank)

    def loss_fn(output, target):
        return mse_loss(output[0], target)

    with (
        trained_on_cpu(),
        zbpp.Pipeline({rank: block}, zbpp.plan("zb_h1", 2, MICROBATCHES), loss_fn) as pipeline,
    ):
        pipeline.step(x, ids, target=y)
    return grads_of({rank: block})


def test_documents_pass_between_stages_that_make_their_own_masks():
    first, second = run_ranks(with_documents, 2)
    blocks = nn.ModuleList(Attention(each) for each in range(2))
    x, y, ids = drawn_batch()
    mse_loss(blocks[1](blocks[0](x, dense(True, ids)), dense(True, ids)), y).backward()
    for name, parameter in blocks.named_parameters():
        torch.testing.assert_close((first | second)[name], parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("is_registered", [False, True])  # some libraries register it with pytree
def test_each_microbatch_has_its_rows_of_the_mask(is_registered):
    _, _, ids = drawn_batch()
    mask = block_mask(of_documents(ids), ROWS)
    nodes = dict(torch.utils._pytree.SUPPORTED_NODES)
    with patch.object(torch.utils._pytree, "SUPPORTED_NODES", nodes):
        if is_registered:
            torch.utils._pytree.register_pytree_node(
                flex.BlockMask, flex.BlockMask._flatten, flex.BlockMask._unflatten
            )
        pieces = into_microbatches("masks", {"documents": mask}, MICROBATCHES)
    size = ROWS // MICROBATCHES
    expected = dense(True, ids).split(size)
    for piece, rows in zip(pieces, expected, strict=True):
        part = piece["documents"]
        made = flex.create_mask(part.mask_mod, size, 1, TOKENS, TOKENS, device="cpu")
        assert torch.equal(made[:, 0], rows)
        blocks = rows.unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).any(4).any(2)
        assert torch.equal(part.to_dense()[:, 0].bool(), blocks)


def test_a_mask_of_one_row_goes_whole_to_each_microbatch():
    mask = block_mask(causal, None)
    assert all(each is mask for each in into_microbatches("mask", mask, 4))


def test_a_mask_with_other_rows_than_the_batch_is_refused():
    with pytest.raises(ValueError, match="mask has 3 rows, which don't split .* with B=None"):
        into_microbatches("mask", block_mask(causal, 3), 2)


class ReturnsMask(nn.Module):
    def forward(self, x):
        return x, block_mask(causal, None)


def test_a_mask_does_not_pass_between_stages():
    pipeline = zbpp.Pipeline(
        {0: ReturnsMask(), 1: nn.Identity()}, zbpp.plan("interleaved_1f1b", 1, 1), mse_loss
    )
    with pytest.raises(BoundaryError, match="stage 0 returned Tensor, BlockMask: .* as a keyword"):
        pipeline.step(torch.zeros(2, 2), target=torch.zeros(2, 2))
