"""Cutting a batch: equal pieces, no copies, and a way out where it doesn't divide."""

import pytest
import torch

from zbpp import per_microbatch, replicate
from zbpp.runtime.microbatch import Cutter, split


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6])
def test_a_tensor_is_split_along_dim_0_as_chunk_does(num_microbatches):
    batch = torch.arange(24).reshape(6, 4)
    pieces = split("x", batch, num_microbatches)
    expected = batch.chunk(num_microbatches)
    assert len(pieces) == num_microbatches
    assert all(torch.equal(one, other) for one, other in zip(pieces, expected, strict=True))


def test_pieces_are_views_of_the_batch():
    batch = torch.zeros(4, 2)
    pieces = split("x", batch, 2)
    pieces[1].fill_(1)
    assert batch.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_a_replicated_tensor_reaches_every_microbatch_whole():
    tensor = torch.zeros(5)
    assert [piece is tensor for piece in split("mask", replicate(tensor), 3)] == [True] * 3


def test_values_made_for_each_microbatch_are_given_out_as_they_are():
    values = (torch.zeros(2), torch.zeros(5, 1), None)
    pieces = split("x", per_microbatch(values), 3)
    assert [piece is value for piece, value in zip(pieces, values, strict=True)] == [True] * 3


def test_another_number_of_them_is_refused():
    with pytest.raises(ValueError, match="argument 0 has 2 values, num_microbatches=3"):
        split("argument 0", per_microbatch([1, 2]), 3)


@pytest.mark.parametrize("value", [None, 3, 0.5, "causal", (1, 2)])
def test_other_values_pass_as_they_are(value):
    assert split("option", value, 2) == [value, value]


@pytest.mark.parametrize(
    ("rows", "num_microbatches", "nearest"), [(10, 4, "8, 12"), (3, 4, "4"), (0, 4, "4"), (9, 8, "8, 16")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(rows, num_microbatches, nearest):
    with pytest.raises(ValueError) as caught:
        split("target", torch.zeros(rows, 2), num_microbatches)
    assert f"target has {rows} rows" in str(caught.value)
    assert f"nearest that do: {nearest}; or zbpp.replicate(target)" in str(caught.value)


def test_a_tensor_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"scale is a tensor without dimensions.*zbpp.replicate\(scale\)"):
        split("scale", torch.tensor(2.0), 2)


def test_only_tensors_are_marked():
    with pytest.raises(TypeError, match="takes a tensor, not float: other values need no mark"):
        replicate(0.5)


def test_keywords_are_split_each_by_its_kind():
    whole = torch.arange(4)
    pieces = Cutter(2).cut_keywords({"mask": whole, "shared": replicate(whole), "causal": True})
    assert [each["mask"].tolist() for each in pieces] == [[0, 1], [2, 3]]
    assert [each["shared"].tolist() for each in pieces] == [[0, 1, 2, 3]] * 2
    assert [each["causal"] for each in pieces] == [True, True]


def test_no_keywords_are_no_keywords_for_each_microbatch():
    assert Cutter(3).cut_keywords({}) == [{}, {}, {}]
