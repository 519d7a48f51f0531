"""Adapters on a quantized base, against transformers, bitsandbytes and peft in one process."""

import copy
import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.configs import composed
from helpers.hf_folders import saved
from helpers.peft_loop import trained_by_peft
from helpers.processes import run_ranks
from zbpp import Pipeline, backward_input, plan
from zbpp.commands import export
from zbpp.config import ConfigError
from zbpp.measure.fake_tensors import FakeTensors
from zbpp.measure.live_tensors import LiveTensors
from zbpp.measure.products import products
from zbpp.run.checks import check_together
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.lora import save_adapter
from zbpp.training.measured_steps import trained_and_all

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes")

from zbpp.models.hf import HuggingFace, load, quantize  # noqa: E402  # after the check for its library

pytestmark = [
    # peft reads what transformers has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 3, "lora_alpha": 6, "target_modules": NAMES, "init_lora_weights": False}
VOCAB, TIME, ROWS, M, STEPS = 40, 16, 4, 2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the weights of a model."""
    folder = tmp_path_factory.mktemp("base")
    saved("llama", folder)
    return str(folder)


def reference(base, kind, dtype=torch.float32, **options):
    """The library's own quantized model of a folder."""
    config = transformers.BitsAndBytesConfig(**KINDS[kind], **options)
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, quantization_config=config, use_cache=False
    )


def whole_state(stage):
    """All tensors of a stage, with those of its quantized weights, which its state_dict leaves out."""
    state = {}
    for name, module in stage.named_modules():
        module._save_to_state_dict(state, f"{name}.".lstrip("."), False)
    return state


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("nf4", torch.float32, {"bnb_4bit_use_double_quant": True}),
        ("nf4", torch.bfloat16, {"llm_int8_skip_modules": ["lm_head", "model.layers.*.mlp"]}),
        ("fp4", torch.float32, {}),
        ("int8", torch.bfloat16, {}),
    ],
)  # fmt: skip
def test_stages_have_the_weights_that_from_pretrained_quantizes(kind, dtype, options, base):
    name = str(dtype).removeprefix("torch.")
    model = HuggingFace(path=base, quantize=kind, quantize_options=options, dtype=name)
    expected = reference(base, kind, dtype, **options).state_dict()
    found = {}
    for index in range(2):
        stage = model.build_stage(index, 2)
        assert not any(each.requires_grad for each in stage.parameters())
        found |= whole_state(stage)
    assert found.keys() == expected.keys()
    assert all(each.dtype == expected[name].dtype for name, each in found.items())
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    quantized = {name for name, each in found.items() if each.dtype in (torch.uint8, torch.int8)}
    assert any("q_proj" in name for name in quantized)
    assert any("mlp" in name for name in quantized) is ("llm_int8_skip_modules" not in options)


@pytest.fixture(scope="module")
def quantized(base, tmp_path_factory):
    """Folders that save_pretrained has written of a quantized model."""
    folders = {kind: str(tmp_path_factory.mktemp(kind)) for kind in KINDS}
    options = {
        "nf4": {"bnb_4bit_use_double_quant": True},
        "int8": {"llm_int8_skip_modules": ["lm_head", "q_proj"]},
    }
    for kind, folder in folders.items():
        reference(base, kind, torch.bfloat16, **options.get(kind, {})).save_pretrained(folder)
    return folders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stages_read_a_quantized_folder_as_from_pretrained_does(kind, dtype, quantized, monkeypatch):
    """But for the dtype of weights that are not quantized: there the library takes that of the files."""
    read, names = load._loaded, []

    def watched(model, tensors, *args):
        names.append(set(tensors))
        return read(model, tensors, *args)

    model = HuggingFace(path=quantized[kind], dtype=dtype)
    monkeypatch.setattr(load, "_loaded", watched)
    stages = [model.build_stage(index, 2) for index in range(2)]
    expected = transformers.AutoModelForCausalLM.from_pretrained(quantized[kind]).state_dict()
    found = whole_state(stages[0]) | whole_state(stages[1])
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        is_cast = name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight"))
        is_cast |= "q_proj" in name and kind == "int8"
        assert found[name].dtype == (getattr(torch, dtype) if is_cast else each.dtype), name
        assert torch.equal(found[name], each.to(found[name].dtype)), name
    assert len(names) == 2
    assert not names[0] & names[1]
    assert names[0] == {
        name for name in names[0] if name in whole_state(stages[0]) or "weight_format" in name
    }


def test_adapters_on_a_quantized_folder_train_and_merge_as_in_peft(quantized, tmp_path):
    folder, lora = quantized["nf4"], {**LORA, "target_modules": "all-linear"}
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    for each in whole.parameters():
        each.data = each.float() if each.is_floating_point() else each
    whole = peft.get_peft_model(whole, peft.LoraConfig(**lora)).train()
    model = FineTuned(HuggingFace(path=folder), lora=lora)
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    with Pipeline(model, plan("zb_v", 1, M)) as pipeline:
        trained = {name: each for name, each in pipeline.named_parameters() if each.requires_grad}
        first = {name: each.detach().clone() for name, each in trained.items()}
        losses, own = [], optimizer(trained.values())
        for tokens, target in map(batch, range(STEPS)):
            own.zero_grad()
            losses.append(sum(each.item() for each in pipeline.step(tokens, target=target)) / M)
            own.step()
        save_adapter(tmp_path / "run/adapter", pipeline, lora, base=folder)
        logits = pipeline.predict(batch(0)[0])
    expected, last = trained_by_peft(whole, first, optimizer, map(batch, range(STEPS)))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all((trained[name] - each).abs().max() <= 1e-6 for name, each in last.items())
    node = {"_target_": "zbpp.models.hf.HuggingFace", "path": folder}
    (tmp_path / "run/config.yaml").write_text(json.dumps({"model": node, "finetune": {"lora": lora}}))
    assert (
        export.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(batch(0)[0]).logits, logits, rtol=1e-5, atol=1e-5)
    assert not hasattr(merged.config, "quantization_config")


class Reading(LiveTensors):
    """Counts bytes, but for the tensors of files, and the numbers that a kernel of bitsandbytes gets."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("bitsandbytes."):
            self.largest = max(self.largest, args[0].numel())
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_reading_a_stage_holds_its_quantized_weights_and_one_tensor(kind, tmp_path, monkeypatch):
    """A kernel takes several times the memory of what it gets, so it gets a large tensor in parts."""
    saved("llama", tmp_path, hidden_size=256, intermediate_size=4096, num_hidden_layers=2, vocab_size=64)
    model, reading, read = HuggingFace(path=str(tmp_path), quantize=kind), Reading(), load._loaded

    def watched(*args):
        with reading:
            return read(*args)

    monkeypatch.setattr(load, "_loaded", watched)
    stage = model.build_stage(0, 1)
    own = sum(each.nbytes for each in whole_state(stage).values())
    assert reading.highest <= own + 256 * 4096 * 4
    assert 0 < reading.largest <= quantize._AT_ONCE < 256 * 4096


@pytest.mark.parametrize(
    ("kind", "options"), [("nf4", {"bnb_4bit_use_double_quant": True}), ("fp4", {}), ("int8", {})]
)
def test_fake_tensors_take_the_bytes_of_quantized_ones(kind, options, base):
    model = HuggingFace(path=base, quantize=kind, quantize_options=options)
    real = whole_state(model.build_stage(0, 2))
    tables = "quant_map", "quant_state", "weight_format"  # some bytes per layer
    expected = sum(each.nbytes for name, each in real.items() if not any(word in name for word in tables))
    with FakeTensorMode():
        stage = model.build_stage(0, 2)
        held = [*stage.parameters(), *(each for name, each in stage.named_buffers() if "statistics" in name)]
        assert sum(each.nbytes for each in held) == expected


def test_the_products_of_a_stage_are_those_of_a_base_that_is_not_quantized(base):
    """The packed numbers of 4 bits counted as half as many weights, so W had twice its share."""
    found = []
    for kind in (None, "nf4", "int8"):
        model = FineTuned(HuggingFace(path=base, quantize=kind), lora=LORA)
        with FakeTensors():
            stage = model.build_stage(1, 2)
            found.append(products(1, stage, [(torch.empty(2, TIME, 32),)])[0])
    assert found[0] == found[1] == found[2]
    assert 0 < found[0].w < found[0].b


# ---------------------------------------------------------------- split and training


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_split_has_the_gradients_of_plain_autograd_to_the_last_bit(kind, base):
    model = FineTuned(HuggingFace(path=base, quantize=kind), lora=LORA)
    stage = model.build_stage(1, 2)
    x = torch.randn(2, TIME, 32, generator=torch.Generator().manual_seed(0))
    trained = {name: each for name, each in stage.named_parameters() if each.requires_grad}
    assert len(trained) == 2 * 2 * len(NAMES)

    def output():
        given = x.clone().requires_grad_()
        return stage(given), given

    logits, given = output()
    ones = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    expected = torch.autograd.grad(logits, [given, *trained.values()], ones)
    logits, given = output()
    (of_input,), weight_grads = backward_input(logits, ones, [given])
    assert all(each.grad is None for each in trained.values())
    weight_grads.accumulate()
    assert torch.equal(of_input, expected[0])
    assert all(torch.equal(one.grad, two) for one, two in zip(trained.values(), expected[1:], strict=True))


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Case(NamedTuple):
    """How a base is quantized, and the adapters on it."""

    kind: str
    num_slices: int = 1
    lora: Mapping[str, Any] = {}

    @property
    def options(self):
        return LORA | dict(self.lora)


DAILY = [
    Case("nf4"),
    Case("nf4", 4),
    Case("int8"),
    Case(
        "nf4", 1, {"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head", "norm"]}
    ),
]
OPTIONS = [
    {"target_modules": "all-linear"},
    {"use_dora": True},
    {"use_dora": True, "use_rslora": True, "lora_alpha": 3, "target_modules": "all-linear"},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"bias": "all"},
    {"bias": "lora_only", "target_modules": "all-linear"},
]
EVERY_NIGHT = [
    Case(kind, num_slices, lora)
    for kind, num_slices, lora in product(KINDS, (1, 4), OPTIONS)
    if not (kind == "int8" and "use_dora" in lora)
]


def by_peft(base, case, adapters):
    """The losses of peft's model in a plain loop, from these adapters; and its adapters at the end."""
    model = peft.get_peft_model(reference(base, case.kind), peft.LoraConfig(**case.options)).train()
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    return trained_by_peft(model, adapters, optimizer, map(batch, range(STEPS)))


def on_two_ranks(rank, base, cases):
    found = []
    for case in cases:
        model = FineTuned(HuggingFace(path=base, quantize=case.kind), lora=case.options)
        timetable = plan("zb_v", 2, M, num_slices=case.num_slices)
        bounds = range(0, TIME + 1, TIME // case.num_slices) if case.num_slices > 1 else ()
        with Pipeline(model, timetable, slice_bounds=bounds) as pipeline:
            first = copy.deepcopy(pipeline.state_dict())
            trained = [each for each in pipeline.parameters() if each.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9)
            losses = []
            for step in range(STEPS):
                tokens, target = batch(step)
                optimizer.zero_grad()
                losses.append([each.item() for each in pipeline.step(tokens, target=target)])
                optimizer.step()
            found.append((losses, first, copy.deepcopy(pipeline.state_dict())))
    return found


def check_as_in_peft(base, cases):
    ranks = run_ranks(on_two_ranks, 2, base, cases)
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        losses, first, last = zip(*of_ranks, strict=True)
        adapters = first[0] | first[1]
        expected, expected_last = by_peft(base, case, adapters)
        means = [sum(one or two) / M for one, two in zip(*losses, strict=True)]
        assert means == pytest.approx(expected, rel=1e-6), case
        assert (last[0] | last[1]).keys() == expected_last.keys()
        for name, each in expected_last.items():
            assert not torch.equal(each, adapters[name]), (case, name)
            assert ((last[0] | last[1])[name] - each).abs().max() <= 1e-6, (case, name)


def test_a_pipeline_trains_adapters_on_a_quantized_base_as_peft_does(base):
    check_as_in_peft(base, DAILY)


def test_adamw_widens_rounding_where_a_gradient_is_nearly_zero_and_nowhere_else(base):
    """Gradients agree to 1e-6 of the largest; adapters agree to 1e-6 where no gradient was below 1e-6.

    AdamW divides a gradient by its size (plus eps, 1e-8), so rounding d in a gradient g moves the weight by
    about lr * d / (|g| + eps). Here the second step has a gradient of 2e-9 with a rounding of 5e-12, and that
    weight ends 1.9e-6 away from peft's. peft itself, with its batch in two parts, ends 1e-6 away from peft.
    """
    lora = LORA | {"init_lora_weights": True}
    ours, theirs = [], []

    def adamw(seen, parameters):
        optimizer = torch.optim.AdamW(parameters := list(parameters), lr=0.01)
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([each.grad.flatten() for each in parameters]))
        )
        return optimizer

    model = FineTuned(HuggingFace(path=base, quantize="nf4"), lora=lora)
    with Pipeline(model, plan("zb_v", 1, M)) as pipeline:
        trained = {name: each for name, each in pipeline.named_parameters() if each.requires_grad}
        first = {name: each.detach().clone() for name, each in trained.items()}
        optimizer = adamw(ours, trained.values())
        for tokens, target in map(batch, range(STEPS)):
            optimizer.zero_grad()
            pipeline.step(tokens, target=target)
            optimizer.step()
    whole = peft.get_peft_model(reference(base, "nf4"), peft.LoraConfig(**lora)).train()
    _, expected = trained_by_peft(whole, first, partial(adamw, theirs), map(batch, range(STEPS)))
    assert list(expected) == list(trained)
    apart = torch.cat([(trained[name] - each).flatten().abs() for name, each in expected.items()])
    gradients, others = torch.stack(theirs), torch.stack(ours)
    assert (gradients - others).abs().max() <= 1e-6 * gradients.abs().max()
    is_small = ((gradients.abs() < 1e-6) & (gradients != 0)).any(dim=0)
    assert 0 < is_small.sum() < 0.05 * len(apart)
    assert apart[~is_small].max() <= 1e-6
    assert apart.max() <= 1e-4


@pytest.mark.nightly
def test_every_option_of_adapters_on_a_quantized_base_trains_as_in_peft(tmp_path):
    saved("llama", tmp_path, attention_bias=True, mlp_bias=True)
    check_as_in_peft(str(tmp_path), EVERY_NIGHT)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_parameters_are_counted_as_by_peft(kind, base):
    """Not the bytes of packed weights."""
    lora = {**LORA, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    whole = peft.get_peft_model(reference(base, kind), peft.LoraConfig(**lora))
    model = FineTuned(HuggingFace(path=base, quantize=kind), lora=lora)
    with Pipeline(model, "1f1b", num_microbatches=2) as pipeline:
        assert trained_and_all(pipeline) == whole.get_nb_trainable_parameters()


# ---------------------------------------------------------------- what is refused


ADAPTERS = ["finetune.lora.r=2", "finetune.lora.target_modules=[q_proj]"]
MISTAKES = [
    ({"quantize": "nf5"}, "quantize=nf5: write one of nf4, fp4, int8"),
    ({"quantize": "nf4", "path": None, "config": {"model_type": "llama"}}, "quantize=nf4 goes with path and"),
    ({"quantize": "int8", "strict": False}, "goes with path and strict=true"),
    ({"quantize_options": {"llm_int8_threshold": 1.0}}, "quantize_options go with quantize"),
    (
        {"quantize": "nf4", "quantize_options": {"bnb_4bit_use_double_quants": True}},
        "bnb_4bit_use_double_quants does not go with quantize=nf4.*did you mean bnb_4bit_use_double_quant?",
    ),
    (
        {"quantize": "int8", "quantize_options": {"bnb_4bit_use_double_quant": True}},
        "does not go with quantize=int8, which takes llm_int8_threshold, llm_int8_skip_modules",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_one_line(options, message, base):
    with pytest.raises(ValueError, match=message) as caught:
        HuggingFace(**{"path": base, **options})
    assert "\n" not in str(caught.value)


def test_a_quantized_base_is_trained_with_adapters_alone(base):
    for model in (
        HuggingFace(path=base, quantize="nf4"),
        FineTuned(HuggingFace(path=base, quantize="nf4"), train=["*norm*"]),
    ):
        with pytest.raises(ValueError, match="quantize=nf4 freezes all weights.*write finetune.lora"):
            Pipeline(model, "1f1b", num_microbatches=2)


def test_options_that_quantized_weights_do_not_have_are_refused_by_name(base):
    lora = {"r": 2, "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match=r"^lora.use_dora=true doesn't go with quantize=int8: .* write nf4"):
        FineTuned(HuggingFace(path=base, quantize="int8"), lora={**lora, "use_dora": True})
    model = FineTuned(HuggingFace(path=base, quantize="nf4"), lora={**lora, "modules_to_save": ["up_proj"]})
    with pytest.raises(ValueError, match=r"^lora.modules_to_save hits model.layers.0.mlp.up_proj, whose"):
        model.build_stage(0, 2)


def test_what_a_quantized_folder_does_not_go_with_is_refused(quantized):
    path = quantized["nf4"]
    with pytest.raises(ValueError, match="holds weights that are quantized already: leave quantize, quant"):
        HuggingFace(path=path, quantize="nf4")
    with pytest.raises(ValueError, match="a base in nf4 freezes all weights.*write finetune.lora"):
        Pipeline(HuggingFace(path=path), "1f1b", num_microbatches=2)
    given = "model=huggingface", f"model.path={path}"
    for further, message in (
        ([], "quantized, doesn't go with training all weights: .*write finetune.lora"),
        ([*ADAPTERS, "compile=layer"], "quantized, doesn't go with compile=layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_together(composed(*given, *further))


def test_a_tied_head_is_not_quantized(tmp_path):
    saved("llama", tmp_path, tie_word_embeddings=True)
    stage = HuggingFace(path=str(tmp_path), quantize="nf4").build_stage(1, 2)
    assert dict(stage.named_parameters())["lm_head.weight"].dtype is torch.float32
    options = {"llm_int8_skip_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="lm_head.weight to be quantized, which is tied .*: add lm_head to"):
        HuggingFace(path=str(tmp_path), quantize="nf4", quantize_options=options).build_stage(1, 2)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ([], "model.quantize=nf4 doesn't go with training all weights: .*write finetune.lora"),
        ([*ADAPTERS, "parallel.shard=2"], "quantize=nf4 doesn't go with parallel.shard=2"),
        ([*ADAPTERS, "compile=layer"], "quantize=nf4 doesn't go with compile=layer"),
        ([*ADAPTERS, "memory.offload_weights=true"], "quantize=nf4 doesn't go with memory.offload_weights"),
    ],
)
def test_a_run_that_a_quantized_base_does_not_go_with_is_refused_before_it_is_read(further, message):
    config = composed("model=huggingface", "model.path=nowhere", "model.quantize=nf4", *further)
    with pytest.raises(ConfigError, match=message):
        check_together(config)


@pytest.mark.parametrize(("family", "target"), [("llama", "q_proj"), ("gpt2", "c_attn")])  # gpt2: Conv1D
def test_merging_writes_the_dequantized_weights_with_the_adapter(family, target, tmp_path, caplog):
    base, run, lora = str(tmp_path / "base"), tmp_path / "run", {**LORA, "target_modules": [target]}
    saved(family, base)
    node = {"_target_": "zbpp.models.hf.HuggingFace", "path": base, "quantize": "nf4"}
    model = FineTuned(HuggingFace(path=base, quantize="nf4"), lora=lora)
    tokens, _ = batch(0)
    with Pipeline(model, "1f1b", num_microbatches=2) as pipeline:
        save_adapter(run / "adapter", pipeline, lora, base=base)
        expected = pipeline.predict(tokens)
    (run / "config.yaml").write_text(json.dumps({"model": node, "finetune": {"lora": lora}}))
    assert export.main([str(run), str(tmp_path / "merged"), "--merge"]) == 0
    assert "merged into the weights that nf4 has made of the base" in caplog.text
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert not hasattr(merged.config, "quantization_config")
