"""Weights updated inside the step: losses and weights of the ordinary loop, to the last bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh

VOCAB, HIDDEN, M, ROWS, STEPS = 11, 8, 4, 8, 5
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


class Model:
    """Embedding, layers and a head; is_tied: the head has the embedding's weight, as one object or a copy."""

    def __init__(self, is_tied=False, dtype=torch.float64):
        torch.manual_seed(0)
        self.is_tied = is_tied
        layers = [nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(6)]
        self.parts = {"embedding": nn.Embedding(VOCAB, HIDDEN)}
        self.parts |= {f"layer_{i}": layer for i, layer in enumerate(layers)}
        self.parts["head"] = nn.Linear(HIDDEN, VOCAB, bias=False)
        for part in self.parts.values():
            part.to(dtype)

    def build_stage(self, index, num_stages):
        names = list(self.parts)
        stage = nn.Sequential()
        for name in names[len(names) * index // num_stages : len(names) * (index + 1) // num_stages]:
            stage.add_module(name, self.parts[name])
        return stage

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1).double(), target.flatten())

    def tied(self):
        return {"head.weight": "embedding.weight"} if self.is_tied else {}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained(pipeline, optimizer, *, released, steps=range(STEPS), scheduler=None):
    """Losses and, at the end, weights; the ordinary loop steps the optimizer itself."""
    losses = []
    for step in steps:
        inputs, target = batch(step)
        rows = ROWS // pipeline.place.num_data_parts
        part = slice(pipeline.place.data_part * rows, (pipeline.place.data_part + 1) * rows)
        losses += map(float, pipeline.step(inputs[part], target=target[part]))
        if released:
            assert all(each.grad is None for each in pipeline.parameters())
        else:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    weights = {name: each.detach() for name, each in pipeline.named_parameters()}
    return losses, {name: getattr(each, "_local_tensor", each).clone() for name, each in weights.items()}


def run(make_optimizer, schedule, *, released, is_tied=False, **options):
    with Pipeline(Model(is_tied), schedule, num_microbatches=M, **options) as pipeline:
        optimizer = make_optimizer(pipeline.parameters())
        scheduler = StepLR(optimizer, 2, 0.5)
        if released:
            pipeline.release_gradients(optimizer)
        return trained(pipeline, optimizer, released=released, scheduler=scheduler)


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_weights_are_those_of_the_ordinary_step(name):
    """Two stages in one process, which share the embedding's weight; the learning rate falls."""
    losses, weights = run(OPTIMIZERS[name], "zb_v", released=True, is_tied=True)
    same((losses, weights), run(OPTIMIZERS[name], "zb_v", released=False, is_tied=True))
    assert len(set(losses)) == len(losses) == M * STEPS


MESHES = [
    ("two ranks", {}, "zb_h1", False),
    ("four stages", {}, "zb_v", True),
    ("replicas", {"replicate": 2}, "zb_v", True),
    ("shards", {"shard": 2}, "zb_v", True),
]


def in_meshes(rank):
    found = {}
    for name, degrees, schedule, is_tied in MESHES:
        for released in (True, False):
            mesh = make_mesh(**degrees) if degrees else None
            options = {"mesh": mesh, "is_tied": is_tied}
            found[name, released] = run(OPTIMIZERS["adamw"], schedule, released=released, **options)
    return found


def test_two_processes_train_as_with_the_ordinary_step():
    """Ranks, replicas, shards, tied copies; replicas and copies of a parameter stay equal."""
    everyone = run_ranks(in_meshes, 2)
    for found in everyone:
        for name, *_ in MESHES:
            same(found[name, True], found[name, False])
    first, second = (found["replicas", True][1] for found in everyone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    first, second = (found["four stages", True][1] for found in everyone)
    assert any(found["two ranks", True][0] for found in everyone)
