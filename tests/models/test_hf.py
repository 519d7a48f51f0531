"""Hugging Face's models as stages, against the library's own whole model."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import Pipeline, plan
from zbpp.autograd import recompute
from zbpp.models.hf import HuggingFace
from zbpp.models.hf import model as hf_model
from zbpp.models.layers import token_loss
from zbpp.stage_api import PipelineModel

TOKENS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
EXPERTS = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
UNTIED = {"tie_word_embeddings": False}
CONFIGS = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    # positions and dropout before the layers; attention scaled by the layer's number
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "scale_attn_by_inverse_layer_idx": True, **UNTIED},
    # a window on every second layer, logits through tanh
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, **UNTIED},
    # the last norm stands before the layers in the module; projections around them
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
            "word_embed_proj_dim": 16, **UNTIED},
    # a norm behind the embedding
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, **UNTIED},
    # embeddings, layers and logits times numbers
    "granite": {**SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 8.0},
    # a norm that is called LayerNorm1P
    "nemotron": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    # the last norm is called embedding_norm; layers of two kinds
    "lfm2": {**SIZES, "num_key_value_heads": 2, **UNTIED,
             "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    # the first layers have no experts
    "deepseek_v3": {**EXPERTS, "first_k_dense_replace": 3, "n_routed_experts": 4, "n_group": 1,
                    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
                    "v_head_dim": 8, "qk_nope_head_dim": 4},
    # layers without experts by number and by period
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_only_layers": [3],
                  "decoder_sparse_step": 2},
    # layers of three kinds by period and offset; values of its own for the recurrence
    "jamba": {**SIZES, "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
              "expert_layer_period": 2, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "use_mamba_kernels": False, **UNTIED},
}  # fmt: skip


def model_of(kind, **options):
    return HuggingFace(config=config_of(kind), vocab_size=40, sequence_length=16, **options)


def config_of(kind):
    return {"model_type": kind, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **CONFIGS[kind]}


def library_model(kind, stages):
    """The library's own whole model, with the weights of the stages; their names are its names."""
    sizes = {"vocab_size": 40, "max_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(**config_of(kind), **({} if kind == "bloom" else sizes))
    config.vocab_size = 40
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.load_state_dict({name: value for stage in stages for name, value in stage.state_dict().items()})
    return whole


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_stages_in_a_row_are_the_librarys_model(kind):
    model = model_of(kind)
    assert isinstance(model, PipelineModel)
    stages = [model.build_stage(index, 2).eval() for index in range(2)]
    whole = library_model(kind, stages).eval()
    logits = whole(TOKENS).logits
    output = stages[1](stages[0](TOKENS))
    assert torch.equal(output, logits)
    token_loss(output, TOKENS.roll(-1, 1)).backward()
    token_loss(logits, TOKENS.roll(-1, 1)).backward()
    found = [name for stage in stages for name, _ in stage.named_parameters()]
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert sorted(found) == sorted(expected)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["llama", "jamba", "deepseek_v3"])
def test_initial_values_depend_on_neither_the_cut_nor_the_callers_random_numbers(kind):
    """Jamba's recurrence and DeepSeek's router have values that the library's layers draw themselves."""
    model, values = model_of(kind), []
    for num_stages in (1, 3):
        before = torch.manual_seed(num_stages).get_state()
        stages = [model.build_stage(index, num_stages) for index in range(num_stages)]
        assert torch.equal(torch.get_rng_state(), before)
        values.append({name: value for stage in stages for name, value in stage.state_dict().items()})
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_initial_values_have_the_librarys_distribution():
    """A padding row is zero, a recurrence starts from its own numbers, a matrix has initializer_range."""
    config = {**config_of("jamba"), "initializer_range": 0.3}
    stage = HuggingFace(config=config, vocab_size=40).build_stage(0, 1)
    values = stage.state_dict()
    assert values["model.embed_tokens.weight"][0].abs().max() == 0
    assert values["model.embed_tokens.weight"][1:].std().item() == pytest.approx(0.3, rel=0.1)
    recurrence = values["model.layers.0.mamba.A_log"]
    assert torch.equal(recurrence, torch.arange(1, 5).float().log().expand_as(recurrence))


def test_gradients_through_a_pipeline_are_the_librarys():
    model, timetable = model_of("llama"), plan("zb_v", 1, 2)
    stages = {index: model.build_stage(index, 2) for index in range(2)}
    pipeline = Pipeline(stages, timetable, model.loss)
    target = TOKENS.roll(-1, 1)
    losses = pipeline.step(TOKENS, target=target)
    whole = library_model("llama", stages.values())
    loss = token_loss(whole(TOKENS).logits, target)
    loss.backward()
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-5, atol=0)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)
    assert torch.stack(pipeline.evaluate(TOKENS, target=target)).mean().item() == pytest.approx(loss.item())


def test_a_stage_holds_its_layers_and_nothing_of_the_others():
    model = model_of("llama", layers_per_stage=[1, 2, 1])
    assert model.layer_counts(3) == [1, 2, 1]
    names = [{name for name, _ in model.build_stage(index, 3).named_parameters()} for index in range(3)]
    layers = [sorted({int(name.split(".")[2]) for name in found if ".layers." in name}) for found in names]
    assert layers == [[0], [1, 2], [3]]
    assert [sorted(name for name in found if ".layers." not in name) for found in names] == [
        ["model.embed_tokens.weight"], [], ["lm_head.weight", "model.norm.weight"],
    ]  # fmt: skip


def test_a_recomputed_layer_gives_the_same_gradients():
    """The layers are to be found in a stage's tree, for recompute and compile."""
    stage = model_of("llama").build_stage(0, 2)
    twin = copy.deepcopy(stage)
    for layer in twin.get_submodule("model.layers").children():
        recompute(layer)
    for each in (stage, twin):
        each(TOKENS).square().sum().backward()
    for one, other in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


BART = {"d_model": 32, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
DROPS = {"decoder_layerdrop": 0.2, "encoder_layerdrop": 0.1}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**CONFIGS["opt"], "model_type": "opt", "layerdrop": 0.1}, "layerdrop"),
        ({**BART, "model_type": "bart", **DROPS}, "decoder_layerdrop"),
    ],
)
def test_a_model_that_skips_layers_at_random_in_training_is_refused_unless_one_stage_has_it(config, name):
    with pytest.raises(ValueError, match=f"skips layers at random.*write config.{name}=0 "):
        HuggingFace(config=config, vocab_size=40).build_stage(0, 2)
    HuggingFace(config=config, vocab_size=40).build_stage(0, 1)


def test_a_layer_that_is_skipped_where_a_stage_begins_ends_the_step(monkeypatch):
    """A stage that skips its own first layer would ignore what it got from the stage before."""
    stage = HuggingFace(config=config_of("opt"), vocab_size=40, layers_per_stage=[1, 1, 2]).build_stage(1, 3)
    stage.library_model.model.decoder.layerdrop = 0.5  # as code of the user's may set it
    draws = iter(range(4))
    monkeypatch.setattr(torch, "rand", lambda *size: torch.tensor([1.0, 0.0, 1.0, 1.0])[next(draws)])
    with pytest.raises(RuntimeError, match="has not called layer 1, where a stage begins"):
        stage(torch.ones(2, 5, 32))


def test_a_configs_vocabulary_and_length_are_not_overwritten(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of("gpt2"), "vocab_size": 50, "n_positions": 24}))
    for config in (str(path), json.loads(path.read_text())):
        stage = HuggingFace(config=config, vocab_size=40, sequence_length=16).build_stage(0, 1)
        shapes = {name: tuple(each.shape) for name, each in stage.named_parameters()}
        assert shapes["transformer.wte.weight"] == (50, 32)
        assert shapes["transformer.wpe.weight"] == (24, 32)
        with pytest.raises(ValueError, match="vocab_size=60 is more than the config's vocab_size=50"):
            HuggingFace(config=config, vocab_size=60)
        with pytest.raises(ValueError, match="sequence_length=32 is more than the config's"):
            HuggingFace(config=config, sequence_length=32)


def test_a_folder_is_refused_instead_of_starting_from_random_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    with pytest.raises(ValueError, match=r"is a folder.*write path=.*config.json to take the config alone"):
        HuggingFace(config=str(tmp_path))
    assert HuggingFace(config=str(tmp_path / "config.json")) is not None
    with pytest.raises(TypeError, match=r"write path=\.\.\. for a folder with weights, or config="):
        HuggingFace(str(tmp_path))


def test_a_cut_that_is_no_list_is_refused():
    with pytest.raises(ValueError, match=r"layers_per_stage=3 is no list of whole numbers: write 2 of them"):
        model_of("llama", layers_per_stage=3).build_stage(0, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "config has no model_type: write one of Hugging Face's, such as llama"),
        ({"model_type": "lamma"}, "lamma"),
        ({"model_type": "vit"}, "vit"),
        (
            {"model_type": "cpmant", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "dim_head": 8, "dim_ff": 16, "vocab_size": 40, "prompt_length": 2, "prompt_types": 33},
            "hidden states of CpmAntForCausalLM have no dimension of batch and one of time",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_cut_is_refused_with_module_and_reason(config, message):
    with pytest.raises(ValueError, match=message):
        HuggingFace(config=config).build_stage(0, 2)


class Remembering(LlamaDecoderLayer):
    """A layer that hands the next one something beside what it returns."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.notes = config.__dict__.setdefault("notes", {})

    def forward(self, hidden_states, **kwargs):
        output = super().forward(hidden_states, **kwargs)
        noted, self.notes["x"] = self.notes.get("x", 0.0), 1e-3 * hidden_states.detach().mean()
        return output + noted


class Embedding(LlamaModel):
    """A model that looks at the embedding once more, behind the layers."""

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.embed_tokens(input_ids)
        return output


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        (
            "LlamaDecoderLayer",
            Remembering,
            "logits .*is not the uncut model's",
        ),
        ("LlamaModel", Embedding, "logits is not the uncut model's"),
    ],
)
def test_a_family_that_nobody_has_tried_is_refused_instead_of_cut_wrongly(monkeypatch, name, part, message):
    monkeypatch.setattr(modeling_llama, name, part)
    monkeypatch.setattr(hf_model, "_tried", {})  # the library is another one here
    with pytest.raises(ValueError, match=message):
        model_of("llama").build_stage(0, 2)


def test_a_cut_is_tried_once_however_many_models_and_stages_are_made(monkeypatch, caplog):
    """`zbpp train -n 4` said so per stage, `zbpp memory` fifteen times."""
    monkeypatch.setattr(hf_model, "_tried", {})
    with caplog.at_level("INFO", "zbpp.models.hf.model"):
        for index in (0, 1):
            model_of("llama").build_stage(index, 2)
        model_of("llama").layer_counts(2)
    assert caplog.text.count("tried on a small copy") == 1


TIED = {
    "gpt2": {"n_embd": 32, "n_layer": 8, "n_head": 4},
    "llama": {**SIZES, "num_hidden_layers": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    # the embedding times a number
    "gemma": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    # a bias of the head under two names, of which forward uses one
    "bert": {**SIZES, "is_decoder": True},
}


def tied_model(kind):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {"model_type": kind, "vocab_size": 40, "max_position_embeddings": 16, **special, **TIED[kind]}
    return HuggingFace(config=config), config


def tied_library_model(kind):
    """The library's own whole model, with its ties and the initial values of one stage, in float64."""
    model, config = tied_model(kind)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    whole.load_state_dict(model.build_stage(0, 1).state_dict())
    return whole.double().eval()


@pytest.mark.parametrize("kind", TIED)
def test_a_stage_has_a_copy_of_a_tied_parameter_with_the_initial_values_of_one_stage(kind):
    model, whole = tied_model(kind)[0], tied_library_model(kind)
    assert set(model.tied().items()) <= set(whole.all_tied_weights_keys.items())
    stages = [model.build_stage(index, 2).double().eval() for index in range(2)]
    values = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert values.keys() == whole.state_dict().keys()
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in values.items())
    logits, output = whole(TOKENS).logits, stages[1](stages[0](TOKENS))
    torch.testing.assert_close(output, logits, rtol=1e-12, atol=0)
    token_loss(output, TOKENS.roll(-1, 1)).backward()
    token_loss(logits, TOKENS.roll(-1, 1)).backward()
    sums = {}
    for name, parameter in (row for stage in stages for row in stage.named_parameters()):
        source = model.tied().get(name, name)
        if parameter.grad is not None:
            sums[source] = sums.get(source, 0) + parameter.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sums.get(name), parameter.grad, rtol=1e-12, atol=1e-15)


def tied_on_four_ranks(rank, cases):
    """Per family and schedule: losses and gradients of two steps without zero_grad, in eval mode."""
    found = {}
    for kind, schedule in cases:
        model = tied_model(kind)[0]
        timetable = plan(schedule, 4, 2)
        pipeline = Pipeline(Double(model), timetable)
        for _ in range(2):
            losses = pipeline.step(TOKENS, target=TOKENS.roll(-1, 1))
        grads = {name: each.grad for name, each in pipeline.named_parameters()}
        found[kind, schedule] = [float(loss) for loss in losses], grads
        pipeline.close()
    return found


class Double:
    """The model in float64, without dropout."""

    def __init__(self, model):
        self.tied, self.loss, self._model = model.tied, model.loss, model

    def build_stage(self, index, num_stages):
        return self._model.build_stage(index, num_stages).double().eval()


TIED_BY_DAY = [("gpt2", "zb_v"), ("llama", "zb_h1")]
TIED_BY_NIGHT = [("gpt2", schedule) for schedule in ("1f1b", "zb_h1", "interleaved_zb")]


@pytest.mark.parametrize("cases", [TIED_BY_DAY, pytest.param(TIED_BY_NIGHT, marks=pytest.mark.nightly)])
def test_tied_families_on_four_ranks_are_trained_as_the_librarys_whole_model(cases):
    everyone = run_ranks(tied_on_four_ranks, 4, cases, timeout=250)
    for kind, schedule in cases:
        whole, grads = tied_library_model(kind), {}
        loss = token_loss(whole(TOKENS).logits, TOKENS.roll(-1, 1))
        (2 * loss).backward()
        losses = [each for found in everyone for each in found[kind, schedule][0]]
        assert sum(losses) / len(losses) == pytest.approx(loss.item(), rel=1e-12)
        for found in everyone:
            grads |= found[kind, schedule][1]
        expected = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
        assert_close(grads, {name: expected[name] for name in grads})
        assert expected.keys() - grads.keys() <= {"lm_head.weight"}  # in a V the embedding's rank has it
