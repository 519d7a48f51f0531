"""Stages of Llama and Gpt, parallelized over the ranks of the default process group, and whole on one."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.split import deferred_and_computed, double
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
    found = {name: refusal(model, mesh) for name, model in odd.items()}
    found["mesh"] = refusal(MODELS["gpt"], init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")))
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


def refusal(model, mesh):
    stage = model.build_stage(0, 1)
    try:
        model.parallelize(stage, mesh)
    except ValueError as error:
        assert not any(isinstance(parameter, DTensor) for parameter in stage.parameters())
        return str(error)
    return "accepted"
