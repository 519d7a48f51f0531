"""evaluate's outputs and metrics, against the whole model on the whole batch."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, per_microbatch, plan

M, ROWS, SIZE, NUM_CLASSES = 4, 8, 5, 3


class Both(NamedTuple):
    logits: torch.Tensor
    rest: dict


class Classifier(nn.Module):
    """Returns a structure: logits, a number per microbatch, nothing, and a word."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(SIZE, NUM_CLASSES).double()

    def forward(self, x):
        logits = self.linear(x)
        return Both(logits, {"largest": logits.max(), "none": None, "word": "a"})


def first():
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE).double()


def loss_fn(output, target):
    return F.cross_entropy(output.logits, target)


def accuracy(output, target):
    correct = output.logits.argmax(-1) == target
    return {"accuracy": correct.double().mean(), "rows": len(target)}


def batch():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.randint(NUM_CLASSES, (ROWS,), generator=generator)


def evaluated(rank):
    pipeline = Pipeline({rank: [first, Classifier][rank]()}, plan("1f1b", 2, M), loss_fn)
    x, target = batch()
    losses, outputs, metrics = pipeline.evaluate(x, target=target, return_outputs=True, metrics=accuracy)
    only_losses, only_metrics = pipeline.evaluate(x, target=target, metrics=accuracy)
    no_losses, only_outputs = pipeline.evaluate(x, return_outputs=True)
    assert (only_metrics, no_losses) == (metrics, [])
    assert [*map(float, only_losses)] == [*map(float, losses)]
    assert (only_outputs is None) == (outputs is None) == (rank == 0)
    if outputs is not None:
        assert torch.equal(only_outputs.logits, outputs.logits)
    return [*map(float, losses)], outputs and (outputs.logits, outputs.rest), metrics


def test_the_last_stages_owner_gets_outputs_and_metrics_of_the_whole_batch():
    (losses, outputs, metrics), (of_last, (logits, rest), accuracies) = run_ranks(evaluated, 2)
    assert (losses, outputs, metrics) == ([], None, {})
    x, target = batch()
    with torch.no_grad():
        expected = Classifier()(first()(x))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-13, atol=1e-14)
    assert sum(of_last) / M == pytest.approx(float(loss_fn(expected, target)), rel=1e-13)
    largest = torch.stack([each.max() for each in logits.chunk(M)])
    assert torch.equal(rest["largest"], largest)
    assert (rest["none"], rest["word"]) == (None, ["a"] * M)
    assert accuracies == {"accuracy": float(accuracy(expected, target)["accuracy"]), "rows": ROWS / M}


class Reused(nn.Module):
    """Writes each output into the same memory."""

    def __init__(self):
        super().__init__()
        self.out = torch.zeros(2, SIZE)

    def forward(self, x):
        return self.out.copy_(x)


def test_outputs_in_one_memory_are_those_of_their_microbatches():
    x = torch.arange(2.0 * M * SIZE).reshape(2 * M, SIZE)
    losses, outputs = Pipeline({0: Reused()}, plan("1f1b", 1, M)).evaluate(x, return_outputs=True)
    assert losses == []
    assert torch.equal(outputs, x)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"hits": torch.ones(3)}, r"the metric 'hits' is a tensor of shape \(3,\): return one number"),
        ({"name": "good"}, "the metric 'name' is 'good': return one number"),
        (None, "metrics returned a NoneType: return a dict"),
    ],
)
def test_a_metric_that_is_no_number_is_named(returned, message):
    pipeline = Pipeline({0: nn.Linear(2, 2)}, plan("zb_h1", 1, 2), nn.functional.mse_loss)
    with pytest.raises(ValueError, match=message):
        pipeline.evaluate(torch.ones(4, 2), metrics=lambda output, target: returned)


def test_outputs_of_other_lengths_are_a_list_with_one_for_each_microbatch():
    """torch.cat raised an error behind an evaluation that had ended."""
    inputs = [torch.arange(6.0).view(2, 3), torch.arange(10.0).view(2, 5)]
    pipeline = Pipeline({0: nn.Tanh()}, plan("gpipe", 1, 2), lambda y, t: y.sum(), dynamic_shapes=True)
    _, outputs = pipeline.evaluate(per_microbatch(inputs), return_outputs=True)
    assert [each.tolist() for each in outputs] == [torch.tanh(each).tolist() for each in inputs]
