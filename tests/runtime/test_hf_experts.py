"""Hugging Face's mixtures of experts, unmodified, spread over processes, give the library's gradients."""

import sys

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from helpers.processes import run_ranks
from helpers.toy_lm import VOCAB, batch, rows_of
from zbpp import Pipeline, clip_grad_norm_, make_mesh, plan
from zbpp.autograd import recompute
from zbpp.models.hf import HuggingFace
from zbpp.runtime.processes.dtensors import is_spread

M, ROWS = 2, 8
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "norm_topk_prob": True},
    "deepseek_v3": {  # a dense layer, shared experts, latent attention
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},  # biases, transposed weights, a gate of its own
}  # fmt: skip


def model_of(family, **more):
    config = {"model_type": family, **SIZES, **FAMILIES.get(family, {}), **more}
    return HuggingFace(config=config, vocab_size=VOCAB, sequence_length=8)


def alone(family):
    """Losses and gradients of plain autograd, through the library's own loop over experts."""
    model = model_of(family)
    whole = model.build_stage(0, 1).double()
    losses = []
    for inputs, target in zip(*(each.chunk(2 * M) for each in batch(0, ROWS)), strict=True):
        loss = model.loss(whole(inputs), target)
        (loss / (2 * M)).backward()
        losses.append(loss.item())
    return losses, {name: each.grad for name, each in whole.named_parameters()}


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def in_meshes(rank):
    return {others: in_mesh(others) for others in ("replicate", "shard")}


def in_mesh(others):
    mesh, found = make_mesh(**{others: 2}, expert=2), {}
    for family in FAMILIES:
        model = model_of(family)
        stages = {(index := mesh.get_local_rank("pipeline")): model.build_stage(index, 2).double()}
        for schedule in ("1f1b", "zb_h1"):
            with Pipeline(stages, schedule, model.loss, num_microbatches=M, mesh=mesh) as pipeline:
                inputs, target = rows_of(pipeline.place, *batch(0, ROWS))
                losses = [each.item() for each in pipeline.step(inputs, target=target)]
                clip_grad_norm_(pipeline, 1e9)
                parameters = dict(pipeline.named_parameters())
                grads = {name: whole_of(each.grad) for name, each in parameters.items()}
                spread = {name for name, each in parameters.items() if is_spread(each)}
                found[family, schedule] = losses, grads, spread, pipeline.place.data_part
                for each in parameters.values():
                    each.grad = None
    return found


@pytest.fixture(scope="module")
def in_all_meshes():
    return run_ranks(in_meshes, 4)


@pytest.fixture(params=["replicate", "shard"])
def everyone(request, in_all_meshes):
    return [found[request.param] for found in in_all_meshes]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_one_process(everyone, family):
    expected, expected_grads = alone(family)
    losses, seen = {}, set()
    for found in everyone:
        some, grads, spread, part = found[family, "zb_h1"]
        losses.setdefault(part, []).extend(some)
        assert all("experts" in name for name in spread)
        assert {name for name in grads if ".experts." in name} == spread
        for name, grad in grads.items():
            seen.add(name)
            largest = max(expected_grads[name].abs().max().item(), 1e-6)
            # DeepSeek's router multiplies in float32, whatever the model's dtype.
            tolerance = 1e-6 if family == "deepseek_v3" and name.endswith("gate.weight") else 1e-12
            torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=tolerance * largest, msg=name)
            assert torch.equal(grad, found[family, "1f1b"][1][name])
    assert seen == expected_grads.keys()
    assert [*losses[0], *losses[1]] == pytest.approx(expected, rel=1e-12)
    assert any(found[family, "zb_h1"][2] for found in everyone)


@pytest.mark.parametrize(
    ("family", "padding"),
    [("mixtral", 0), ("qwen3_moe", 0), ("gpt_oss", 0), ("mixtral", 3), ("gpt_oss", 3)],
)
def test_routers_report_the_librarys_loss_of_each_layer(family, padding):
    """Which computes in float32. The library's code, and its config as it was, is the reference.

    padding: so many tokens at the end of every other row; the layers are then recomputed, too.
    """
    model = model_of(family, output_router_logits=True, router_aux_loss_coef=0.5)
    stages = {index: model.build_stage(index, 2).double() for index in range(2)}
    inputs, target = batch(0, ROWS)
    mask = torch.ones_like(inputs)
    mask[::2, inputs.shape[1] - padding :] = 0
    target = target.masked_fill(mask == 0, -100)
    if padding:
        for block in (block for stage in stages.values() for block in stage.children()):
            recompute(block)
    pipeline = Pipeline(stages, plan("zb_v", 1, M), model.loss)
    losses = pipeline.step(inputs, target=target, **({"attention_mask": mask} if padding else {}))
    whole = transformers.AutoModelForCausalLM.from_config(
        model.library_config(), experts_implementation="eager"
    )
    whole.load_state_dict(
        {name: each for stage in stages.values() for name, each in stage.state_dict().items()}
    )
    whole.double().train()
    balance, reported = sys.modules[type(whole).__module__].load_balancing_loss_func, 0.0
    parts = inputs.chunk(M), target.chunk(M), mask.chunk(M), losses
    for rows, words, own, loss in zip(*parts, strict=True):
        found = whole(rows, attention_mask=own if padding else None)
        expected = model.loss(found.logits, words)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        auxiliary = 0.5 * sum(balance((each,), 4, 2, own) for each in found.router_logits) / 2
        (expected * words.ne(-100).sum() / target.ne(-100).sum() + auxiliary / M).backward()
        reported += auxiliary.item() / M
    assert pipeline.auxiliary_losses()["balance"] == pytest.approx(reported, rel=1e-6)
    for name, parameter in pipeline.named_parameters():
        wanted = whole.get_parameter(name).grad
        largest = max(wanted.abs().max().item(), 1e-6)
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-6 * largest, msg=name)


def test_a_family_whose_balance_is_not_known_says_so(caplog):
    model_of("llama", output_router_logits=True).build_stage(0, 2)
    assert "LlamaForCausalLM has no loss that balances experts here" in caplog.text
