"""Batches of about so many tokens against counting by hand, torch's padding and brute force."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from zbpp.data.loader import loaded_data
from zbpp.data.sequences import IGNORED, Known, packed, padded, padded_rows, sequences_of
from zbpp.data.source import parts_of
from zbpp.data.token_batches import TokenBatches, longest_microbatch, replica_of
from zbpp.data.tokens import Mixture
from zbpp.data.windows import Windows


def in_turn(lengths):
    """Sequences of these lengths, over and over: sequence 5 is 500, 501, ... with the labels 501, ..."""
    lengths = np.array(lengths)

    def read(sample):
        tokens = 100 * sample + torch.arange(lengths[sample % len(lengths)])
        return tokens, tokens + 1

    return Known(lengths, lambda samples: samples % len(lengths), read)


def drawn(seed, count=40, most=30):
    return np.random.default_rng(seed).lognormal(2, 0.7, count).clip(1, most).astype(np.int64)


def batches(lengths, tokens_per_batch, *, is_packed=True):
    return TokenBatches(in_turn(lengths), tokens_per_batch=tokens_per_batch, is_packed=is_packed)


# ---------------------------------------------------------------- which sequences are in a batch


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_the_next_sequences_that_fit(seed):
    """By hand: one sequence after the other, until the next one is too much."""
    lengths = drawn(seed)
    made, sample = batches(lengths, 77), 0
    for step in range(12):
        expected, filled = [], 0
        while filled + lengths[sample % len(lengths)] <= 77:
            filled += lengths[sample % len(lengths)]
            expected.append(sample)
            sample += 1
        first = made.first_of(step)
        assert made.members(first)[0].tolist() == expected
        for count in (1, 3, 8, 50):
            groups = [group for group, _ in made.cut(first, count)]
            assert len(groups) == count
            assert sorted(itertools.chain(*groups)) == expected


def test_a_batch_can_be_asked_for_in_any_order_and_after_a_state():
    lengths = drawn(9)
    firsts = [batches(lengths, 50).first_of(step) for step in range(30)]
    made = batches(lengths, 50)
    assert [made.first_of(step) for step in (29, 3, 4, 28, 0)] == [firsts[step] for step in (29, 3, 4, 28, 0)]
    made.first_of(20)
    other = batches(lengths, 50)
    other.load_state_dict(made.state_dict())
    assert min(other._firsts) > 0
    assert [other.first_of(step) for step in (29, 20, 2)] == [firsts[step] for step in (29, 20, 2)]
    differs = batches(lengths, 51)
    differs.load_state_dict(made.state_dict())
    assert differs.first_of(20) == batches(lengths, 51).first_of(20)


# ---------------------------------------------------------------- microbatches


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_microbatch_has_the_size_that_was_planned(seed, is_packed):
    made = batches(drawn(seed), 90, is_packed=is_packed)
    for group, size in made.cut(0, 5):
        inputs, labels = parts_of(made.microbatch(group))
        assert labels.shape == (size.rows, size.length)
        assert size.filled == int((labels != IGNORED).sum()) == sum(made.sequences.lengths(np.array(group)))
        assert (len(inputs) == 2) == is_packed


@pytest.mark.parametrize("seed", range(6))
def test_packed_rows_are_nearly_equal(seed):
    """The longest first, to the shortest row: no row above twice the mean, unless one sequence is."""
    lengths = drawn(seed, 60)
    made = batches(lengths, 300)
    for step in range(5):
        cut = made.cut(made.first_of(step), 6)
        total = sum(size.filled for _, size in cut)
        assert cut[0][1].length <= max(lengths.max(), 2 * total / 6)


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_padded_microbatch_is_as_small_as_neighbours_allow(seed):
    """Brute force over all ways to cut the falling lengths into three."""
    lengths = drawn(seed, 9)
    made = batches(lengths, int(lengths.sum()), is_packed=False)
    falling = sorted(lengths.tolist(), reverse=True)
    best = min(
        max(len(part) * part[0] for part in (falling[:one], falling[one:two], falling[two:]))
        for one, two in itertools.combinations(range(1, len(falling)), 2)
    )
    cut = made.cut(0, 3)
    assert cut[0][1].tokens == best
    assert longest_microbatch(made, 3, 4)[1].tokens == best


def test_with_fewer_sequences_than_microbatches_some_are_empty():
    for is_packed in (True, False):
        made = batches([7, 5, 6], 18, is_packed=is_packed)
        cut = made.cut(0, 5)
        assert [len(group) for group, _ in cut] == [1, 1, 1, 0, 0]
        empty = made.microbatch(())
        assert parts_of(empty)[1].tolist() == [[IGNORED]]
        assert all(each.shape == (1, 1) for each in parts_of(empty)[0] if isinstance(each, torch.Tensor))


def test_one_long_sequence_does_not_put_all_others_into_one_microbatch():
    """The bound of 100 tokens would allow it; then most of a pipeline's microbatches would be empty."""
    cut = batches([100] + [10] * 10, 200, is_packed=False).cut(0, 4)
    assert [len(group) for group, _ in cut] == [1, 5, 3, 2]


def test_replicas_share_the_microbatches_of_a_batch():
    cut = batches(drawn(3), 200).cut(0, 12)
    parts = [replica_of(cut, part, 3) for part in range(3)]
    assert [len(each) for each in parts] == [4, 4, 4]
    assert sorted(group for part in parts for group, _ in part) == sorted(group for group, _ in cut)
    loads = [sum(size.tokens for _, size in part) for part in parts]
    assert max(loads) - min(loads) <= cut[0][1].tokens


def test_packed_is_one_after_the_other_and_padded_is_torchs_padding():
    rows = [(torch.arange(n), 10 + torch.arange(n)) for n in (3, 1, 4)]
    found = packed(rows)
    assert found["input_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert found["position_ids"].tolist() == found["input_ids"].tolist()
    assert torch.equal(found["target"], 10 + found["input_ids"])
    inputs, labels = padded(rows)
    assert torch.equal(inputs, pad_sequence([each for each, _ in rows], batch_first=True))
    expected = pad_sequence([each for _, each in rows], batch_first=True, padding_value=IGNORED)
    assert torch.equal(labels, expected)
    named = padded([{"labels": y, "x": {"a": x, "b": x[:, None].float()}} for x, y in rows])
    assert list(named) == ["labels", "x"]
    assert named["x"]["b"].shape == (3, 4, 1)


# ---------------------------------------------------------------- where sequences come from


def test_documents_come_in_pieces_and_every_next_token_once():
    ends = np.array([5, 6, 30, 30, 47])
    tokens = np.arange(47)
    windows = Windows(tokens, sequence_length=8, seed=3, ends=ends)
    found = windows.sequences()
    pairs = []
    count = 4 // 8 + 1 + 3 + 2  # of 4, 0, 23, 0 and 16 inputs
    lengths = found.lengths(np.arange(count))
    for sample in range(count):
        inputs, labels = found.sequence(sample)
        assert len(inputs) == lengths[sample] <= 8
        pairs += [*zip(inputs.tolist(), labels.tolist(), strict=True)]
    assert sorted(pairs) == [(i, i + 1) for i in range(46) if i + 1 not in ends]
    assert found.longest == 8


def test_without_documents_sequences_are_the_windows():
    windows = Windows(np.arange(50), sequence_length=8, seed=1)
    found = windows.sequences()
    for sample in (0, 5, 6, 13):
        assert found.sequence(sample)[0].tolist() == windows.rows(np.array([sample])).tokens[0, :-1].tolist()


def test_a_mixture_keeps_its_shares():
    sets = [Windows(np.arange(first, first + 200), sequence_length=8, seed=2) for first in (0, 1000)]
    found = Mixture(sets, [3, 1], seed=0).sequences()
    starts = [int(found.sequence(sample)[0][0]) for sample in range(40)]
    assert sum(start >= 1000 for start in starts) == 10
    assert found.lengths(np.arange(40)).tolist() == [8] * 40


class Rows(torch.utils.data.Dataset):
    """Row i has i % 5 + 1 tokens, as lists."""

    def __init__(self, **attributes):
        vars(self).update(attributes)
        self.num_read = 0

    def __len__(self):
        return 20

    def __getitem__(self, row):
        self.num_read += 1
        length = row % 5 + 1
        return {"input_ids": [row] * length, "labels": [row] * length}


def test_a_datasets_rows_are_sequences_and_its_lengths_are_read_once_or_given():
    for rows, most in ((Rows(), 20), (Rows(lengths=[row % 5 + 1 for row in range(20)]), 0)):
        data = loaded_data(rows, batch_size=4, seed=0, collate=padded_rows)
        assert data.train.batch(0)["labels"].shape == data.train.batch(0)["input_ids"].shape
        rows.num_read = 0
        found = sequences_of(data.train)
        assert rows.num_read == most
        sequences = [found.sequence(sample) for sample in range(20)]
        assert sorted(int(each["input_ids"][0]) for each in sequences) == list(range(20))
        assert [len(each["labels"]) for each in sequences] == found.lengths(np.arange(20)).tolist()


def test_a_dataset_whose_lengths_are_others_than_it_says_is_refused():
    rows = Rows(lengths=[3] * 20)
    found = sequences_of(loaded_data(rows, batch_size=4, seed=0, collate=padded_rows).train)
    with pytest.raises(ValueError, match="tokens, and had 3 when its length was read"):
        [found.sequence(sample) for sample in range(20)]


def test_lengths_of_another_number_of_rows_are_refused():
    rows = Rows(lengths=[3] * 7)
    with pytest.raises(ValueError, match="the Dataset has 20 rows, and its lengths are 7: give one for"):
        sequences_of(loaded_data(rows, batch_size=4, seed=0, collate=padded_rows).train)


class Ragged(Rows):
    def __getitem__(self, row):
        return torch.arange(row + 1), torch.arange(row + 1)


def test_rows_of_different_lengths_are_refused_with_what_takes_them():
    with pytest.raises(ValueError, match=r"rows of a batch differ in shape .*write data\.batching=tokens"):
        loaded_data(Ragged(), batch_size=4, seed=0)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (Rows()[row] for row in range(20))


def test_a_stream_of_sequences_is_refused_by_what_it_lacks():
    """Its rows differ in length: torch's collation fails before anybody asks for sequences."""
    data = loaded_data(Stream(), batch_size=4, seed=0, collate=padded_rows)
    with pytest.raises(ValueError, match="needs sequences by number, and IteratedBatches has none"):
        sequences_of(data.train)


class Wrong(Rows):
    def __getitem__(self, row):
        return self.row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((torch.arange(3), torch.zeros(3)), r"target of a sequence is torch.float32 \[3\]"),
        ((torch.arange(3), torch.tensor(1)), r"target of a sequence is torch.int64 \[\]"),
        ((torch.arange(3), torch.arange(4)), r"tensors of the shapes \[3\], \[4\]"),
        ((torch.arange(0), torch.arange(0)), r"shapes \[0\], \[0\]: give each one entry per token, and at"),
    ],
)
def test_what_is_no_sequence_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        sequences_of(loaded_data(Wrong(row=row), batch_size=1, seed=0, is_read=False).train)
    with pytest.raises(ValueError, match=message):
        padded_rows([row])


def test_batches_without_sequences_and_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="needs sequences by number, and IteratedBatches has none"):
        sequences_of(loaded_data([(torch.ones(2, 1), torch.ones(2, 1))], batch_size=2, seed=0).train)
    with pytest.raises(ValueError, match="tokens_per_batch=9, and the longest sequence has 12 tokens"):
        batches([3, 12], 9)
