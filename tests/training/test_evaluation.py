"""Held-out loss and metrics against one whole batch in plain torch: each target weighs the same."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zbpp
from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.data import Data, loaded_data
from zbpp.data.chat import ChatBatches
from zbpp.data.chat_template import Conversation
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.run.data import limit_evaluation
from zbpp.runtime.processes.mesh import make_mesh
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


# ---------------------------------------------------------------- rows behind the last whole batch

NUMBERED = [(torch.randn(WIDTH := 5, generator=torch.Generator().manual_seed(row)),) for row in range(40)]


def dataset(num_rows):
    inputs = torch.stack([row for (row,) in NUMBERED[:num_rows]]).double()
    return TensorDataset(inputs, inputs.sin())


class Rows:
    """Two layers, and a loss over rows."""

    def build_stage(self, index, num_stages):
        torch.manual_seed(0)
        whole = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).double()
        return zbpp.split_sequential(whole, num_stages)[index]

    def loss(self, output, target):
        return F.mse_loss(output, target)


def expected_of(rows):
    with torch.no_grad():
        return float(F.mse_loss(Rows().build_stage(0, 1)(rows.tensors[0]), rows.tensors[1]))


def evaluated(rank, given, schedule, num_ranks, replicate, most):
    """`evaluation_loss` of a trainer whose batches have eight rows."""
    mesh = None if num_ranks * replicate == 1 else make_mesh(replicate=replicate, device_type="cpu")
    timetable = plan(schedule, num_ranks, 4)
    own = timetable.stages_of(rank if mesh is None else mesh.get_local_rank("pipeline"))
    stages = {each: Rows().build_stage(each, timetable.num_stages) for each in own}
    pipeline = Pipeline(stages, timetable, Rows().loss, mesh=mesh)
    data = limit_evaluation(loaded_data(given(), batch_size=8, seed=0), 1, most, replicate, 8)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1),
        data=data,
        learning_rate=lambda step: 1.0,
    )
    found = trainer.evaluate()
    pipeline.close()
    return found["evaluation_loss"]


HELD_OUT = [  # rows that are held out, and of how many batches of eight rows a loader makes one
    (26, lambda: (dataset(8), dataset(26))),
    (3, lambda: (dataset(8), dataset(3))),
    (26, lambda: (dataset(8), DataLoader(dataset(26), 8))),
    (24, lambda: (dataset(8), DataLoader(dataset(26), 8, drop_last=True))),
]


@pytest.mark.parametrize(("num_rows", "given"), HELD_OUT)
def test_rows_behind_the_last_whole_batch_are_evaluated(num_rows, given):
    """Of 26 rows, 24 or 16 counted, and nobody said so."""
    found = evaluated(0, given, "zb_v", 1, 1, 9)
    assert found == pytest.approx(expected_of(dataset(num_rows)), rel=1e-12)
    assert evaluated(0, given, "zb_v", 1, 1, 1) == pytest.approx(
        expected_of(dataset(min(num_rows, 8))), rel=1e-12
    )


def of_datasets(rank, sizes):
    given = [lambda size=size: (dataset(8), dataset(size)) for size in sizes]
    return [evaluated(rank, each, "zb_h1", 2, 2, 9) for each in given]


def test_replicas_share_the_rest_and_the_last_ones_may_have_none_of_it():
    sizes = (17, 29, 3)
    expected = [expected_of(dataset(size)) for size in sizes]
    for found in run_ranks(of_datasets, 4, sizes):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_rows", [3, 10])
def test_conversations_behind_the_last_whole_batch_weigh_by_their_targets(num_rows):
    made, whole = gpt(), gpt().build_stage(0, 1).double()
    numbers = np.random.default_rng(1)
    rows = [
        Conversation(numbers.integers(0, VOCAB, TIME + 1), np.arange(TIME + 1) > number % TIME)
        for number in range(num_rows)
    ]
    options = {"sequence_length": TIME, "seed": None}
    tokens, labels = ChatBatches(rows, **options, batch_size=num_rows).batch(0)
    with torch.no_grad():
        expected = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten())
    held_out = ChatBatches(rows, **options, batch_size=ROWS)
    timetable = plan("zb_v", 1, 2)
    pipeline = Pipeline(
        {index: made.build_stage(index, 2).double() for index in range(2)}, timetable, made.loss
    )
    data = Data(held_out, held_out, num_rows // ROWS, ROWS * TIME, None, num_evaluation_rest=num_rows % ROWS)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1),
        data=limit_evaluation(data, 1, 9, 1, ROWS),
        learning_rate=lambda step: 1.0,
    )
    assert trainer.evaluate() == {"evaluation_loss": pytest.approx(float(expected), rel=1e-12)}
