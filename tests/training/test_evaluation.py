"""Held-out loss and metrics against one whole batch in plain torch: each target weighs the same."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from zbpp import Pipeline, plan
from zbpp.data import Data
from zbpp.data.chat import ChatBatches, Conversation
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.training.trainer import Trainer

VOCAB, TIME, ROWS, BATCHES = 11, 6, 4, 3


def gpt():
    return Gpt(vocab_size=VOCAB, hidden_size=8, num_layers=2, num_heads=2, sequence_length=TIME)


def llama():
    return Llama(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        sequence_length=TIME,
    )


class Labels:
    """Plain labels; the first row of all has none, and each row another number of them."""

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCAB, (ROWS, TIME), generator=generator)
        labels = torch.randint(VOCAB, (ROWS, TIME), generator=generator)
        for row in range(ROWS):
            labels[row, : TIME - row * (number + 1) % TIME] = -100
        return tokens, labels


def conversations():
    numbers = np.random.default_rng(0)
    rows = [
        Conversation(numbers.integers(0, VOCAB, TIME + 1), np.arange(TIME + 1) > number % TIME)
        for number in range(ROWS * BATCHES)
    ]
    return ChatBatches(rows, sequence_length=TIME, batch_size=ROWS, seed=None)


@pytest.mark.parametrize("model", [gpt, llama])
@pytest.mark.parametrize("source", [Labels, conversations])
def test_each_held_out_target_weighs_the_same(model, source):
    source, made, whole = source(), model(), model().build_stage(0, 1).double()
    batches = [source.batch(number) for number in range(BATCHES)]
    labels = torch.cat([labels_of(target) for _, target in batches])
    with torch.no_grad():
        logits = whole(torch.cat([tokens for tokens, _ in batches]))
    # Every other row gets what the model says: some predictions are right.
    labels[::2] = torch.where(labels[::2] == -100, -100, logits[::2].argmax(-1))
    for (_, target), own in zip(batches, labels.split(ROWS), strict=True):
        labels_of(target).copy_(own)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    accuracy = (logits.argmax(-1) == labels)[labels != -100].double().mean()

    timetable = plan("zb_v", 1, ROWS)  # a row is a microbatch
    stages = {index: made.build_stage(index, 2).double() for index in range(2)}
    pipeline = Pipeline(stages, timetable, made.loss)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1),
        data=Data(Given(batches), Given(batches), BATCHES, ROWS * TIME, None),
        learning_rate=lambda step: 1.0,
        metrics=made.metrics,
    )
    found = trainer.evaluate()
    assert all(p.grad is None for p in pipeline.parameters())
    assert 0.2 < accuracy < 0.9
    assert found == {
        "evaluation_loss": pytest.approx(float(expected), rel=1e-12),
        "evaluation_accuracy": pytest.approx(float(accuracy), rel=1e-12),
    }


def labels_of(target):
    return target if isinstance(target, torch.Tensor) else target[0]


class Given:
    def __init__(self, batches):
        self.batches = batches

    def batch(self, number):
        return self.batches[number]
