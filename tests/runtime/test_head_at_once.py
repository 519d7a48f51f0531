"""The head's W at the end of its B: gradients to the last bit, and no gradient of logits that waits."""

import pytest
import torch
from optimi import AdamW

from helpers.graph_maker import EmulatedGraphs
from zbpp import CudaGraphs, GradientRelease, HeadAtOnce, Pipeline, plan
from zbpp.features.head_at_once.head_w import HeadW
from zbpp.models.llama import Llama
from zbpp.runtime import StageWorker
from zbpp.runtime.call.feed import Feed, LossGradients

WORDS, M, STEPS = 500, 4, 3


def llama(is_tied=False):
    sizes = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
    return Llama(vocab_size=WORDS, tie_embeddings=is_tied, **sizes)


def tokens():
    return torch.randint(WORDS, (2 * M, 9), generator=torch.Generator().manual_seed(0))


def gradients(schedule, *extras, is_tied=False):
    pipeline = Pipeline(llama(is_tied), plan(schedule, 1, M), extras=extras)
    losses = pipeline.step(tokens()[:, :-1], target=tokens()[:, 1:])
    return losses, {name: each.grad for name, each in pipeline.named_parameters()}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_losses_and_gradients_stay_to_the_last_bit(schedule, is_tied):
    losses, expected = gradients("zb_h1", is_tied=is_tied)
    mine, found = gradients(schedule, HeadAtOnce(), is_tied=is_tied)
    assert torch.equal(torch.stack(mine), torch.stack(losses))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def updated(*extras):
    """The weights after some steps whose updates are made inside the step."""
    pipeline = Pipeline(llama(), plan("zb_v", 1, M), extras=extras)
    pipeline.use(GradientRelease(AdamW(pipeline.parameters(), lr=1e-2, gradient_release=True)))
    for _ in range(STEPS):
        pipeline.step(tokens()[:, :-1], target=tokens()[:, 1:])
    return {name: each.detach() for name, each in pipeline.named_parameters()}


def test_it_goes_with_updates_inside_the_step():
    expected, found = updated(), updated(HeadAtOnce())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_gradient_of_the_logits_waits_for_w_or_does_not(at_once):
    model, inputs = llama(), torch.randn(2, 8, 16)
    worker = StageWorker(1, model.build_stage(1, 2), is_last=True, loss_fn=model.loss)
    worker.begin(Feed((), [{}], [tokens()[:2, 1:]], [0], LossGradients()))
    worker.backward_input(0, worker.forward(0, (inputs.requires_grad_(),)))
    if at_once:
        weight_grads = worker.deferred(0)
        worker.accumulate(0, weight_grads.take(weight_grads.is_large))
    assert (worker.module.head.weight.grad is not None) == at_once
    assert (worker.deferred(0).held_bytes < 4 * 16 * WORDS) == at_once
    worker.backward_weight(0)
    assert all(each.grad is not None for each in worker.module.parameters())


def test_it_is_over_when_the_extra_leaves():
    pipeline = Pipeline(llama(), plan("zb_h1", 1, M))
    executor = pipeline._rank.executors["step"]
    with pipeline.using(HeadAtOnce()):
        assert HeadW(0, 0) in executor.program.instructions
    assert HeadW(0, 0) not in executor.program.instructions


def test_graphs_capture_it_at_its_place():
    """Replayed steps equal eager ones; each HeadW is a graph of its own, so dz does not wait for W."""
    found = {}
    for maker in (None, EmulatedGraphs()):
        graphs = [] if maker is None else [CudaGraphs(maker)]
        pipeline = Pipeline(llama(), plan("zb_h1", 1, M), extras=[HeadAtOnce(), *graphs])
        losses = [loss for _ in range(4) for loss in pipeline.step(tokens()[:, :-1], target=tokens()[:, 1:])]
        found[bool(graphs)] = losses, [each.grad for each in pipeline.parameters()]
        if graphs:
            num_actions = len(pipeline.timetable.rows[0])
            assert graphs[0].num_replays == 2
            assert maker.num_captures == num_actions + M
    assert torch.equal(torch.stack(found[True][0]), torch.stack(found[False][0]))
    assert all(map(torch.equal, found[True][1], found[False][1]))
