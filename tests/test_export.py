"""`zbpp export`: the folder that it writes, loaded by transformers, computes what the trained stages do."""

import json
import re
import shutil

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import zbpp
from helpers.hf_folders import TOKENS, config_of, reference, saved
from zbpp import Pipeline, plan
from zbpp.commands import export
from zbpp.config import instantiate_node
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.lora import save_adapter
from zbpp.training.weights import save_weights

SIZES = {"vocab_size": 40, "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
NATIVE = {**SIZES, "sequence_length": 16, "tie_embeddings": True}
MODELS = {
    "a config": {"_target_": "zbpp.models.hf.HuggingFace", "config": None},
    "a folder": {"_target_": "zbpp.models.hf.HuggingFace", "path": None},
    "our llama": {"_target_": "zbpp.models.llama.Llama", **NATIVE},
}  # fmt: skip


def trained(run, node, num_stages=4, **config):
    """Train a model for two steps in this process, as a run of zbpp train would leave it; its stages."""
    model = instantiate_node("model", node)
    pipeline = Pipeline(model, plan("interleaved_1f1b", 1, 2, stages_per_rank=num_stages))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.step(TOKENS, target=TOKENS.roll(-1, 1))
        optimizer.step()
    save_weights(run, pipeline)
    (run / "config.yaml").write_text(json.dumps({"model": node, **config}))
    stages = [stage.eval() for stage in pipeline.stages.values()]
    pipeline.close()
    return stages


def test_a_run_without_final_weights_gives_its_newest_whole_checkpoint(tmp_path, capsys):
    """One checkpoint can be named, too."""
    run = tmp_path / "run"
    model, node = instantiate_node("model", MODELS["our llama"]), MODELS["our llama"]
    pipeline = Pipeline(model, plan("interleaved_1f1b", 1, 2, stages_per_rank=2))
    stages, expected = list(pipeline.stages.values()), {}
    for step in (1, 2, 3):
        with torch.no_grad():
            pipeline.stages[1].get_parameter("norm.weight").add_(0.5)
        zbpp.save(run / "checkpoints", pipeline, step=step)
        expected[step] = logits(stages, TOKENS).detach()
    pipeline.close()
    (run / "config.yaml").write_text(json.dumps({"model": node}))
    spoiled_file = next((run / "checkpoints" / "step-3").glob("*.distcp"))
    spoiled_file.write_bytes(spoiled_file.read_bytes()[:-1])
    for source, step in ((run, 2), (run / "checkpoints" / "step-1", 1)):
        assert export.main([str(source), str(tmp_path / str(step))]) == 0
        found = reference(tmp_path / str(step))(TOKENS).logits
        torch.testing.assert_close(found, expected[step], rtol=1e-5, atol=1e-6)
    assert "passed over: " in capsys.readouterr().out


def logits(stages, output):
    for stage in stages:
        output = stage(output)
    return output


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_run_from_a_folder_becomes_a_folder_with_equal_logits(kind, tmp_path, capsys):
    """gpt2 ties its head; mixtral's files have an expert in a tensor of its own, before and after."""
    source, target = tmp_path / "source", tmp_path / "target"
    saved(kind, source)
    (source / "tokenizer_config.json").write_text("{}")
    stages = trained(tmp_path / "run", {**MODELS["a folder"], "path": str(source)})
    assert export.main([str(tmp_path / "run"), str(target), "--file-size", "20KB"]) == 0
    assert f"written to {target}" in capsys.readouterr().out
    assert torch.equal(reference(target)(TOKENS).logits, logits(stages, TOKENS))
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 25_000 for path in target.glob("*.safetensors"))
    before, after = (names(folder) for folder in (source, target))
    assert after == before
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert json.loads((target / "config.json").read_text())["use_cache"] is True


def names(folder):
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_a_run_from_a_config_is_written_in_one_file_and_in_the_dtype_asked_for(tmp_path):
    config = config_of("llama", tie_word_embeddings=True).to_diff_dict()
    stages = trained(tmp_path / "run", {**MODELS["a config"], "config": {**config, "model_type": "llama"}})
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    whole = reference(tmp_path / "out")
    assert whole.config.tie_word_embeddings
    for stage in stages:
        stage.bfloat16().float()
        for name, each in stage.named_parameters():
            assert torch.equal(whole.get_parameter(name), each)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_our_llama_becomes_transformers_llama(tmp_path):
    stages = trained(tmp_path / "run", MODELS["our llama"])
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    whole = reference(tmp_path / "out")
    assert type(whole).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(whole(TOKENS).logits, logits(stages, TOKENS), rtol=1e-5, atol=1e-6)


def test_the_export_has_the_tokenizer_and_the_chat_template_that_training_used(tmp_path, capsys, caplog):
    """data.chat_template was left out, and the model folder's tokenizer went before the one of the data."""
    from helpers.chat import PLAIN, write_tokenizer

    base, other, template = tmp_path / "base", tmp_path / "other", tmp_path / "chat.jinja"
    saved("llama", base)
    for folder in (base, other):
        folder.mkdir(exist_ok=True)
        write_tokenizer(folder / "tokenizer.json")
        made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        made.add_tokens([folder.name])
        made.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
        made.save_pretrained(folder)
    template.write_text(PLAIN)
    data = {"tokenizer": str(other), "chat_template": str(template)}
    trained(tmp_path / "run", {**MODELS["a folder"], "path": str(base)}, data=data)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template == PLAIN
    assert {"other", "base"} & found.get_vocab().keys() == {"other"}

    template.unlink()
    shutil.rmtree(other)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert "base" in found.get_vocab()
    assert f"the run's data.tokenizer={other} is not here" in caplog.text
    assert f"the run's data.chat_template={template} is not a file" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_an_export_names_no_layers_of_further_tokens_that_it_lacks(kind, tmp_path, caplog):
    """glm4_moe's config has one by default; servers look for its weights."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 8}
    values = {"glm4_moe": {**experts, "moe_intermediate_size": 16}, "llama": {"mtp_num_hidden_layers": 1}}[
        kind
    ]
    source = tmp_path / "source"
    saved(kind, source, num_nextn_predict_layers=1, **values)
    described = json.loads((source / "config.json").read_text())
    names = [name for name in described if "nextn" in name or "mtp" in name]
    assert {described[name] for name in names} == {1}
    trained(tmp_path / "run", {**MODELS["a folder"], "path": str(source)})
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {found[name] for name in names} == {0}
    assert "=0, not 1: the run trained no such layers" in caplog.text
    assert not any(getattr(reference(tmp_path / "out").config, name) for name in names)


MLP = {
    "_target_": "zbpp.models.mlp.Mlp",
    "in_features": 4,
    "hidden_size": 4,
    "out_features": 4,
    "num_layers": 4,
}


def spoiled(run, spoil):
    trained(run, MODELS["our llama"], num_stages=2)
    spoil(run)


def shortened(run):
    path = run / "stage-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def of_other_size(run):
    node = {**MODELS["our llama"], "num_layers": 5}
    (run / "config.yaml").write_text(json.dumps({"model": node}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda run: (run / "stage-0-of-2.safetensors").unlink(),
            "holds the weights of a part of the stages",
        ),
        (shortened, "stage-1-of-2.safetensors is no whole safetensors file"),
        (
            of_other_size,
            r"holds no model.layers.4.input_layernorm.weight \(9 tensors of the model are missing",
        ),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml can't be read"),
        (
            lambda run: (run / "config.yaml").write_text(json.dumps({"model": MLP})),
            "trained a Mlp, which",
        ),
        (lambda run: [path.unlink() for path in run.glob("*.safetensors")], "holds no weights"),
    ],
)
def test_a_run_that_can_not_be_exported_leaves_no_folder(spoil, message, tmp_path, capsys):
    spoiled(tmp_path / "run", spoil)
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_folder_with_files_is_not_written_to(tmp_path, capsys):
    trained(tmp_path / "run", MODELS["our llama"], num_stages=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert "out is there already, and not empty: name another folder" in capsys.readouterr().err


# ---------------------------------------------------------------- LoRA


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["norm", "lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only"}),
    ],
)
def test_a_lora_run_becomes_the_folder_that_peft_loads_or_a_merged_model(kind, options, tmp_path, capsys):
    """From the end of the run and from a checkpoint; gpt2's layers keep their weights transposed."""
    peft = pytest.importorskip("peft")
    base, run = tmp_path / "base", tmp_path / "run"
    saved(kind, base)
    (base / "tokenizer_config.json").write_text("{}")
    lora = {"r": 2, "lora_alpha": 7, "use_rslora": True, **options}
    node = {**MODELS["a folder"], "path": str(base)}
    model = FineTuned(instantiate_node("model", node), lora=lora)
    with Pipeline(model, plan("interleaved_1f1b", 1, 2, stages_per_rank=2)) as pipeline:
        optimizer = torch.optim.SGD([p for p in pipeline.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            pipeline.step(TOKENS, target=TOKENS.roll(-1, 1))
            optimizer.step()
        zbpp.save(run / "checkpoints", pipeline, step=3)
        save_adapter(run / "adapter", pipeline, lora, base=str(base))
        expected = pipeline.predict(TOKENS)
    (run / "config.yaml").write_text(json.dumps({"model": node, "finetune": {"lora": lora}}))

    for name, source in (("end", run), ("checkpoint", run / "checkpoints" / "step-3")):
        assert export.main([str(source), str(tmp_path / name)]) == 0
        loaded = peft.PeftModel.from_pretrained(reference(base), tmp_path / name)
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        assert export.main([str(source), str(tmp_path / f"{name} merged"), "--merge"]) == 0
        merged = reference(tmp_path / f"{name} merged")
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        assert (tmp_path / f"{name} merged" / "tokenizer_config.json").exists()
    assert (reference(base)(TOKENS).logits - expected).abs().max() > 1e-3

    (run / "config.yaml").write_text(json.dumps({"model": MODELS["our llama"], "finetune": {"lora": lora}}))
    for further, message in (([], "only those of model=huggingface"), (["--merge"], "leave --merge out")):
        with pytest.raises(SystemExit):
            export.main([str(run), str(tmp_path / "no"), *further])
        assert message in capsys.readouterr().err
