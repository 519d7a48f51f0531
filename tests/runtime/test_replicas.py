"""Replicas compared: planted faults are found and named, and nothing else is.

One launch of four processes for all cases.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import MasterWeights, Pipeline, check_replicas, make_mesh
from zbpp.models.llama import Llama
from zbpp.runtime import AgreementError
from zbpp.runtime.processes.dtensors import local_of

pytestmark = pytest.mark.slow
VOCAB, SIZE, M, ROWS, TIME = 11, 8, 4, 16, 4
# schedule, degrees of the mesh, model, options
CASES = {
    "replicas": ("zb_h1", {"replicate": 2}, "tied", {}),
    "replicas, V": ("zb_v", {"replicate": 2}, "norm", {}),
    "ties in a V": ("zb_v", {"replicate": 2}, "tied", {}),
    "mixed precision": ("interleaved_1f1b", {"replicate": 2}, "tied", {"is_mixed": True}),
    "shards": ("1f1b", {"shard": 2}, "tied", {}),
    "shards, gathered twice": ("zb_h1", {"shard": 2}, "dropout", {"reshard": "microbatch"}),
    "tensor parallel": ("zb_v", {"tensor": 2}, "llama", {}),
}


class Model:
    """An embedding, layers and a head; with dropout, BatchNorm or tied weights."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.kind = kind
        norm = nn.BatchNorm1d if kind == "norm" else nn.LayerNorm
        layers = [
            nn.Sequential(nn.Linear(SIZE, SIZE), norm(SIZE), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)
        ]
        self.parts = {"embedding": nn.Embedding(VOCAB, SIZE)}
        self.parts |= {f"layer_{number}": layer for number, layer in enumerate(layers)}
        self.parts["head"] = nn.Linear(SIZE, VOCAB, bias=False)

    def build_stage(self, index, num_stages):
        names = list(self.parts)
        stage = nn.Sequential()
        for name in names[len(names) * index // num_stages : len(names) * (index + 1) // num_stages]:
            stage.add_module(name, self.parts[name])
        return stage

    def loss(self, output, target):
        return F.cross_entropy(output.float(), target)

    def tied(self):
        return {"head.weight": "embedding.weight"} if self.kind == "tied" else {}


def model_of(kind):
    if kind != "llama":
        return Model(kind)
    return Llama(
        vocab_size=VOCAB, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24,
        sequence_length=TIME,
    )  # fmt: skip


def batch(step, place, kind):
    generator = torch.Generator().manual_seed(10 * step + place.data_part)
    shape = (ROWS, TIME + 1) if kind == "llama" else (ROWS, 2)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    return (tokens[:, :-1], tokens[:, 1:]) if kind == "llama" else (tokens[:, 0], tokens[:, 1])


def trained(case, *, is_checked):
    """Weights and buffers after two steps; both checked, or none."""
    schedule, degrees, kind, options = CASES[case]
    options = dict(options)
    is_mixed, mesh = options.pop("is_mixed", False), make_mesh(**degrees)
    options |= {"num_microbatches": M, "mesh": mesh}
    with Pipeline(model_of(kind), schedule, **options) as pipeline:
        masters = MasterWeights(pipeline.parameters(), torch.bfloat16) if is_mixed else None
        optimizer = torch.optim.AdamW((masters or pipeline).parameters(), lr=0.01)
        for step in range(2):
            (masters or optimizer).zero_grad()
            inputs, target = batch(step, pipeline.place, kind)
            pipeline.step(inputs, target=target)
            optimizer.step()
            if masters is not None:
                masters.update()
            if is_checked:
                # Shards hold different parts, so without ties nothing has a copy.
                has_copies = kind != "dropout"
                assert (check_replicas(pipeline, optimizer, masters=masters) > 0) == has_copies
        return [local_of(each).clone() for each in pipeline.state_dict().values()]


def one_ulp(tensor):
    local = local_of(tensor.detach())
    local.view(-1)[3] = torch.nextafter(local.view(-1)[3], torch.tensor(9.0))


def perturbed(rank, degrees, kind, plant, wrong_rank, schedule="zb_h1"):
    """What `check_replicas` says after `plant(pipeline, optimizer)` on one rank, behind a step."""
    with Pipeline(model_of(kind), schedule, num_microbatches=M, mesh=make_mesh(**degrees)) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        inputs, target = batch(0, pipeline.place, kind)
        pipeline.step(inputs, target=target)
        optimizer.step()
        check_replicas(pipeline, optimizer)
        if rank == wrong_rank:
            plant(pipeline, optimizer)
        return error_of(lambda: check_replicas(pipeline, optimizer))


def error_of(function):
    try:
        function()
    except AgreementError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def weight(name):
    return lambda pipeline, _: one_ulp(dict(pipeline.named_parameters())[name])


def state(name):
    def plant(pipeline, optimizer):
        one_ulp(optimizer.state[dict(pipeline.named_parameters())[name]]["exp_avg"])

    return plant


def everything(rank):
    found = {case: [trained(case, is_checked=on) for on in (False, True)] for case in CASES}
    two = {"replicate": 2}
    found["weight"] = perturbed(rank, two, "norm", weight("layer_2.0.weight"), 3)
    found["state"] = perturbed(rank, two, "norm", state("embedding.weight"), 1)
    found["tied"] = perturbed(rank, two, "tied", weight("head.weight"), 2)
    found["tensor"] = perturbed(rank, {"tensor": 2}, "llama", weight("layer_2.mlp_norm.weight"), 3)
    found["majority"] = perturbed(rank, {"replicate": 4}, "norm", weight("head.weight"), 2)
    return found


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(everything, 4, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_checks_change_nothing_and_find_nothing_where_nothing_is_wrong(everyone, case):
    for found in everyone:
        plain, checked = found[case]
        assert len(plain) == len(checked) > 0
        assert all(map(torch.equal, plain, checked))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("weight", "layer_2.0.weight: different on rank 2 and on rank 3"),
        ("state", "exp_avg of embedding.weight: different on rank 0 and on rank 1"),
        ("tied", "embedding.weight: different on rank 0, 1, 3 and on rank 2"),
        ("tensor", "layer_2.mlp_norm.weight: different on rank 2 and on rank 3"),
        ("majority", "head.weight: different on rank 0, 1, 3 and on rank 2"),
    ],
)
def test_one_ulp_on_one_rank_is_named_on_all(everyone, case, text):
    for found in everyone:
        assert found[case].startswith("AgreementError: copies of one tensor differ after step 1:")
        assert text in found[case]
        assert len(found[case].splitlines()) == 3
