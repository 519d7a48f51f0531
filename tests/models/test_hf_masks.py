"""Padding and packed sequences through a pipeline, against the library's own uncut model."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.llama import modeling_llama

from helpers.hf_folders import TOKENS, config_of, reference, saved
from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.hf import HuggingFace
from zbpp.models.hf import model as hf_model
from zbpp.models.layers import token_loss
from zbpp.stage_api import IGNORED
from zbpp.training.batches import batch_for

TARGET = TOKENS.roll(-1, 1)
PADDING = torch.ones_like(TOKENS)
PADDING[0, :3] = 0  # at the left
PADDING[1, -4:] = 0  # at the right
PADDED_TARGET = TARGET.masked_fill(PADDING == 0, -100)
LENGTHS = (5, 4, 3)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).contiguous()
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
BLOCKS = torch.zeros(12, 12).masked_fill(~(DOCUMENT[:, None] == DOCUMENT).tril(), torch.finfo().min)
BLOCKS = BLOCKS.expand(2, 1, -1, -1).contiguous()
BATCHES = {
    "padding": {"attention_mask": PADDING},
    "padding and positions": {"attention_mask": PADDING, "position_ids": (PADDING.cumsum(1) - 1).clamp(0)},
    "packed by positions": {"position_ids": POSITIONS},
    "packed by a mask of blocks": {"attention_mask": BLOCKS, "position_ids": POSITIONS},
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    saved(request.param, path)
    return path


def gradients(named):
    return {name: each.grad for name, each in named if each.grad is not None}


def losses_by_row(whole, batch, target):
    """The parts of the two rows in the mean over all targets, whose mean is the batch's loss."""
    found, weights = [], (target != IGNORED).sum(1) * 2 / (target != IGNORED).sum()
    for row, weight in zip((slice(0, 1), slice(1, 2)), weights, strict=True):
        logits = whole(TOKENS[row], **{key: value[row] for key, value in batch.items()}).logits
        found.append(token_loss(logits, target[row]) * weight)
    return found


@pytest.mark.parametrize(
    "is_keyword, kind",
    [
        *((True, kind) for kind in BATCHES),
        *(
            pytest.param(False, kind, marks=[] if kind == "padding" else pytest.mark.nightly)
            for kind in BATCHES
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_uncut_model(folder, kind, is_keyword):
    """Each microbatch is a row. gpt2 ties its head: the pipeline of one rank has one Parameter."""
    batch, target = BATCHES[kind], PADDED_TARGET if "padding" in kind else TARGET
    whole = reference(folder)
    expected = losses_by_row(whole, batch, target)
    (sum(expected) / 2).backward()
    model = HuggingFace(path=str(folder))
    pipeline = Pipeline(model, plan("interleaved_1f1b", 1, 2, stages_per_rank=3))
    for stage in pipeline.stages.values():
        stage.eval()  # gpt2's dropout
    if is_keyword:
        losses = pipeline.step(TOKENS, target=target, **batch)
    else:
        args = [batch.get(name) for name in ("attention_mask", "position_ids")]
        losses = pipeline.step(TOKENS, *args, target=target)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach(), rtol=1e-5, atol=0)
    found, plain = gradients(pipeline.named_parameters()), gradients(whole.named_parameters())
    assert plain.keys() <= found.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6, msg=name)
    pipeline.close()


def test_documents_in_a_row_give_what_each_gives_alone(folder):
    whole, model = reference(folder), HuggingFace(path=str(folder))
    first, second = (model.build_stage(index, 2).eval() for index in range(2))
    alone = torch.cat([whole(each).logits for each in TOKENS.split(LENGTHS, dim=1)], dim=1)
    for given in ((None, POSITIONS), (BLOCKS, POSITIONS)):
        torch.testing.assert_close(second(*first(TOKENS, *given)), alone, rtol=1e-4, atol=1e-6)
    assert (second(first(TOKENS)) - alone).abs().max() > 1e-3


def on_two_ranks(rank, folder):
    """Only the owner of stage 0 has masks and positions; dict batches as a trainer reads them."""
    batch = {"input_ids": TOKENS, "target": PADDED_TARGET, **BATCHES["padding and positions"]}
    pipeline = Pipeline(HuggingFace(path=folder), plan("zb_h1", 2, 2))
    args, target = batch_for(pipeline.stages, 2, Constant(batch), 0, pipeline.device)
    assert len(args) == (3 if rank == 0 else 0)
    losses = pipeline.step(*args, target=target)
    found = [float(each) for each in losses], gradients(pipeline.named_parameters())
    pipeline.close()
    return found


class Constant:
    def __init__(self, batch):
        self.value = batch

    def batch(self, step):
        return self.value


def test_masks_and_positions_travel_from_rank_to_rank(tmp_path):
    saved("llama", tmp_path)
    whole, batch = reference(tmp_path), BATCHES["padding and positions"]
    expected = losses_by_row(whole, batch, PADDED_TARGET)
    (sum(expected) / 2).backward()
    (none, first), (losses, second) = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert none == []
    assert losses == pytest.approx([each.item() for each in expected], rel=1e-5)
    for name, grad in gradients(whole.named_parameters()).items():
        torch.testing.assert_close({**first, **second}[name], grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "bloom",
            (None, POSITIONS),
            "BloomForCausalLM can't be trained with position_ids: two documents in a row",
        ),
        ("bloom", (BLOCKS, None), "can't be trained with a mask of four dimensions: ValueError"),
        ("llama", (PADDING[:, None], None), "attention_mask has 3 dimensions: give"),
    ],
)
def test_a_batch_that_the_family_would_compute_wrongly_is_refused(kind, given, message):
    stage = HuggingFace(config=config_of(kind).to_dict()).build_stage(0, 2)
    assert stage(TOKENS, PADDING)[-2] is PADDING
    with pytest.raises(ValueError, match=message):
        stage(TOKENS, *given)


def test_a_later_stage_refuses_a_mask_that_stage_0_was_not_given():
    stage = HuggingFace(config=config_of("llama").to_dict()).build_stage(1, 2)
    with pytest.raises(ValueError, match="attention_mask came without what stage 0 sends"):
        stage(torch.zeros(2, 12, 32), attention_mask=PADDING)


def test_a_mask_of_numbers_gets_the_dtype_of_16_bit_weights(folder):
    """Kernels of attention take it in the dtype of their queries; a row of -inf alone would be NaN."""
    stage = HuggingFace(path=str(folder)).build_stage(0, 2).to(torch.bfloat16)
    _, mask, *_ = stage(TOKENS, BLOCKS, POSITIONS)
    assert mask.dtype == torch.bfloat16
    assert mask.isfinite().all()


class PositionsOfTokens(modeling_llama.LlamaModel):
    """A family in which positions begin again behind padding, which it finds by its token."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None:
            step, before = torch.arange(1, 1 + input_ids.shape[1]), input_ids == 0
            position_ids = step - (step * before).cummax(1).values
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_documents_that_a_family_finds_in_tokens_alone_are_kept_apart(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaModel", PositionsOfTokens)
    monkeypatch.setattr(hf_model, "_tried", {})  # the library is another one here
    tokens = TOKENS.clamp(min=1)
    tokens[:, 5] = 0
    stage = HuggingFace(config=config_of("llama").to_dict()).build_stage(0, 1).eval()
    whole = transformers.AutoModelForCausalLM.from_config(config_of("llama", use_cache=False)).eval()
    whole.load_state_dict(stage.state_dict())
    assert torch.equal(stage(tokens), whole(tokens).logits)
    assert (whole(tokens).logits[:, 5:] - whole(tokens[:, 5:]).logits).abs().max() < 1e-5
