"""Hugging Face models whose sequences are divided over processes, against the model in one process."""

import pytest

pytest.importorskip("transformers")

import torch

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh
from zbpp.models.hf import HuggingFace
from zbpp.models.layers import token_loss

TIME, M = 12, 2
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {},  # norms within each head
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learned positions, products of its own
}
GIVEN = {"llama": ("mask", "documents"), "mistral": ("documents",)}


class Hf64(HuggingFace):
    def build_stage(self, index, num_stages):
        return super().build_stage(index, num_stages).double()


def model_of(family, **settings):
    config = {"model_type": family, **(SIZES if family != "gpt2" else {}), **FAMILIES[family], **settings}
    if family == "gpt2":
        config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Hf64(config=config, vocab_size=40, sequence_length=16)


def data(given):
    """(arguments of stage 0, target)."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 40, (4, TIME + 1), generator=generator)
    x, target = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    target[0, :7] = -100
    mask = torch.ones_like(x)
    mask[0, -4:] = 0
    positions = torch.cat([torch.arange(5), torch.arange(TIME - 5)]).expand(4, -1).contiguous()
    return {"plain": (x,), "mask": (x, mask), "documents": (x, None, positions)}[given], target


CASES = [(family, given) for family in FAMILIES for given in ("plain", *GIVEN.get(family, ()))]


def divided(rank):
    """Per case the losses and the gradients; and why a family is refused."""
    found = {}
    for family, given in CASES:
        mesh = make_mesh(context=2)
        with Pipeline(model_of(family), "zb_h1", num_microbatches=M, mesh=mesh) as pipeline:
            args, target = data(given)
            losses = pipeline.step(*args, target=target)
            found[family, given] = losses, {name: p.grad for name, p in pipeline.named_parameters()}
    for settings in ({"num_key_value_heads": 1}, {"attn_implementation": "flex_attention"}):
        try:
            Pipeline(model_of("llama", **settings), "zb_h1", num_microbatches=M, mesh=make_mesh(context=2))
        except ValueError as error:
            found[next(iter(settings))] = str(error)
    return found


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(divided, 4)


@pytest.mark.parametrize("family, given", CASES)
def test_context_has_the_gradients_of_the_model_in_one_process(everyone, family, given):
    whole = model_of(family).build_stage(0, 1)
    args, target = data(given)
    loss = token_loss(whole(*args), target)
    loss.backward()
    parameters = whole.named_parameters(remove_duplicate=False)
    grads = {name: parameter.grad for name, parameter in parameters}
    largest = max(each.abs().max().item() for each in grads.values())
    for losses, found in (each[family, given] for each in everyone):
        if losses:
            assert sum(losses).item() / M == pytest.approx(loss.item(), rel=1e-6)  # logits in float32
        for name, grad in found.items():
            scale = max(grads[name].abs().max().item(), 1e-3 * largest)
            torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-6 * scale, msg=name)


def test_heads_that_processes_can_not_share_are_refused_before_the_first_step(everyone):
    for found in everyone:
        assert "context=2 does not divide num_key_value_heads=1" in found["num_key_value_heads"]
        assert "attends by flex_attention" in found["attn_implementation"]
