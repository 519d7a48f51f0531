"""Which values are rounded to 16 bits: the weights that train in F and B, and nothing else."""

import copy
import json
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import nn

import zbpp
from helpers.hf_folders import config_of, reference, saved
from zbpp import MasterWeights, Pipeline, plan
from zbpp.autograd.compiled import compile_stage
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.models.hf import HuggingFace
from zbpp.models.hf.export import write_folder
from zbpp.run.optimizer import build_masters
from zbpp.run.stages import move_loss, move_stages
from zbpp.training.batches import batch_for
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.optim.precision import PRECISIONS, give_dtypes, kept_in_float32
from zbpp.training.weights import save_weights, weights_of_run

CPU = torch.device("cpu")
LATE = torch.randint(40, (1, 1100), generator=torch.Generator().manual_seed(3))
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "llama": {},
    "glm4_moe": {**EXPERTS, "n_shared_experts": 1, "head_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip


def prepared(stages, name):
    """The stages as a run of this precision computes with them."""
    precision = PRECISIONS[name]
    move_stages(stages, CPU, precision)
    for stage in stages.values() if precision.is_mixed else ():
        MasterWeights(stage.parameters(), precision.compute, keep=kept_in_float32(stage, precision))
    return [stage.eval() for stage in stages.values()]


def run(stages, *batch):
    for stage in stages:
        batch = stage(*batch)
        batch = batch if isinstance(batch, tuple) else (batch,)
    return batch[0]


def folder_of(kind, folder, dtype=torch.float32):
    """A folder of a family; its routing biases are not zero."""
    saved(kind, folder, dtype=dtype, **SIZES, **FAMILIES[kind])
    tensors = load_file(folder / "model.safetensors")
    for name, each in tensors.items():
        if name.endswith("e_score_correction_bias"):
            each.copy_(0.5 + 0.002 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


_NIGHTLY = pytest.mark.nightly
CASES = [
    ("llama", "bfloat16"),
    pytest.param("llama", "mixed_bfloat16", marks=_NIGHTLY),
    pytest.param("glm4_moe", "bfloat16", marks=_NIGHTLY),
    pytest.param("ernie4_5_moe", "bfloat16", marks=_NIGHTLY),
    ("ernie4_5_moe", "mixed_bfloat16"),
    pytest.param("gpt_oss", "mixed_float16", marks=_NIGHTLY),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_logits_at_late_positions_are_those_of_from_pretrained_in_16_bits(kind, name, tmp_path):
    """Rotary frequencies were rounded, and so were a router's weights and biases."""
    model = HuggingFace(path=str(folder_of(kind, tmp_path)), head="whole")
    stages = prepared({index: model.build_stage(index, 2) for index in range(2)}, name)
    with torch.no_grad():
        expected = reference(tmp_path, dtype=PRECISIONS[name].compute)(LATE).logits
        assert torch.equal(run(stages, LATE)[:, 1000:], expected[:, 1000:])


def test_an_export_in_16_bits_has_the_dtypes_of_from_pretrained(tmp_path):
    source, target = folder_of("ernie4_5_moe", tmp_path / "source"), tmp_path / "target"
    whole = reference(source).state_dict()
    target.mkdir()
    options = {"dtype": torch.bfloat16, "file_size": "1GB"}
    write_folder(
        target, config_of("ernie4_5_moe", **FAMILIES["ernie4_5_moe"], **SIZES), [*whole], whole.get, **options
    )
    expected, found = (
        reference(each, dtype="auto" if each is target else torch.bfloat16).state_dict()
        for each in (source, target)
    )
    assert {each.dtype for each in expected.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


class Counter(nn.Module):
    """Counts its microbatches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("name", ["bfloat16", "mixed_bfloat16"])
def test_a_float32_counter_counts_beyond_256(name):
    """In bfloat16 256 + 1 is 256."""
    stages = {0: Counter()}
    prepared(stages, name)
    assert stages[0].layer.weight.dtype == torch.bfloat16
    pipeline = Pipeline(stages, plan("zb_h1", 1, 300), nn.functional.mse_loss)
    x = torch.ones(300, 2, dtype=torch.bfloat16)
    stages[0].train()
    pipeline.step(x, target=x)
    assert stages[0].count == 300


def frozen_pipeline(seed):
    """A pipeline in mixed precision whose first layer is not trained, and its masters."""
    torch.manual_seed(seed)
    stages = {0: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))}
    precision = PRECISIONS["mixed_bfloat16"]
    move_stages(stages, CPU, precision)
    pipeline = Pipeline(stages, plan("zb_h1", 1, 2), nn.functional.mse_loss)
    return pipeline, build_masters(pipeline, precision)


def test_frozen_weights_leave_a_mixed_run_as_they_came(tmp_path):
    """They came out rounded: a run's files, its checkpoints, and what goes on from these."""
    pipeline, masters = frozen_pipeline(0)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).state_dict()
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    pipeline.step(x, target=x)
    torch.optim.SGD(masters.parameters(), lr=0.1).step()
    masters.update()
    save_weights(tmp_path, pipeline, masters)
    zbpp.save(tmp_path / "checkpoints", pipeline, step=1, masters=masters)
    resumed, its_masters = frozen_pipeline(1)
    zbpp.load(tmp_path / "checkpoints", resumed, masters=its_masters)
    frozen = resumed.stages[0][0]
    found = {
        "run": weights_of_run(tmp_path).read,
        "checkpoint": weights_of_run(tmp_path / "checkpoints/step-1").read,
        "resumed": lambda name: its_masters.of(resumed.stages[0].get_parameter(name)),
    }
    for name, each in expected.items():
        assert not torch.equal(each.bfloat16().float(), each)
        assert torch.equal(frozen.get_parameter(name), each.bfloat16())  # what F computes with
        for where, read in found.items():
            assert torch.equal(read(f"0.{name}"), each), where


class Centred(nn.Module):
    """Inputs near 1000, of which float32 knows differences that bfloat16 does not; and a table."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first((x - 1000) / 8) + self.table).tanh())


class One:
    """A source with one batch."""

    def __init__(self, *batch):
        self.batch = lambda number: batch


@pytest.mark.parametrize("name", ["bfloat16", "mixed_bfloat16"])
def test_float_inputs_keep_their_values_as_under_autocast(name):
    """998.39 arrived as 1000."""
    torch.manual_seed(0)
    plain = Centred()
    stages, x = {0: copy.deepcopy(plain)}, 1000 + 8 * torch.randn(64, 4)
    prepared(stages, name)
    (given,), _ = batch_for(stages, 1, One(x, x), 0, CPU)
    assert torch.equal(given, x)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x)
        torch.testing.assert_close(stages[0](given).float(), expected.float(), rtol=0, atol=0.02)
        assert torch.equal(copy.deepcopy(stages[0])(given), stages[0](given))
    assert not torch.allclose(plain(x.bfloat16().float()), plain(x), rtol=0, atol=0.04)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_transformer_layer_takes_float_inputs_in_16_bits(is_trained):
    """Its evaluation failed: there torch reads the weights of the layers inside without calling them."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)
    expected = copy.deepcopy(layer).bfloat16().train(is_trained)
    prepared({0: layer}, "bfloat16")
    with torch.set_grad_enabled(is_trained):
        assert torch.equal(layer.train(is_trained)(x), expected(x.bfloat16()))


def test_layers_that_are_alike_are_compiled_once_in_16_bits():
    """Dynamo took the forwards of two layers for two functions, so that every layer was compiled."""
    stage = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    prepared({0: stage}, "bfloat16")
    said, x = [], torch.ones(2, 4, requires_grad=True)
    compile_stage(stage, whole=False, backend="eager", say=said.append)
    stage(x.bfloat16())
    assert len(said) == 2, said


def test_a_layer_that_casts_its_inputs_can_be_pickled():
    stage, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4).bfloat16()
    prepared({0: stage}, "bfloat16")
    assert torch.equal(pickle.loads(pickle.dumps(stage))(x), stage(x))


class Declaring(nn.Linear):
    """A layer that keeps its bias in float32."""

    def declared_dtypes(self, dtype):
        return {"bias": torch.float32}


def test_what_a_stage_declares_holds_behind_torch_compile():
    """Names in the module that torch.compile returns have a prefix, so that no declared dtype was found."""
    stage = Declaring(2, 2)
    give_dtypes(torch.compile(stage, backend="eager"), PRECISIONS["bfloat16"])
    assert (stage.weight.dtype, stage.bias.dtype) == (torch.bfloat16, torch.float32)


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_takes_float_inputs_as_under_autocast(kind):
    """999 and 1001 became one value before the mean was subtracted."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(NORMS[kind](), nn.Linear(8, 8)), 1000 + 2 * torch.randn(6, 4, 8)
    prepared(stages := {0: copy.deepcopy(plain)}, "bfloat16")
    stages[0].train()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    torch.testing.assert_close(stages[0](x).float(), expected.float(), rtol=0.01, atol=0.05)
    for found, each in zip(stages[0].buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, each)


def test_an_lstm_takes_float_states():
    stage = prepared({0: nn.LSTM(4, 4)}, "bfloat16")[0]
    x, state = torch.randn(2, 3, 4), torch.randn(1, 3, 4)
    narrow = state.bfloat16()
    assert torch.equal(stage(x, (state, state))[0], stage(x.bfloat16(), (narrow, narrow))[0])


def test_offloaded_weights_take_float_inputs_in_their_dtype():
    """A layer that casts its input was refused, as one with a forward of its own."""
    stages, x = {0: nn.Sequential(nn.Linear(4, 4))}, torch.randn(4, 4)
    plain = prepared(copy.deepcopy(stages), "bfloat16")[0]
    prepared(stages, "bfloat16")
    OffloadedWeights(stages, CPU)
    losses = Pipeline(stages, plan("zb_h1", 1, 2), nn.functional.mse_loss).step(x, target=x)
    expected = [nn.functional.mse_loss(plain(rows), rows) for rows in x.chunk(2)]
    assert all(map(torch.equal, losses, expected))


class Weighted:
    """A model whose loss weighs classes, by a tensor of its own and by a loss of torch."""

    def __init__(self):
        self.weights = torch.tensor([1.0, 3.0])
        self.criterion = nn.CrossEntropyLoss(weight=self.weights.clone())
        self.whole = nn.Linear(2, 2)

    def loss(self, output, target):
        own = nn.functional.cross_entropy(output, target, weight=self.weights)
        return own + self.criterion(output, target)


@pytest.mark.parametrize("name", ["float64", "bfloat16", "mixed_bfloat16"])
def test_tensors_of_a_loss_get_the_dtype_of_its_output_and_the_device(name):
    """cross_entropy wants weights in the dtype of the logits; float64 and bfloat16 raised."""
    model, dtype = Weighted(), PRECISIONS[name].stored
    logits, target = torch.tensor([[0.5, 1.0], [2.0, 1.0]]), torch.tensor([0, 1])
    expected = model.loss(logits, target)
    move_loss(FineTuned(model), CPU, dtype)
    torch.testing.assert_close(model.loss(logits.to(dtype), target).float(), expected, rtol=0.02, atol=0)
    assert model.whole.weight.dtype == torch.float32  # the stages are moved, not what they are cut from
    move_loss(model, torch.device("meta"), dtype)
    assert model.weights.is_meta
    assert model.criterion.weight.is_meta
