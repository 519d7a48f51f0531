"""Weights from a folder, against the library's own from_pretrained on the same folder."""

import json

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

from helpers.hf_folders import TOKENS, reference, saved
from zbpp.models.hf import HuggingFace, load


def run(stages, *batch):
    for stage in stages:
        batch = stage(*batch)
        batch = batch if isinstance(batch, tuple) else (batch,)
    return batch[0]


CASES = {
    "llama": {},
    "llama, tied, bfloat16": {"tie_word_embeddings": True, "dtype": torch.bfloat16, "files": "9KB"},
    "gpt2": {},
    "gpt2 named by its base model": {"base": True},
    "mixtral, an expert in a tensor of its own": {},
    "gemma tied": {"tie_word_embeddings": True, "head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_stage_has_what_from_pretrained_has(case, tmp_path):
    saved(case.split()[0].strip(","), tmp_path, **CASES[case])
    whole, model = reference(tmp_path), HuggingFace(path=str(tmp_path))
    expected = whole.state_dict()
    for num_stages in (1, 2):
        stages = [model.build_stage(index, num_stages).eval() for index in range(num_stages)]
        found = {name: value for stage in stages for name, value in stage.state_dict().items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert torch.equal(run(stages, TOKENS), whole(TOKENS).logits)
        assert not any(each.is_meta for stage in stages for each in (*stage.parameters(), *stage.buffers()))


class Noted:
    """A tensor of a file; writes down that it is read."""

    def __init__(self, name, tensor, seen):
        self.name, self.tensor, self.seen, self.get_shape = name, tensor, seen, tensor.get_shape

    def __getitem__(self, index):
        self.seen.append(self.name)
        return self.tensor[index]


def test_a_stage_reads_its_own_tensors_only(tmp_path, monkeypatch):
    """The embedding is read twice where the head is tied to it: each of the two stages has a copy."""
    saved("llama", tmp_path, tie_word_embeddings=True)
    seen, opened = [], load._opened
    monkeypatch.setattr(
        load, "_opened", lambda folder: {n: Noted(n, each, seen) for n, each in opened(folder).items()}
    )
    model, by_stage = HuggingFace(path=str(tmp_path)), []
    assert seen == []
    for index in range(4):
        stage = model.build_stage(index, 4)
        own = {name for name, _ in stage.named_parameters()}
        by_stage.append(set(seen))
        assert {name.replace("lm_head", "model.embed_tokens") for name in own} == set(seen)
        seen.clear()
    assert by_stage[0] & by_stage[3] == {"model.embed_tokens.weight"}
    assert not by_stage[0] & by_stage[1]


def test_a_file_in_bfloat16_fills_parameters_of_float32_or_of_bfloat16(tmp_path):
    saved("llama", tmp_path, dtype=torch.bfloat16)
    dtypes = [
        {p.dtype for p in HuggingFace(path=str(tmp_path), **options).build_stage(0, 2).parameters()}
        for options in ({}, {"dtype": "bfloat16"})
    ]
    assert dtypes == [{torch.float32}, {torch.bfloat16}]


def test_overrides_change_values_of_the_folders_config(tmp_path):
    saved("llama", tmp_path)
    model = HuggingFace(path=str(tmp_path), overrides={"rms_norm_eps": 0.5})
    assert model.library_config().rms_norm_eps == 0.5
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, rms_norm_eps=0.5).eval()
    stages = [model.build_stage(index, 2).eval() for index in range(2)]
    assert torch.equal(run(stages, TOKENS), whole(TOKENS).logits)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm_epz": 1}, "overrides.rms_norm_epz: .* has no such key"),
        ({"hidden_size": "big"}, "overrides.hidden_size=big does not fit .*config.json: .*expected int"),
        ({"num_attention_heads": 3}, "does not fit .* not a multiple of the number of attention heads"),
    ],
)
def test_overrides_that_do_not_fit_are_one_line(overrides, message, tmp_path):
    saved("llama", tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        HuggingFace(path=str(tmp_path), overrides=overrides)
    assert "\n" not in str(raised.value)


def changed(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def of_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def lost_shard(folder):
    saved("llama", folder, files="9KB")
    (folder / "model.safetensors").unlink()
    sorted(folder.glob("model-*.safetensors"))[2].unlink()


def to_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.layers.1.input_layernorm.weight"
MISTAKES = [
    (lambda f: changed(f, lambda t: t.pop(NORM)), f"lacks 1 tensors of the model \\({NORM}\\)"),
    (lambda f: changed(f, lambda t: t.update(more=torch.ones(2))), r"has 1 that the model does not \(more\)"),
    (lambda f: changed(f, lambda t: t.update({NORM: torch.ones(5)})), rf"{NORM} is \[5\] in .*, and \[32\]"),
    (lambda f: of_config(f, num_hidden_layers=5), r"lacks 9 tensors .*model.layers.4.*and 4 more\)"),
    (lambda f: of_config(f, model_type="lamma"), "model_type=lamma is no causal"),
    (lambda f: of_config(f, model_type="vit"), "model_type=vit is no causal language .* a class of"),
    (lambda f: of_config(f, quantization_config={"quant_method": "gptq"}), "quantized weights"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (to_bin, r"has neither model.safetensors nor .*save_pretrained"),
    (truncated, r"model.safetensors is no whole safetensors file .*download it again"),
    (lost_shard, r"model-00003-of-.* is no whole safetensors file .*download it again"),
    (
        lambda f: of_config(f, tie_word_embeddings=True),  # its head has other values than its embedding
        "config.json ties lm_head.weight to model.embed_tokens.weight, but the files hold different values",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), MISTAKES)
def test_a_folder_that_is_not_whole_or_of_another_model_is_refused_by_name(spoil, message, tmp_path):
    saved("llama", tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        HuggingFace(path=str(tmp_path)).build_stage(0, 1)
    assert "\n" not in str(caught.value)


def test_what_is_no_folder_and_what_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(ValueError, match="path=gpt2 has no config.json.*hf download NAME --local-dir FOLDER"):
        HuggingFace(path="gpt2")
    with pytest.raises(ValueError, match="overrides and dtype go with path"):
        HuggingFace(config={"model_type": "llama"}, dtype="bfloat16")


def test_without_strict_missing_tensors_start_from_the_librarys_values_and_others_are_left_out(tmp_path):
    saved("llama", tmp_path)
    changed(tmp_path, lambda tensors: tensors.update(extra=tensors.pop("lm_head.weight")))
    model = HuggingFace(path=str(tmp_path), strict=False)
    head = dict(model.build_stage(1, 2).named_parameters())["lm_head.weight"]
    assert head.std().item() == pytest.approx(0.02, rel=0.1)
    expected = reference(tmp_path).get_parameter(NORM)
    assert torch.equal(dict(model.build_stage(0, 2).named_parameters())[NORM], expected)
