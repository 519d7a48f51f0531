"""Documents in one row: each is computed as if it stood alone, under every cut, schedule and switch."""

import pytest
import torch

from zbpp import Pipeline, plan
from zbpp.models.gpt import Gpt
from zbpp.models.layers import document_mask
from zbpp.models.llama import Llama
from zbpp.run.stages import recompute_stages

SIZES = {"vocab_size": 11, "num_layers": 4, "hidden_size": 16, "num_heads": 2, "sequence_length": 12}
MODELS = {
    "gpt": lambda: Gpt(**SIZES),
    "gpt tied": lambda: Gpt(**SIZES, tie_embeddings=True),
    "llama": lambda: Llama(**SIZES, num_kv_heads=1),
}
LENGTHS = [[5, 7], [12], [1, 1, 10], [3, 8, 1]]  # of the documents in each row


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 11, (4, 12), generator=generator) for _ in range(2))
    positions = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in LENGTHS])
    return tokens, positions, targets


def alone(stage, tokens):
    """The logits where each document is a row of its own."""
    rows = [
        torch.cat([stage(document[None]) for document in row.split(lengths)], dim=1)
        for row, lengths in zip(tokens, LENGTHS, strict=True)
    ]
    return torch.cat(rows)


def plain(make):
    """(loss, gradients) of the whole model on documents in rows of their own."""
    model = make()
    stage = model.build_stage(0, 1).double()
    tokens, _, targets = batch()
    loss = model.loss(alone(stage, tokens), targets)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in stage.named_parameters()}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_documents_alone(make):
    stage = make().build_stage(0, 1).double()
    tokens, positions, _ = batch()
    torch.testing.assert_close(stage(tokens, positions), alone(stage, tokens), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(stage(tokens), alone(stage, tokens), atol=1e-3)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(("schedule", "make"), [("zb_v", "gpt"), ("looped_bfs", "llama")])
def test_a_pipeline_has_the_gradients_of_the_documents_alone(schedule, make, recompute):
    """Positions pass from stage to stage beside the hidden states."""
    loss, expected = plain(MODELS[make])
    model, timetable = MODELS[make](), plan(schedule, 1, 2)
    stages = {index: model.build_stage(index, 2).double() for index in (0, 1)}
    recompute_stages(stages, recompute)
    tokens, positions, targets = batch()
    with Pipeline(stages, timetable, model.loss) as pipeline:
        losses = pipeline.step(tokens, positions, target=targets)
        found = {name: each.grad for name, each in pipeline.named_parameters()}
    assert sum(map(float, losses)) / 2 == pytest.approx(loss, rel=1e-12)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)


def test_a_mask_shows_each_query_its_own_document_up_to_itself():
    mask = document_mask(torch.tensor([[0, 1, 0, 1]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
