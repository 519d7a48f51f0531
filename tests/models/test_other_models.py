"""The stage API is not about GPTs: an encoder-decoder and a vision classifier, against the library's own."""

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn.functional import cross_entropy
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

from helpers.cases.hf_others import T5, Vit, built
from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.layers import token_loss

VIT = ViTConfig(
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=24,
    image_size=8,
    patch_size=4,
)
T5_SMALL = T5Config(
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=3,
    num_decoder_layers=3,
    num_heads=2,
    vocab_size=40,
    dropout_rate=0.0,
)
GENERATOR = torch.Generator().manual_seed(0)
PIXELS, CLASSES = torch.randn(4, 3, 8, 8, generator=GENERATOR), torch.tensor([0, 1, 1, 0])
TOKENS, ANSWER = (torch.randint(40, (4, time), generator=GENERATOR) for time in (9, 7))


def compared(found, whole):
    """Compare the gradients of the stages, by the library's names, with the uncut model's."""
    plain = {
        name: each.grad
        for name, each in whole.named_parameters(remove_duplicate=False)
        if each.grad is not None
    }
    for name, grad in found.items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-4, atol=1e-6, msg=name)
    return plain.keys() - found.keys()


def gradients(pipeline):
    return {name: each.grad for name, each in pipeline.named_parameters()}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_vision_classifier_is_trained_as_uncut(num_stages):
    pipeline = Pipeline(Vit(VIT), plan("interleaved_1f1b", 1, 2, stages_per_rank=num_stages))
    losses = pipeline.step(PIXELS, target=CLASSES)
    whole = built(ViTForImageClassification, VIT, seed=0)
    loss = cross_entropy(whole(PIXELS).logits, CLASSES)
    loss.backward()
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-5, atol=0)
    names = {"embeddings": "vit.embeddings", "norm": "vit.layernorm"}
    found = {}
    for name, grad in gradients(pipeline).items():
        part, _, rest = name.partition(".")
        found[f"{names.get(part, part.replace('layer_', 'vit.layers.'))}.{rest}"] = grad
    assert compared(found, whole) == set()
    pipeline.close()


def uncut_t5():
    whole = built(T5ForConditionalGeneration, T5_SMALL, seed=0)
    logits = whole(input_ids=TOKENS, decoder_input_ids=ANSWER, use_cache=False).logits
    loss = token_loss(logits, ANSWER.roll(-1, 1))
    loss.backward()
    return whole, loss.item()


def on_ranks(rank, num_ranks, schedule, num_stages):
    pipeline = Pipeline(T5(T5_SMALL), plan(schedule, num_ranks, 2, **num_stages))
    losses = pipeline.step(TOKENS, ANSWER, target=ANSWER.roll(-1, 1))
    found = [float(each) for each in losses], gradients(pipeline)
    pipeline.close()
    return found


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_an_encoder_decoder_is_trained_as_uncut(num_stages):
    """With 2 stages the decoder begins with a stage, with 3 it begins within one."""
    losses, found = on_ranks(0, 1, "interleaved_1f1b", {"stages_per_rank": num_stages})
    whole, loss = uncut_t5()
    assert sum(losses) / 2 == pytest.approx(loss, rel=1e-5)
    assert compared(found, whole) <= {"shared.weight", "decoder.embed_tokens.weight", "lm_head.weight"}


def test_an_encoder_decoder_on_two_ranks_sums_the_gradients_of_its_tied_embeddings():
    results = run_ranks(on_ranks, 2, 2, "zb_v", {})
    whole, loss = uncut_t5()
    assert sum(each for losses, _ in results for each in losses) / 2 == pytest.approx(loss, rel=1e-5)
    left = [compared(found, whole) for _, found in results]
    assert left[0] & left[1] <= {"shared.weight", "lm_head.weight", "decoder.embed_tokens.weight"}
    assert any("embed_tokens.weight" in name for _, found in results for name in found)
