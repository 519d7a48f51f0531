"""The split backward of whole models: attention, recurrent, convolutional, and Hugging Face's, unmodified."""

import pytest
from torch import nn

from helpers.cases import models as cases
from helpers.cases.models import LLAMA_LIKE, RECURRENT, ResNet, Vit, hugging_face, tokens, with_loss
from helpers.split import assert_equals_plain, leaf, linear_weights

# ---------------------------------------------------------------- torch's own modules


@pytest.mark.parametrize("needs_weights", [False, True])
def test_self_attention_is_deferred(needs_weights):
    facts = cases.self_attention(needs_weights).compare()
    # The packed bias goes through a view of its own: batch_first transposes the input.
    assert {"in_proj_weight", "out_proj.weight", "out_proj.bias"} <= facts.deferred


def test_cross_attention_is_deferred():
    """Three linear layers share one packed weight, each a part of it."""
    facts = cases.cross_attention().compare()
    assert {"in_proj_weight", "out_proj.weight"} <= facts.deferred


def test_attention_with_separate_weights_and_added_keys_is_right():
    facts = cases.attention_with_separate_weights().compare()
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= facts.deferred


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_is_deferred_but_for_its_norms(norm_first):
    facts = cases.encoder_layer(norm_first).compare()
    assert {"linear1.weight", "linear2.weight", "self_attn.in_proj_weight"} <= facts.deferred
    norms = {f"norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert norms <= facts.computed <= norms | {"self_attn.in_proj_bias"}


def test_a_transformer_of_torch_is_right():
    cases.transformer().compare()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_waits_for_every_time_step(name):
    """Its weights are used once per step, and its output's parts are a tuple."""
    facts = cases.recurrent_network(name).compare()
    assert {"weight_ih_l0", "weight_hh_l0"} <= facts.deferred


# ---------------------------------------------------------------- written as in torchvision and timm


@pytest.mark.parametrize("needs_grad", [False, True], ids=["images", "activations"])
def test_a_resnet_is_deferred_but_for_its_norms(needs_grad):
    facts = cases.resnet(needs_grad).compare()
    convolutions = {n for n, m in ResNet().named_modules() if isinstance(m, nn.Conv2d)}
    assert facts.deferred == {f"{name}.weight" for name in convolutions} | {"fc.weight", "fc.bias"}


def test_a_vit_is_deferred_but_for_norms_and_tokens():
    facts = cases.vit().compare()
    assert facts.deferred == linear_weights(Vit()) | {"patches.weight", "patches.bias"}
    assert {"token", "positions", "blocks.0.scale1"} <= facts.computed


def test_a_unet_is_deferred_but_for_its_norm():
    facts = cases.unet().compare()
    assert {"down.weight", "middle.weight", "up.weight", "out.weight"} <= facts.deferred


# ---------------------------------------------------------------- Hugging Face, from configs, unmodified


def test_llama_of_hugging_face():
    case = cases.hf_llama()
    facts = case.compare()
    linears = linear_weights(case.make_module())
    assert len(linears) == 3 * 7 + 1
    assert facts.deferred == linears | {"model.embed_tokens.weight"}


def test_llama_of_hugging_face_from_embeddings():
    """A middle stage: what comes in needs grad."""
    make_model = hugging_face("Llama", **LLAMA_LIKE)
    facts = assert_equals_plain(
        make_model, lambda: leaf(2, 7, 16), lambda model, x: model(inputs_embeds=x).logits
    )
    assert facts.deferred == linear_weights(make_model())


def test_gpt2_of_hugging_face():
    """Conv1D layers, and a head tied to the embedding: all uses wait, so both do."""
    case = cases.hf_gpt2()
    facts = case.compare()
    model = case.make_module()
    assert model.lm_head.weight is model.transformer.wte.weight
    conv1d = {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    assert len(conv1d) == 2 * 4
    assert {f"{name}.weight" for name in conv1d} <= facts.deferred
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= facts.deferred
    assert {name.split(".")[-2] for name in facts.computed} == {"ln_1", "ln_2", "ln_f"}


def test_qwen3_of_hugging_face():
    """Norms on queries and keys, tied embeddings."""
    make_model = hugging_face("Qwen3", **(LLAMA_LIKE | {"head_dim": 4, "tie_word_embeddings": True}))
    facts = assert_equals_plain(make_model, tokens, with_loss)
    assert facts.deferred == linear_weights(make_model()) - {"lm_head.weight"} | {"model.embed_tokens.weight"}


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_of_hugging_face(experts):
    """A router that data decides, one weight for all experts, an auxiliary loss over all routers."""
    case = cases.hf_mixtral(experts)
    facts = case.compare()
    weights = {
        f"model.layers.{i}.mlp.experts.{name}" for i in range(3) for name in ("gate_up_proj", "down_proj")
    }
    assert linear_weights(case.make_module()) <= facts.deferred
    assert weights <= facts.deferred
