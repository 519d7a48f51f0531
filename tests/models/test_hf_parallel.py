"""Tensor-parallel stages of Hugging Face models over two real processes, against the stages in one."""

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.processes import run_ranks
from helpers.split import assert_close, deferred_and_computed, double, refusal_to_parallelize
from zbpp import backward_input
from zbpp.models.hf import HuggingFace

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {},  # norms within each head
    "gemma": {"tie_word_embeddings": True},  # the head stays whole
    "glm": {
        "partial_rotary_factor": 0.5,
        "pad_token_id": 0,
    },  # a down projection that splits its input
}
REFUSED = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 2},
    "llama": {"num_key_value_heads": 1},
}


def model_of(family, settings):
    config = {"model_type": family, **(SIZES if family != "gpt2" else {}), **settings}
    return HuggingFace(config=config, vocab_size=40, sequence_length=16)


def cut_of(family):
    """Two stages, or one where two of them would share a tied weight."""
    model = model_of(family, FAMILIES[family])
    num_stages = 1 if FAMILIES[family].get("tie_word_embeddings") else 2
    return model, [model.build_stage(index, num_stages).double() for index in range(num_stages)]


def tokens():
    return torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(1))


def as_tuple(output):
    return output if isinstance(output, tuple) else (output,)


def parallel(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {family: split(*cut_of(family), mesh) for family in FAMILIES}
    return found, {
        family: refusal_to_parallelize(model_of(family, options), mesh) for family, options in REFUSED.items()
    }


def split(model, stages, mesh):
    """Whole gradients by name, and which linear weights wait for W."""
    for stage in stages:
        model.parallelize(stage, mesh)
    messages, received = [], (tokens(),)
    for stage in stages:
        output = as_tuple(stage(*received))
        messages.append((received, output))
        received = tuple(each.detach().requires_grad_(each.requires_grad) for each in output)
    gradients, found, deferred = (double(*output[0].shape, seed=3),), {"logits": output[0].detach()}, set()
    for stage, (received, output) in reversed([*zip(stages, messages, strict=True)]):
        gradients, weight_grads = backward_input(output, gradients, received)
        deferred |= deferred_and_computed(stage, weight_grads)[0]
        weight_grads.accumulate()
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad
            assert type(gradient) is type(parameter.data), name
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    sharded = {
        name for stage in stages for name, each in stage.named_parameters() if isinstance(each, DTensor)
    }
    return found, deferred, sharded


def alone(family):
    """Plain autograd through the stages in this process."""
    _, stages = cut_of(family)
    received = (tokens(),)
    for stage in stages:
        received = as_tuple(stage(*received))
    (logits,) = received
    logits.backward(double(*logits.shape, seed=3))
    gradients = {name: each.grad for stage in stages for name, each in stage.named_parameters()}
    return {"logits": logits.detach()} | gradients


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(parallel, 2, timeout=200)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_sharded_by_the_librarys_plan_compute_what_whole_stages_do(family, ranks):
    """Norms and softmax are the library's, in float32."""
    expected = alone(family)
    for found, _ in ranks:
        assert_close(found[family][0], expected, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sharded_linears_wait_for_w(family, ranks):
    for found, _ in ranks:
        _, deferred, sharded = found[family]
        projections = {name for name in sharded if "_norm" not in name}
        assert len(projections) >= 12
        assert projections <= deferred


def test_a_tied_head_stays_whole(ranks):
    for found, _ in ranks:
        assert "model.embed_tokens.weight" not in found["gemma"][2]
        assert "lm_head.weight" in found["llama"][2]


def test_what_the_plan_can_not_shard_is_refused_before_anything_is_changed(ranks):
    for _, refusals in ranks:
        assert "GPT2LMHeadModel ships no tensor-parallel plan" in refusals["gpt2"]
        assert "mlp.experts" in refusals["mixtral"]
        assert "torch's tensor-parallel styles do not express" in refusals["mixtral"]
        assert "num_key_value_heads=1 is not divisible by the tensor-parallel degree=2" in refusals["llama"]
