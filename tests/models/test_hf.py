"""Hugging Face's models as stages, against the library's own whole model."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from zbpp import Pipeline, plan
from zbpp.models.hf import HuggingFace
from zbpp.models.layers import token_loss
from zbpp.stage_api import PipelineModel

TOKENS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
CONFIGS = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    # positions and dropout before the layers
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "tie_word_embeddings": False},
    # a window on every second layer, logits through tanh
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
               "tie_word_embeddings": False},
    # the last norm stands before the layers in the module
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
            "word_embed_proj_dim": 32, "tie_word_embeddings": False},
    # a norm behind the embedding
    "bloom": {"hidden_size": 32, "n_layer": 5, "n_head": 4, "tie_word_embeddings": False},
    "gpt_neox": SIZES,
}  # fmt: skip


def model_of(kind, **options):
    return HuggingFace(
        config={"model_type": kind, **CONFIGS[kind]}, vocab_size=40, sequence_length=16, **options
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_stages_in_a_row_are_the_librarys_model(kind):
    model = model_of(kind)
    assert isinstance(model, PipelineModel)
    whole = model.build_stage(0, 1).eval()
    x, names = TOKENS, {}
    for index in range(3):
        stage = model.build_stage(index, 3).eval()
        x = stage(x)
        names |= dict(stage.named_parameters())
    assert torch.equal(x, whole.model(TOKENS).logits)
    expected = dict(whole.named_parameters())
    assert names.keys() == expected.keys()
    assert all(torch.equal(names[name], expected[name]) for name in names)


def test_gradients_through_a_pipeline_are_the_librarys():
    model, timetable = model_of("llama"), plan("zb_v", 1, 2)
    stages = {index: model.build_stage(index, 2) for index in range(2)}
    pipeline = Pipeline(stages, timetable, model.loss)
    target = TOKENS.roll(-1, 1)
    losses = pipeline.step(TOKENS, target=target)
    whole = model.build_stage(0, 1)
    loss = token_loss(whole.model(TOKENS).logits, target)
    loss.backward()
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-5, atol=0)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_a_stage_holds_its_layers_and_nothing_of_the_others():
    model = model_of("llama", layers_per_stage=[1, 3, 1])
    assert model.layer_counts(3) == [1, 3, 1]
    names = [{name for name, _ in model.build_stage(index, 3).named_parameters()} for index in range(3)]
    layers = [sorted({int(name.split(".")[3]) for name in found if ".layers." in name}) for found in names]
    assert layers == [[0], [1, 2, 3], [4]]
    assert [sorted(name for name in found if ".layers." not in name) for found in names] == [
        ["model.model.embed_tokens.weight"], [], ["model.lm_head.weight", "model.model.norm.weight"],
    ]  # fmt: skip


def test_a_file_says_the_same_as_a_mapping(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"], "vocab_size": 40}))
    stages = [
        HuggingFace(config=config).build_stage(0, 5) for config in (str(path), json.loads(path.read_text()))
    ]
    one, other = (dict(stage.named_parameters()) for stage in stages)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_building_a_stage_leaves_the_callers_random_numbers_alone():
    before = torch.get_rng_state()
    model_of("llama").build_stage(0, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "config has no model_type: write one of Hugging Face's, such as llama"),
        ({"model_type": "lamma"}, "lamma"),
        ({"model_type": "vit"}, "vit"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        HuggingFace(config=config).build_stage(0, 1)


def test_tied_embeddings_on_several_stages_are_refused():
    model = HuggingFace(config={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}, vocab_size=40)
    with pytest.raises(ValueError, match="write config.tie_word_embeddings=false, or use one stage"):
        model.build_stage(0, 2)
    assert len(list(model.build_stage(0, 1).parameters())) > 0


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="stage 3 does not exist: with num_stages=3 write 0 to 2"):
        model_of("llama").build_stage(3, 3)
