"""A user's Dataset, DataLoader or list of batches feeds the trainer, the same on every rank."""

import random
import sys
from collections import UserDict
from copy import deepcopy
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from zbpp import Pipeline, plan
from zbpp.config import ConfigError
from zbpp.data.loader import loaded_data
from zbpp.data.source import parts_of
from zbpp.run.data import build_data
from zbpp.run.model import check_data_fit
from zbpp.training.batches import batch_for
from zbpp.training.trainer import Trainer

ROWS, BATCH = 20, 4


class Squares(Dataset):
    """Rows (x, x squared), as many as asked for; names no batch size and no seed."""

    def __init__(self, num_rows: int = ROWS, named: bool = False):
        self.num_rows, self.named = num_rows, named

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        x = torch.full((3,), float(row))
        return {"x": x, "y": -x, "target": x**2} if self.named else (x, x**2)


def rows_of(data, steps):
    return [int(data.train.batch(step)[0][row, 0]) for step in steps for row in range(BATCH)]


def test_a_dataset_is_shuffled_alike_whatever_a_rank_drew_before_and_anew_each_epoch():
    seen = []
    for drawn in (0, 5):  # two ranks whose stages took different numbers of random numbers
        torch.manual_seed(drawn)
        random.seed(drawn)
        np.random.seed(drawn)
        before = torch.get_rng_state()
        data = loaded_data(Squares(), batch_size=BATCH, seed=7)
        seen.append(rows_of(data, range(10)))
        assert torch.equal(torch.get_rng_state(), before)
        assert random.random() == random.Random(drawn).random()
        assert np.random.rand() == np.random.RandomState(drawn).rand()
    first, second = seen[0][:ROWS], seen[0][ROWS:]
    assert seen[0] == seen[1]
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


class Two(nn.Module):
    """A first stage that takes one of its inputs by name only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, y, *, x=None):
        return self.layer(y)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, y, x, mask=None):
        return self.layer(x) * y


@pytest.mark.parametrize("named", [False, True])
def test_a_run_on_a_loaders_tuples_or_dicts_is_a_plain_loop_over_them(named):
    """Four microbatches, SGD; the entries of a dict reach stage 0 by their names, in whatever order."""
    torch.manual_seed(0)
    first = Named() if named else nn.Linear(3, 3, dtype=torch.float64)
    loader = DataLoader(Squares(8, named), batch_size=BATCH, drop_last=True)
    plain, expected = deepcopy(first), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    for batch in [*loader, *loader]:
        inputs, target = parts_of(batch)
        given = [inputs[name] for name in ("y", "x")] if named else inputs
        loss = F.mse_loss(plain(*(each.double() for each in given)), target.double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    trainer = Trainer(
        pipeline=Pipeline({0: first}, plan("zb_h1", 1, 4), F.mse_loss),
        optimizer=torch.optim.SGD(first.parameters(), lr=1e-4),
        data=loaded_data(loader, batch_size=BATCH, seed=0),
        learning_rate=lambda step: 1.0,
    )
    history = list(trainer.run(4))
    assert [each["loss"] for each in history] == pytest.approx(expected, rel=1e-12)
    assert all(each["rows_per_second"] > 0 for each in history)
    assert not any("tokens_per_second" in each for each in history)


@pytest.mark.parametrize(
    ("batch", "stage", "message"),
    [
        ({"x": torch.ones(4)}, nn.Identity(), "the entries x: call one of them target, labels or"),
        (torch.ones(4), nn.Identity(), r"a batch is a Tensor: give \(inputs, target\)"),
        ([torch.ones(4)], nn.Identity(), "a batch is a list of 1: give"),
        (
            {"z": 0, "y": 0, "target": 0},
            Two(),
            "the inputs z, y, but stage 0: .*unexpected .* 'z'",
        ),
        ({"x": 0, "y": 0, "target": 0}, Two(), "stage 0 takes x by name only"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch, stage, message):
    class Source:
        def batch(self, step):
            return batch

    with pytest.raises(ValueError, match=message):
        batch_for({0: stage}, 1, Source(), 0, torch.device("cpu"))


class Counting(nn.Linear):
    """Counts its forwards: in place, and in a new tensor."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.num_calls += 1
        self.mean = 0.9 * self.mean + x.mean(0)
        return super().forward(x)


def test_the_trial_of_the_data_leaves_the_stage_as_it_was():
    stage = Counting()
    before = {name: each.clone() for name, each in stage.state_dict().items()}
    check_data_fit({0: stage}, [torch.ones(2, 3)])
    for name, value in stage.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert stage.training


class Endless(IterableDataset):
    def __iter__(self):
        return map(Squares().__getitem__, count())


@pytest.mark.parametrize("kind", ["DistributedSampler", "BatchSamplerShard", "IterableDatasetShard"])
def test_a_loader_that_gives_each_process_other_rows_is_refused_by_name(kind):
    rows = Squares(8, named=False)
    sampler = DistributedSampler(rows, 2, 0) if kind == "DistributedSampler" else None
    loader = DataLoader(Endless() if kind.startswith("Iter") else rows, 2, sampler=sampler, drop_last=True)
    if sampler is None:
        accelerate = pytest.importorskip("accelerate.data_loader")
        loader = accelerate.prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
    with pytest.raises(ValueError, match=f"training data come through a {kind}, which gives each process"):
        loaded_data(loader, batch_size=2, seed=0)


def iterator(batch_size):
    return iter([(torch.ones(batch_size), torch.ones(batch_size))])


def ragged():
    return DataLoader(Squares(), batch_size=16)


def ragged_by_a_sampler():
    return DataLoader(Squares(20), batch_sampler=BatchSampler(SequentialSampler(Squares(18)), 16, False))


def short():
    return [(torch.ones(3), torch.ones(3))]


def few():
    return Squares(3)


def numbers():
    return [(1, 2)]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("iterator", "a list_iterator does not yield batches again and again"),
        ("ragged", "the training DataLoader ends with 4 rows: give it drop_last=True"),
        ("ragged_by_a_sampler", "the training DataLoader ends with 2 rows: give it drop_last=True"),
        ("short", "training batch 0 has 3 rows, but num_microbatches . microbatch_size is 16: "),
        ("numbers", "training batch 0 has no rows"),
        ("few", "the training Dataset has 3 rows, fewer than a batch .* = 16"),
        ("BATCH", "a int does not yield batches .*: give a torch Dataset, a DataLoader"),
    ],
)
def test_data_that_cannot_feed_a_run_is_refused_when_it_is_built(monkeypatch, target, message):
    monkeypatch.setitem(sys.modules, "my_data", sys.modules[__name__])
    if target == "BATCH":
        monkeypatch.setattr(sys.modules[__name__], "BATCH", lambda: 4)
    with pytest.raises(ConfigError, match=rf"data \(my_data.{target}\): {message}"):
        build_data({"_target_": f"my_data.{target}"}, 16, 0)


class Seeded(Squares):
    def __init__(self, seed: int):
        super().__init__(100 + seed)


@pytest.mark.parametrize(("node", "expected"), [({}, 107), ({"seed": 3}, 103)])
def test_a_dataset_gets_the_runs_seed_unless_it_names_one(monkeypatch, node, expected):
    monkeypatch.setitem(sys.modules, "my_data", sys.modules[__name__])
    data = build_data({"_target_": "my_data.Seeded", **node}, 1, 7)
    assert (data.train.num_batches, data.unit, data.num_evaluation_batches) == (expected, "rows", 0)


def test_a_pair_is_what_to_train_on_and_what_is_held_out_in_its_order():
    data = loaded_data((Squares(), Squares(8)), batch_size=BATCH, seed=0)
    assert data.num_evaluation_batches == 2
    assert [data.evaluation.batch(i)[0][:, 0].tolist() for i in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Stream:
    """Batches that can only be iterated over."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for first in range(0, ROWS, BATCH):
            self.read += 1
            yield torch.arange(first, first + BATCH)[:, None], torch.zeros(BATCH)


class StatefulStream(Stream):
    """One that can go on in the middle of an epoch."""

    def __init__(self):
        super().__init__()
        self.first = self.next = 0

    def __iter__(self):
        for first in range(self.first, ROWS, BATCH):
            self.read, self.next = self.read + 1, first + BATCH
            yield torch.arange(first, first + BATCH)[:, None], torch.zeros(BATCH)
        self.first = 0

    def state_dict(self):
        return {"first": self.next}

    def load_state_dict(self, state):
        self.first = state["first"]


class Noisy(Squares):
    """Rows with numbers that torch, Python and numpy draw."""

    def __getitem__(self, row):
        return torch.tensor([row, torch.rand(()), random.random(), np.random.rand()]), torch.zeros(())


def shuffled_noise(batch_size=BATCH):
    return DataLoader(Noisy(), batch_size=batch_size, shuffle=True, drop_last=True)


def loader_with_a_generator():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Squares(), batch_size=BATCH, shuffle=True, drop_last=True, generator=generator)


MAKERS = [Noisy, shuffled_noise, Stream, lambda: [*Stream()], loader_with_a_generator]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("step", [1, 3, 5, 12])
def test_a_run_that_goes_on_sees_the_batches_that_it_would_have_seen(make, step):
    running, later = (loaded_data(make(), batch_size=BATCH, seed=7) for _ in range(2))
    expected = [running.train.batch(number)[0] for number in range(step + 7)]
    later.load_state_dict({})  # as a checkpoint has it
    for number in range(step, step + 7):
        assert torch.equal(later.train.batch(number)[0], expected[number])


@pytest.mark.parametrize("make", [Noisy, shuffled_noise])
def test_replicas_that_read_smaller_batches_read_the_rows_of_one_large_batch(make):
    """In every epoch. Rows of a Dataset draw the same numbers, too."""
    large, small = (
        loaded_data(make() if make is Noisy else make(size), batch_size=size, seed=7) for size in (4, 2)
    )
    columns = 4 if make is Noisy else 1
    for step in range(10):
        halves = torch.cat([small.train.batch(2 * step)[0], small.train.batch(2 * step + 1)[0]])
        assert torch.equal(large.train.batch(step)[0][:, :columns], halves[:, :columns])


@pytest.mark.parametrize("changed", [(0,), (99,), range(50, 75)])
def test_the_fingerprint_of_a_dataset_tells_changed_rows(changed):
    """The last one, and a quarter of the rows, none of which is in the first batch."""
    rows = [torch.full((2,), float(row)) for row in range(100)]
    prints = [loaded_data(_Rows(rows), batch_size=BATCH, seed=7).fingerprint for _ in range(2)]
    larger = loaded_data(_Rows(rows), batch_size=2 * BATCH, seed=7).fingerprint
    others = [torch.zeros(2) - 1 if row in changed else each for row, each in enumerate(rows)]
    state = torch.get_rng_state()
    assert (
        prints[0] == prints[1] == larger != loaded_data(_Rows(others), batch_size=BATCH, seed=7).fingerprint
    )
    assert torch.equal(torch.get_rng_state(), state)


class _Rows(Dataset):
    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, row):
        return self._rows[row], torch.rand(1)


@pytest.mark.parametrize("number", [0, 2, 4, 5, 11])
def test_a_loader_with_a_state_goes_on_from_it(number):
    """Replica 1 of 2 asks for a batch further on than the state of replica 0 says."""
    running = loaded_data(StatefulStream(), batch_size=BATCH, seed=0)
    expected = rows_of(running, range(number + 3))[-2 * BATCH :]
    running.train.batch(0)
    for step in range(number + 1):
        running.train.batch(step)
    stream = StatefulStream()
    later = loaded_data(stream, batch_size=BATCH, seed=0)
    later.load_state_dict(deepcopy(running.state_dict()))
    stream.read = 0
    assert rows_of(later, [number + 1, number + 2]) == expected
    assert stream.read == 2


# ---------------------------------------------------------------- as other libraries ask


def of_torch():
    sampler = DistributedSampler(Squares(), num_replicas=1, rank=0, seed=3)
    return DataLoader(Squares(), BATCH, sampler=sampler, drop_last=True), sampler


def of_accelerate():
    data_loader = pytest.importorskip("accelerate").data_loader
    loader = DataLoader(Squares(), BATCH, shuffle=True, drop_last=True)
    made = data_loader.prepare_data_loader(loader, use_seedable_sampler=True, data_seed=3)
    return made, made


READ = []


def counted(row):
    READ.append(row)
    return row


def of_datasets():
    rows = {"x": [[float(row)] for row in range(ROWS)], "target": [0.0] * ROWS}
    found = pytest.importorskip("datasets").Dataset.from_dict(rows).to_iterable_dataset(num_shards=5)
    found = found.shuffle(seed=3, buffer_size=1).map(counted).with_format("torch")
    return found, found


def first_entries(batch):
    return [int(each) for each in (batch["x"] if isinstance(batch, dict) else batch[0])[:, 0]]


@pytest.mark.parametrize("make", [of_torch, of_accelerate, of_datasets])
def test_whatever_has_an_epoch_is_told_it_as_in_a_loop_of_its_own_library(make):
    """Each epoch had the order of the first one."""
    source, told = make()
    loader = source if isinstance(source, DataLoader) else DataLoader(source, BATCH, drop_last=True)
    expected = []
    for epoch in range(3):
        told.set_epoch(epoch)
        expected += map(first_entries, loader)
    data = loaded_data(make()[0], batch_size=BATCH, seed=0)
    assert [first_entries(data.train.batch(step)) for step in range(15)] == expected
    assert expected[:5] != expected[5:10]


def test_a_dataset_of_rows_is_told_the_epoch_of_each_row():
    class Told(Squares):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, row):
            return torch.tensor([row, self.epoch]), torch.zeros(())

    train = loaded_data(Told(10), batch_size=BATCH, seed=0).train
    batches = torch.cat([train.batch(step)[0] for step in (0, 1, 2, 3, 4)])
    assert batches[:, 1].tolist() == [0] * 10 + [1] * 10


@pytest.mark.parametrize("number", [1, 4, 6])
def test_an_iterable_dataset_of_datasets_goes_on_from_its_own_state(number):
    """In the first epoch, at its end, in the second one; rows before are not read."""
    running = loaded_data(of_datasets()[0], batch_size=BATCH, seed=0)
    expected = [first_entries(running.train.batch(step)) for step in range(number + 8)]
    running.train.batch(0)
    for step in range(number + 1):
        running.train.batch(step)
    later = loaded_data(of_datasets()[0], batch_size=BATCH, seed=0)
    later.load_state_dict(deepcopy(running.state_dict()))
    READ.clear()
    steps = range(number + 1, number + 8)
    assert [first_entries(later.train.batch(step)) for step in steps] == expected[number + 1 :]
    assert len(READ) <= BATCH * len(steps) + 1


def test_an_accelerate_loader_without_a_state_drops_the_batches_before():
    running, later = (loaded_data(of_accelerate()[0], batch_size=BATCH, seed=0) for _ in range(2))
    expected = [first_entries(running.train.batch(step)) for step in range(8)]
    assert running.state_dict() == {}
    later.load_state_dict({})
    assert first_entries(later.train.batch(7)) == expected[7]


TOKENS = {"input_ids": [[row, 1, 2] for row in range(8)], "target": [[1, 2, row] for row in range(8)]}


def as_dataset():
    return pytest.importorskip("datasets").Dataset.from_dict(TOKENS)


def as_batches(kind=UserDict):
    halves = [{name: rows[first : first + 4] for name, rows in TOKENS.items()} for first in (0, 4)]
    return [kind(each) for each in halves]


@pytest.mark.parametrize(
    ("make", "is_shuffled"),
    [
        (as_dataset, True),
        (lambda: as_dataset().to_iterable_dataset(), False),
        (lambda: DataLoader(as_dataset().with_format("torch"), 4, drop_last=True), False),
        (as_batches, False),
    ],
)
def test_rows_of_lists_and_mappings_that_are_no_dicts_become_batches_of_tensors(make, is_shuffled):
    """A row of `datasets` has lists; BatchEncoding is a UserDict, of which pytree sees no tensor."""
    data = loaded_data(make(), batch_size=4, seed=0)
    batches = [data.train.batch(step) for step in range(2)]
    for name, rows in TOKENS.items():
        found = torch.cat([batch[name] for batch in batches]).tolist()
        assert (sorted(found) if is_shuffled else found) == rows
    assert all(type(batch) is dict for batch in batches)


def test_a_mapping_inside_a_batch_is_a_dict_too():
    inner = UserDict(x=torch.ones(4, 2))
    inputs, target = loaded_data([(inner, torch.ones(4))], batch_size=4, seed=0).train.batch(0)
    assert type(inputs) is dict
    assert inputs["x"] is inner["x"]
    assert target.tolist() == [1, 1, 1, 1]


def test_tokens_that_a_loader_has_made_a_list_of_are_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r'input_ids is a list of 3 tensors.* \.with_format\("torch"\)'):
        loaded_data(DataLoader(as_dataset(), 4), batch_size=4, seed=0)
    ragged = [{"input_ids": [[1, 2], [3]], "target": [[1, 2], [3, 4]]}]
    with pytest.raises(ValueError, match="lists of numbers must have one length"):
        loaded_data(ragged, batch_size=2, seed=0)


def test_an_array_with_negative_strides_is_refused_as_such():
    """The error spoke of lists that differ in length."""
    flipped = [(np.ones((2, 4))[:, ::-1], np.ones(2))]
    with pytest.raises(ValueError, match="and arrays no negative strides: At least one stride"):
        loaded_data(flipped, batch_size=2, seed=0)
