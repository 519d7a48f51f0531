"""LoRA and frozen weights on a pipeline against peft, and plain autograd, on the whole model."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from helpers.peft_loop import trained_by_peft
from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import Pipeline, PostValidation, make_mesh, plan
from zbpp.autograd import recompute
from zbpp.models.llama import Llama
from zbpp.stage_api import blocks_of
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.lora import save_adapter

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safe_open = pytest.importorskip("safetensors").safe_open

from zbpp.models.hf import HuggingFace  # noqa: E402  # after the check for its library

# peft reads what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

VOCAB, TIME, ROWS, M, STEPS = 40, 8, 8, 4, 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": TIME,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": VOCAB,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
BIASED = CONFIG | {"attention_bias": True, "mlp_bias": True}
UNTIED_GPT2 = GPT2 | {"tie_word_embeddings": False}
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}


def saved(folder, config):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the weights of a model."""
    return saved(tmp_path_factory.mktemp("base"), CONFIG)


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def model_of(base, lora=LORA, **further):
    return FineTuned(HuggingFace(path=base), lora=lora, **further)


def stages_of(model, schedule="zb_v", rank=0, num_ranks=1):
    timetable = plan(schedule, num_ranks, M)
    stages = {i: model.build_stage(i, timetable.num_stages).double() for i in timetable.stages_of(rank)}
    return stages, timetable


def perturb(parameters):
    """Adapters begin at zero; gradients of lora_A are zero then."""
    with torch.no_grad():
        for name, each in sorted(parameters):
            if ".lora_" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                each += 0.1 * torch.randn(each.shape, generator=generator, dtype=torch.float64)


def whole_peft(base, options=LORA):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False)


def by_peft(base, adapters, lora=LORA):
    """Losses of peft's model in a plain loop, from these adapters; and its adapters at the end."""
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return trained_by_peft(whole_peft(base, lora), adapters, optimizer, map(batch, range(STEPS)))


def adapters_of(pipeline):
    return {n: p.detach().clone() for n, p in pipeline.named_parameters() if p.requires_grad}


def train(pipeline, step_of, optimizer):
    losses = []
    place = pipeline.place
    rows = ROWS // place.num_data_parts
    part = slice(place.data_part * rows, (place.data_part + 1) * rows)
    for step in range(STEPS):
        tokens, target = batch(step)
        optimizer.zero_grad()
        found = step_of(tokens[part], target=target[part])
        losses.append(torch.stack(found).mean().item() if found else None)
    return losses


def by_pipeline(base, *, schedule="zb_v", is_recomputed=False, is_validated=False, lora=LORA, folder=None):
    """Losses, adapters before and after; if there is a folder, they are saved there, and logits come last."""
    model = model_of(base, lora)
    stages, timetable = stages_of(model, schedule)
    if is_recomputed:
        for stage in stages.values():
            for block in blocks_of(stage):
                recompute(block)
    with Pipeline(stages, timetable, model.loss) as pipeline:
        model.check_pipeline(pipeline)
        perturb(pipeline.named_parameters())
        first = adapters_of(pipeline)
        frozen = {n: p.detach().clone() for n, p in pipeline.named_parameters() if not p.requires_grad}
        optimizer = torch.optim.AdamW([p for p in pipeline.parameters() if p.requires_grad], lr=0.01)
        if is_validated:
            validated = PostValidation(pipeline, optimizer)
            losses = train(pipeline, validated.step, optimizer)
            validated.finish_update()
        else:
            losses = train(pipeline, step_and_update(pipeline, optimizer), optimizer)
        for name, each in pipeline.named_parameters():
            if name in frozen:
                assert each.grad is None, name
                assert torch.equal(each, frozen[name]), name
        if folder is None:
            return losses, first, adapters_of(pipeline)
        save_adapter(folder, pipeline, lora, base=base)
        tokens, target = batch(0)
        _, logits = pipeline.evaluate(tokens, target=target, return_outputs=True)
        return losses, first, adapters_of(pipeline), logits


def step_and_update(pipeline, optimizer):
    def step(*args, **kwargs):
        losses = pipeline.step(*args, **kwargs)
        optimizer.step()
        return losses

    return step


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "1f1b"}, {"is_recomputed": True}, {"is_validated": True}], ids=str
)
def test_a_pipeline_trains_adapters_as_peft_does(base, options):
    losses, first, last = by_pipeline(base, **options)
    expected, expected_last = by_peft(base, first)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(set(losses)) == STEPS
    for name, each in expected_last.items():
        assert not torch.equal(each, first[name])
        torch.testing.assert_close(last[name], each, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": False}, {"init_lora_weights": False, "use_dora": True}]
)
def test_constructed_values_do_not_depend_on_the_cut_but_on_the_seed(options, base):
    """Of peft without an initialization; DoRA's magnitudes are the norms of the weights with the product."""

    def adapters(num_stages, seed=0):
        model = model_of(base, LORA | options, seed=seed)
        stages = [model.build_stage(i, num_stages) for i in range(num_stages)]
        return {n: p for stage in stages for n, p in stage.named_parameters()}

    one, four, other = adapters(1), adapters(4), adapters(1, seed=1)
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if ".lora_" in name)
    if "use_dora" in options:
        name = "model.layers.2.mlp.down_proj"
        a, b = (one[f"{name}.lora_{each}.default.weight"] for each in "AB")
        norms = (one[f"{name}.base_layer.weight"] + 2 * b @ a).norm(dim=1)
        torch.testing.assert_close(one[f"{name}.lora_magnitude_vector.default.weight"], norms)


def test_initial_adapters_do_not_depend_on_the_cut_but_on_the_seed(base):
    def adapters(num_stages, seed=0):
        torch.manual_seed(num_stages)  # whatever was drawn before
        model = model_of(base, seed=seed)
        stages = [model.build_stage(i, num_stages) for i in range(num_stages)]
        return {n: p for stage in stages for n, p in stage.named_parameters() if ".lora_" in n}

    one, four, other = adapters(1), adapters(4), adapters(1, seed=1)
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    drawn = [name for name in one if one[name].any()]
    assert len(drawn) == len(one) // 2
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    # drawn as peft draws them: the bounds of its uniform numbers
    weight = one["model.layers.2.self_attn.q_proj.lora_A.default.weight"]
    assert 0.5 * 16**-0.5 < weight.abs().max() <= 16**-0.5


def test_the_adapters_files_load_in_peft_with_equal_logits(base, tmp_path):
    model = model_of(base)
    stages, timetable = stages_of(model)
    with Pipeline(stages, timetable, model.loss) as pipeline:
        perturb(pipeline.named_parameters())
        tokens, target = batch(0)
        _, logits = pipeline.evaluate(tokens, target=target, return_outputs=True)
        save_adapter(tmp_path / "adapter", pipeline, LORA, base=base)
    assert sorted(each.name for each in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter", autocast_adapter_dtype=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, logits, rtol=1e-10, atol=1e-12)
        with loaded.disable_adapter():
            assert (loaded(tokens).logits - logits).abs().max() > 1e-3


# ---------------------------------------------------------------- freezing by name


def test_frozen_by_name_the_rest_trains_as_in_plain_autograd(base):
    model = FineTuned(HuggingFace(path=base), freeze=["model.embed*", "*.layers.[0-2].*"])
    stages, timetable = stages_of(model)
    whole = HuggingFace(path=base).build_stage(0, 1).double()
    with Pipeline(stages, timetable, model.loss) as pipeline:
        model.check_pipeline(pipeline)
        trained = [name for name, each in pipeline.named_parameters() if each.requires_grad]
        tokens, target = batch(0)
        pipeline.step(tokens, target=target)
        nn.functional.cross_entropy(whole(tokens).flatten(0, 1), target.flatten()).backward()
        for name, each in whole.named_parameters():
            found = dict(pipeline.named_parameters())[name].grad
            if name not in trained:
                assert found is None
            else:
                torch.testing.assert_close(found, each.grad, rtol=1e-9, atol=1e-12, msg=name)
    assert {name.split(".")[2] for name in trained if "layers" in name} == {"3"}
    assert len(trained) == 11  # nine of layer 3, norm, head


def test_a_tied_parameter_is_frozen_by_any_of_its_names():
    stages = [FineTuned(Tied(), freeze=["head.*"]).build_stage(i, 2) for i in range(2)]
    assert [each.requires_grad for stage in stages for each in stage.parameters()] == [False, False]


class Toy:
    def build_stage(self, index, num_stages):
        own = range(4 * index // num_stages, 4 * (index + 1) // num_stages)
        return nn.Sequential(OrderedDict({str(i): nn.Linear(4, 4) for i in own}))

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)


class Tied(Toy):
    def build_stage(self, index, num_stages):
        return nn.Sequential(OrderedDict({("embedding", "head")[index]: nn.Linear(4, 4, bias=False)}))

    def tied(self):
        return {"head.weight": "embedding.weight"}


# ---------------------------------------------------------------- several ranks


def on_two_ranks(rank, base):
    found = {}

    def refused(model):
        try:
            Pipeline(model, "1f1b", num_microbatches=2).close()
        except ValueError as error:
            return str(error)
        return ""

    found["first"] = refused(FineTuned(Toy(), freeze=["0.*"]))
    found["none"] = refused(FineTuned(Toy(), freeze=["0.*", "7.*"]))
    found["all"] = refused(FineTuned(Toy(), freeze=["*"]))
    found["head"] = refused(model_of(base, {"r": 2, "target_modules": ["lm_head"]}))
    found["pattern"] = refused(
        model_of(base, {"r": 2, "target_modules": ["lm_head"], "rank_pattern": {"q_proj": 4}})
    )
    found["typo"] = refused(model_of(base, {"r": 2, "target_modules": ["lm_head", "q_prj"]}))
    found["saved"] = refused(
        model_of(base, {"r": 2, "target_modules": "all-linear", "modules_to_save": ["lm"]})
    )
    for name, degrees, ranks in (
        ("pipeline", {}, 2),
        ("shards", {"shard": 2}, 1),
    ):
        model = model_of(base)
        stages, timetable = stages_of(model, "zb_v", rank if ranks == 2 else 0, ranks)
        for stage in stages.values():
            perturb(stage.named_parameters())
        with Pipeline(stages, timetable, model.loss, mesh=make_mesh(**degrees)) as pipeline:
            optimizer = torch.optim.AdamW([p for p in pipeline.parameters() if p.requires_grad], lr=0.01)
            losses = train(pipeline, step_and_update(pipeline, optimizer), optimizer)
            found[name] = pipeline.place.gather(losses)
            save_adapter(Path(base) / name, pipeline, LORA, base=base)
    return found


def test_two_ranks_and_shards_train_adapters_alike(base):
    from safetensors.torch import load_file

    one, two = run_ranks(on_two_ranks, 2, base)
    assert one["first"] == two["first"] == one["head"] == two["head"] == ""
    assert "freeze: 7.* matches no parameter" in one["none"]
    assert one["none"] == two["none"]
    assert "leave no parameter to train" in one["all"]
    assert one["pattern"] == two["pattern"] == "lora.rank_pattern: q_proj matches none of lm_head"
    assert "target_modules: q_prj matches no module" in two["typo"]
    assert one["saved"] == two["saved"]
    assert one["saved"].startswith(
        "lora.modules_to_save: lm matches no module of the model; its modules with"
    )
    assert two["typo"].endswith("up_proj, v_proj; did you mean q_proj?")
    assert not {"base_layer", "default", "lora_A"} & set(re.findall(r"\w+", two["typo"]))
    expected, _, last = by_pipeline(base)
    for name in ("pipeline", "shards"):
        losses = [[each for each in step if each is not None] for step in zip(*one[name], strict=True)]
        assert [sum(each) / len(each) for each in losses] == pytest.approx(expected, rel=1e-9), name
        files = load_file(f"{base}/{name}/adapter_model.safetensors")
        assert len(files) == len(last)
        for key, each in last.items():
            found = files["base_model.model." + key.replace(".default", "")]
            torch.testing.assert_close(found, each, rtol=1e-6, atol=1e-8, msg=f"{name} {key}")


def adapted_llama():
    sizes = {"vocab_size": VOCAB, "sequence_length": TIME, "num_layers": 4, "hidden_size": 16, "num_heads": 2}
    return FineTuned(Llama(**sizes), lora=LORA | {"target_modules": ["query", "value", "down", "embedding"]})


def in_slices(rank):
    """(the sum of this rank's losses, gradients of its adapters)."""
    timetable, model = plan("zb_h1", 2, M, num_slices=2), adapted_llama()
    stages = {i: model.build_stage(i, 2).double() for i in timetable.stages_of(rank)}
    for stage in stages.values():
        perturb(stage.named_parameters())
    with Pipeline(stages, timetable, model.loss, slice_bounds=(0, 5, TIME)) as pipeline:
        tokens, target = batch(0)
        losses = pipeline.step(tokens, target=target)
        return sum(each.item() for each in losses), {n: p.grad for n, p in pipeline.named_parameters()}


def test_adapters_on_two_ranks_get_the_gradients_of_whole_sequences_from_slices():
    """zbpp's own Llama computes in float64 throughout: the library's norms don't."""
    ranks = run_ranks(in_slices, 2)
    model = adapted_llama()
    whole = model.build_stage(0, 1).double()
    perturb(whole.named_parameters())
    tokens, target = batch(0)
    loss = model.loss(whole(tokens), target)
    loss.backward()
    assert sum(found for found, _ in ranks) / M == pytest.approx(loss.item(), rel=1e-12)
    grads = {name: grad for _, own in ranks for name, grad in own.items()}
    expected = {name: each.grad for name, each in whole.named_parameters()}
    assert grads.keys() == expected.keys()
    assert {name for name, each in grads.items() if each is None} == {
        name for name in expected if ".lora_" not in name
    }
    assert_close(
        {name: each for name, each in grads.items() if each is not None},
        {name: each for name, each in expected.items() if each is not None},
        1e-12,
    )


# ---------------------------------------------------------------- every option of peft's LoraConfig


class Case(NamedTuple):
    """The value that an option is tried with, further options, and the base's config if it is another."""

    option: str
    value: Any
    further: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}


TRIED = [
    Case("r", 2),
    Case("target_modules", "model.layers.[02].self_attn.[kv]_proj"),
    Case("target_modules", "all-linear"),
    Case("target_modules", "all-linear", {"exclude_modules": ["h.1.mlp.c_fc"], "fan_in_fan_out": True}, GPT2),
    Case("lora_alpha", 5),
    Case("lora_dropout", 0.3),
    Case("lora_bias", True),
    Case("use_rslora", True),
    Case("use_dora", True),
    Case("use_dora", True, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}, UNTIED_GPT2),
    Case("bias", "all", {}, BIASED),
    Case("bias", "lora_only", {}, BIASED),
    Case("bias", "all", {"target_modules": "model.layers.0.self_attn.q_proj"}, BIASED),
    Case("modules_to_save", ["lm_head", "embed_tokens", "norm"]),
    Case("modules_to_save", ["lm_head", "3.mlp"], {"target_modules": "all-linear", "bias": "all"}, BIASED),
    Case("init_lora_weights", "gaussian"),
    Case("rank_pattern", {"layers.1.self_attn.q_proj": 1}),
    Case("alpha_pattern", {"down_proj": 3}),
    Case("exclude_modules", ["layers.1.self_attn.q_proj"]),
    Case("layers_to_transform", [1, 3]),
    Case("layers_pattern", "layers", {"layers_to_transform": [2]}),
    Case("fan_in_fan_out", True, {"target_modules": ["c_attn"]}, GPT2),
    Case("task_type", "CAUSAL_LM"),
    Case("revision", "main"),
]  # fmt: skip
REFUSED = {
    "trainable_token_indices": [1],
    "target_parameters": ["q_proj.weight"],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "qalora_group_size": 8,
    "ensure_weight_tying": True,
    "layer_replication": [[0, 2]],
    "inference_mode": True,
    "megatron_config": {"a": 1},
    "megatron_core": "other",
    "loftq_config": {"loftq_bits": 8},
    "runtime_config": {"ephemeral_gpu_offload": True},
    "base_model_name_or_path": "other",
    "auto_mapping": {"a": "b"},
    "peft_type": "IA3",
    "peft_version": "0",
    "use_bdlora": {},
} | {f"{kind}_config": {} for kind in ("eva", "corda", "lora_ga", "velora", "monteclora", "arrow", "kasa")}


def test_each_option_of_peft_is_tried_below():
    """An option that a new peft has fails this test: write it into one of the two tables."""
    supported = {each.option for each in TRIED}
    assert supported | REFUSED.keys() >= {each.name for each in fields(peft.LoraConfig)}
    assert not supported & REFUSED.keys()


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_is_not_as_in_peft_is_refused_by_name(option):
    lora = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    with pytest.raises(ValueError, match=rf"^lora\.{option}=.*: a pipeline can't"):
        FineTuned(Toy(), lora=lora | {option: REFUSED[option]})


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer")
@pytest.mark.parametrize("case", TRIED, ids=lambda case: f"{case.option}={case.value}")
def test_an_option_trains_saves_and_loads_as_in_peft(case, base, tmp_path):
    lora = {"r": 3, "target_modules": ["q_proj", "down_proj"]} | {case.option: case.value} | case.further
    if case.config:
        base = saved(tmp_path / "base", case.config)
    losses, first, last, logits = by_pipeline(base, lora=lora, folder=tmp_path / "adapter")
    if case.option != "lora_dropout":  # its random numbers are the pipeline's own
        expected, expected_last = by_peft(base, first, lora)
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, each in expected_last.items():
            torch.testing.assert_close(last[name], each, rtol=1e-6, atol=1e-8, msg=name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter", autocast_adapter_dtype=False)
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as file:
        by_library = peft.get_peft_model_state_dict(loaded, loaded.state_dict(), save_embedding_layers=False)
        assert sorted(file.keys()) == sorted(by_library)
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch(0)[0]).logits, logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 2}, "target_modules is not set"),
        ({"r": 2, "target_modules": ["q_proj"], "bias": "some"}, "write one of none, all, lora_only"),
        ({"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "base weights"),
    ],
)
def test_what_lora_can_not_be_on_a_pipeline_is_said(options, words):
    with pytest.raises(ValueError, match=words):
        FineTuned(Toy(), lora=options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": "q_proj"}, r"text is a pattern of whole names: write a list, \[q_proj\]"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [9]},
            "layers_to_transform or modules_to_save",
        ),
    ],
)
def test_a_module_that_is_there_and_no_target_is_not_called_a_typing_error(options, words, base):
    with pytest.raises(ValueError, match=words):
        Pipeline(model_of(base, options), "1f1b", num_microbatches=2)


@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("stage", range(3))
def test_a_tied_target_is_named_on_every_rank(option, target, stage):
    """The middle stage has neither of the two modules."""
    base = HuggingFace(config=CONFIG | {"tie_word_embeddings": True})
    model = FineTuned(base, lora={"r": 2, "target_modules": ["q_proj"]} | {option: ["k_proj", target]})
    with pytest.raises(ValueError, match=rf"finetune\.lora\.{option} hits (model\.)?{target}"):
        model.build_stage(stage, 3)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "w1", "w3"]])
def test_experts_that_peft_adapts_by_other_means_are_named(targets):
    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 2, "num_key_value_heads": 2}
    model = FineTuned(HuggingFace(config=config), lora={"r": 2, "target_modules": targets})
    with pytest.raises(ValueError, match=r"^lora.target_modules=.* hits experts.*\(.*gate_up_proj.*write"):
        model.build_stage(0, 2)
