"""Tensor-parallel stages of Llama and Gpt over two real processes, against the whole stage in one."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.processes import run_ranks
from helpers.split import assert_close, deferred_and_computed, double, refusal_to_parallelize
from zbpp import backward_input
from zbpp.autograd import explain
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.runtime.boundary import checked_outputs

VOCAB, TIME = 19, 8  # two ranks can't share 19 columns evenly
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": TIME}
MODELS = {
    "llama": Llama(**SIZES, num_kv_heads=2, intermediate_size=24),
    "llama, sequence parallel": Llama(**SIZES, num_kv_heads=2, intermediate_size=24, sequence_parallel=True),
    "gpt": Gpt(**SIZES),
    "gpt, sequence parallel": Gpt(**SIZES, sequence_parallel=True),
}
CASES = [(name, index, num) for name in MODELS for index, num in ((0, 1), (0, 2), (1, 2))]


class Outcome(NamedTuple):
    """Whole tensors by name: the output, the input's gradient, the parameters and their gradients."""

    tensors: dict[str, Any]
    names: list[str]
    deferred_share: float
    local_bytes: int


def stage_of(model, index, num_stages):
    """A stage in float64 with norm scales and biases that matter."""
    stage = model.build_stage(index, num_stages).double()
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for weight in stage.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return stage


def input_of(index):
    if index == 0:
        return torch.randint(VOCAB, (2, TIME), generator=torch.Generator().manual_seed(1))
    return double(2, TIME, 16, seed=2).requires_grad_()


def trained(stage, index):
    """One forward and split backward in training mode."""
    x = input_of(index)
    output = stage(x)
    explained = explain(output, x, stage.named_parameters())
    total = sum(row.nbytes for row in explained.rows)
    share = sum(row.nbytes for row in explained.rows if row.where == "W") / total
    (grad,), weight_grads = backward_input(output, double(*output.shape, seed=3), x)
    deferred, _ = deferred_and_computed(stage, weight_grads)
    assert {row.name for row in explained.rows if row.where == "W"} == deferred
    weight_grads.accumulate()
    tensors = {"output": output.detach(), "x.grad": torch.zeros(1) if grad is None else grad}
    for name, parameter in stage.named_parameters():
        assert type(parameter.grad) is type(parameter.data), name
        tensors[name], tensors[f"{name}.grad"] = whole(parameter.detach()), whole(parameter.grad)
    names = [name for name, _ in stage.named_parameters()]
    return Outcome(tensors, names, share, sum(map(bytes_here, stage.parameters())))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bytes_here(parameter):
    """Bytes of the memory that a parameter keeps."""
    own = parameter.detach()
    return (own._local_tensor if isinstance(own, DTensor) else own).untyped_storage().nbytes()


def alone(name, index, num_stages):
    """Plain autograd in this process."""
    stage, x = stage_of(MODELS[name], index, num_stages), input_of(index)
    output = stage(x)
    output.backward(double(*output.shape, seed=3))
    tensors = {"output": output.detach(), "x.grad": torch.zeros(1) if x.grad is None else x.grad}
    for parameter_name, parameter in stage.named_parameters():
        tensors[parameter_name], tensors[f"{parameter_name}.grad"] = parameter.detach(), parameter.grad
    return tensors, [name for name, _ in stage.named_parameters()]


def parallel(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for name, index, num_stages in CASES:
        stage = stage_of(MODELS[name], index, num_stages)
        MODELS[name].parallelize(stage, mesh)
        found[name, index, num_stages] = trained(stage, index)
    return found, refusals(mesh)


def refusals(mesh):
    """Messages of what can't be parallelized; asserts that nothing was changed."""
    sizes = {**SIZES, "hidden_size": 24}
    odd = {
        "heads": Llama(**{**sizes, "num_heads": 3}),
        "kv heads": Llama(**{**sizes, "num_heads": 12}, num_kv_heads=3),
        "intermediate": Llama(**SIZES, intermediate_size=7),
        "gpt": Gpt(**{**sizes, "num_heads": 3}),
        "dropout": Gpt(**SIZES, dropout=0.1),
    }
    found = {name: refusal_to_parallelize(model, mesh) for name, model in odd.items()}
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    found["mesh"] = refusal_to_parallelize(MODELS["gpt"], other)
    stage = MODELS["llama, sequence parallel"].build_stage(0, 1)
    MODELS["llama, sequence parallel"].parallelize(stage, mesh)
    try:
        stage(torch.zeros(1, 5, dtype=torch.int64))
    except ValueError as error:
        found["length"] = str(error)
    try:
        checked_outputs(3, stage.head.weight)
    except ValueError as error:
        found["boundary"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(parallel, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_parallel_stage_computes_what_the_whole_stage_does(case, ranks):
    """Outputs, gradients and initial values; names and their order stay."""
    expected, names = alone(*case)
    for found, _ in ranks:
        assert found[case].names == names
        assert_close(found[case].tensors, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_explain_shows_the_share_of_weights_that_waits_in_the_whole_stage(case, ranks):
    name, index, num_stages = case
    whole = trained(stage_of(MODELS[name], index, num_stages), index)
    assert whole.deferred_share > 0.9
    for found, _ in ranks:
        assert found[case].deferred_share == whole.deferred_share


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ranks_agree_to_the_last_bit(case, ranks):
    (one, _), (other, _) = ranks
    for name, tensor in one[case].tensors.items():
        assert torch.equal(tensor, other[case].tensors[name]), name


def test_a_rank_keeps_its_own_shards_in_memory_only(ranks):
    """Half of all matrices but the head, of whose 19 rows the ranks have 10 and 9; whole norms."""
    case = ("llama", 0, 1)
    stage = stage_of(MODELS["llama"], 0, 1)
    head, norms = 19 * 16, 5 * 16
    halves = sum(parameter.numel() for parameter in stage.parameters()) - head - norms
    for rows, (found, _) in zip((10, 9), ranks, strict=True):
        assert found[case].local_bytes == 8 * (halves // 2 + rows * 16 + norms)


def test_a_degree_that_does_not_fit_is_refused_before_anything_is_changed(ranks):
    for _, refusals in ranks:
        for name, message in {
            "heads": "num_heads=3 is not divisible by the tensor-parallel degree=2: write num_heads=2 or 4",
            "kv heads": "num_kv_heads=3 is not divisible by the tensor-parallel degree=2",
            "intermediate": "intermediate_size=7 is not divisible by the tensor-parallel degree=2",
            "gpt": "num_heads=3 is not divisible by the tensor-parallel degree=2",
            "dropout": "dropout=0.1 doesn't go with tensor-parallel stages",
            "mesh": "this mesh has 2: ('a', 'b'); give the one that is to share the weights",
            "length": "the sequence's length=5 is not divisible by the tensor-parallel degree=2",
        }.items():
            assert message in refusals[name], name


def test_a_dtensor_does_not_pass_between_stages(ranks):
    for _, refusals in ranks:
        assert "stage 3 returned a DTensor" in refusals["boundary"]
        assert "output_layouts=Replicate() and use_local_output=True" in refusals["boundary"]
