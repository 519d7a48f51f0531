"""find_non_finite in a mesh: with shards, tensor parallelism or replicas the place is the same.

One launch of two processes for all cases.
"""

import math

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Pipeline, find_non_finite, make_mesh
from zbpp.models.llama import Llama
from zbpp.runtime.processes.dtensors import local_of

pytestmark = pytest.mark.slow
VOCAB, TIME, ROWS, M = 11, 4, 6, 3
BAD = 2  # the microbatch
FAULTS = ("output", "backward", "parameter", "")
MESHES = {
    "pipeline": {},
    "shards": {"shard": 2},
    "shards, gathered twice": {"shard": 2, "reshard": "microbatch"},
    "tensor parallel": {"tensor": 2},
    "replicas": {"replicate": 2},
}


class Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def planted(module, what):
    """Let the module's output, or its gradient, be bad in microbatch BAD of each pass."""
    calls = [0]

    def spoil(module, args, output):
        calls[0] += 1
        if not torch.is_grad_enabled() or (calls[0] - 1) % M != BAD:
            return output
        return output * math.inf if what == "output" else Spoiled.apply(output)

    module.register_forward_hook(spoil)


def found(mesh, what):
    """What is found, as text, after a step with a planted fault."""
    options = dict(MESHES[mesh])
    reshard = options.pop("reshard", "step")
    model = Llama(
        vocab_size=VOCAB, num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24,
        sequence_length=TIME,
    )  # fmt: skip
    with Pipeline(model, "1f1b", num_microbatches=M, mesh=make_mesh(**options), reshard=reshard) as pipeline:
        modules = {name: each for stage in pipeline.stages.values() for name, each in stage.named_modules()}
        if what in ("output", "backward") and "layer_1.mlp" in modules:
            planted(modules["layer_1.mlp"], what)
        tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(3))
        pipeline.step(tokens[:, :-1], target=tokens[:, 1:])
        names = dict(pipeline.named_parameters())
        if what == "parameter" and "layer_1.mlp.gate.weight" in names:
            with torch.no_grad():
                local_of(names["layer_1.mlp.gate.weight"])[0, 0] = math.nan
        return str(find_non_finite(pipeline, tokens[:, :-1], target=tokens[:, 1:]))


def everything(rank):
    return {(mesh, what): found(mesh, what) for mesh in MESHES for what in FAULTS}


@pytest.fixture(scope="module")
def both():
    return run_ranks(everything, 2)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_place_is_that_of_a_pipeline_without_a_mesh_on_all_processes(both, mesh):
    part = ", data part 0" if {"shard", "replicate"} & MESHES[mesh].keys() else ""
    texts = {
        "output": f"Infinity first appeared in the output of layer_1.mlp, stage 0, microbatch 2{part} "
        "(its input is finite)",
        "backward": "NaN first appeared in the gradient at the output of layer_1.mlp.down, stage 0, "
        f"microbatch 2{part}",
        "parameter": "NaN first appeared in the output of layer_1.mlp.gate, stage 0, microbatch 0"
        f"{part} (NaN in its parameters)",
        "": "None",
    }
    for found in both:
        assert {what: found[mesh, what] for what in texts} == texts
