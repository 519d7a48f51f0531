"""Cutting a batch: equal pieces, no copies, and a way out where it doesn't divide."""

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from zbpp import Pipeline, per_microbatch, plan, replicate
from zbpp.runtime.call.microbatch import Cutter, into_microbatches
from zbpp.runtime.call.sequence_lengths import SequenceLengths


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6])
def test_a_tensor_is_split_along_dim_0_as_chunk_does(num_microbatches):
    batch = torch.arange(24).reshape(6, 4)
    pieces = into_microbatches("x", batch, num_microbatches)
    expected = batch.chunk(num_microbatches)
    assert len(pieces) == num_microbatches
    assert all(torch.equal(one, other) for one, other in zip(pieces, expected, strict=True))


def test_keywords_are_split_each_by_its_kind():
    whole = torch.arange(4)
    pieces = Cutter(2).cut_keywords({"mask": whole, "shared": replicate(whole), "causal": True})
    assert [each["mask"].tolist() for each in pieces] == [[0, 1], [2, 3]]
    assert [each["shared"].tolist() for each in pieces] == [[0, 1, 2, 3]] * 2
    assert [each["causal"] for each in pieces] == [True, True]


# ---------------------------------------------------------------- nested values

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    x: torch.Tensor
    name: str


torch.utils._pytree.register_dataclass(Sample)


def test_tensors_inside_containers_are_split():
    x, y = torch.arange(8).reshape(4, 2), torch.arange(4)
    value = {"a": (x, [y, "text"]), "b": Pair(left=x, right=None), "c": Sample(y, "name")}
    pieces = into_microbatches("argument 0", value, 2)
    for piece, a, b in zip(pieces, x.chunk(2), y.chunk(2), strict=True):
        assert torch.equal(piece["a"][0], a)
        assert torch.equal(piece["a"][1][0], b)
        assert piece["a"][1][1] == "text"
        assert isinstance(piece["b"], Pair)
        assert torch.equal(piece["b"].left, a)
        assert torch.equal(piece["c"].x, b)
        assert piece["c"].name == "name"


# ---------------------------------------------------------------- arrays, and changes in place


def test_a_first_stage_may_change_its_input_in_place_also_when_two_forwards_come_first():
    """The microbatches of a batch are views with one count of changes, so the second F spoilt the first."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.layer(x.sub_(x.mean(0)))

    generator = torch.Generator().manual_seed(1)
    batch, target = (torch.randn(8, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    stage, plain = Centred(), Centred()
    for rows in range(0, 8, 2):
        x = batch[rows : rows + 2].clone()
        (nn.functional.mse_loss(plain(x), target[rows : rows + 2]) / 4).backward()
    Pipeline({0: stage}, plan("gpipe", 1, 4), nn.functional.mse_loss).step(batch.clone(), target=target)
    torch.testing.assert_close(stage.layer.weight.grad, plain.layer.weight.grad, rtol=1e-12, atol=1e-14)


class Holder:
    def __init__(self, x):
        self.x = x


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of prototypes
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)


# what is said of a value that is called x, for 4 microbatches
REFUSED = [
    (lambda: per_microbatch([1, 2]), "x has 2 values, num_microbatches=4"),
    (lambda: torch.zeros(10, 2), r"x has 10 rows, .*: 8, 12; or zbpp.replicate\(x\)"),
    (lambda: torch.zeros(3), "x has 3 rows, .*nearest that do: 4; or"),
    (lambda: torch.zeros(0, 2), "x has 0 rows, .*nearest that do: 4; or"),
    (lambda: torch.tensor(2.0), r"x is a tensor without dimensions.*zbpp.replicate\(x\)"),
    (lambda: {"ids": [torch.zeros(4), torch.zeros(3)]}, r"x\['ids'\]\[1\] has 3 rows, which don't split"),
    (lambda: Holder(torch.zeros(4)), "x is a Holder, which holds tensors that torch's"),
    (lambda: UserDict(x=torch.zeros(4)), "x is a UserDict, which holds tensors that torch's pytree"),
    (lambda: torch.eye(4).to_sparse(), r"x is a sparse tensor, .*: pass x.to_dense\(\) or zbpp.per_micro"),
    (lambda: nested(torch.jagged), r"x is a nested tensor, .*: pass zbpp.per_microbatch\(\["),
    (lambda: nested(torch.strided), r"x is a nested tensor, .*: pass zbpp.per_microbatch\(\["),
    (lambda: np.zeros((4, 2)), r"x is a ndarray, which is not split .* torch.as_tensor"),
    (lambda: {"lengths": np.arange(4)}, r"x\['lengths'\] is a ndarray, which is not split"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_what_can_not_be_split_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        into_microbatches("x", make(), 4)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_beside_sequences_goes_whole_to_each_slice(layout):
    value = nested(layout)
    tokens = torch.arange(8).reshape(2, 4)
    pieces = Cutter(1, (0, 3, 4)).cut("x", per_microbatch([(tokens, value)]))
    assert [piece[0].tolist() for piece in pieces] == [[[0, 1, 2], [4, 5, 6]], [[3], [7]]]
    assert all(piece[1] is value for piece in pieces)
    with pytest.raises(ValueError, match="x, microbatch 0 is a nested tensor, and slice_bounds cut its"):
        SequenceLengths(1, (0, 3, 4)).find({"x": per_microbatch([value])})


BOXES = [torch.zeros(4, 2) for _ in range(4)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a", "b", "c", "d"], "target is a list of 4 values"),
        ([1, 2, 3, 4], "target is a list of 4 values"),
        (
            {"x": torch.zeros(4), "names": ["a", "b", "c", "d"]},
            "target\\['names'\\] is a list of 4 values, and the batch has 4 rows",
        ),
        (BOXES, "target is a list of 4 values, and the batch has 4 rows"),
    ],
)
def test_a_list_with_a_value_for_each_row_is_split_by_the_user_or_refused(value, words):
    """All of it went to each microbatch, or each of four boxes was cut inside."""
    with pytest.raises(ValueError, match=f"{words}.*per_microbatch"):
        into_microbatches("target", value, 2)
    assert into_microbatches("target", per_microbatch([value, value]), 2) == [value, value]
    assert len(into_microbatches("target", value, 1)) == 1


def test_lists_of_batches_and_tuples_are_split_along_their_rows():
    first, second = into_microbatches("x", [torch.arange(4), torch.arange(4)], 2)
    assert [each.tolist() for each in (*first, *second)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    pieces = into_microbatches("x", tuple(torch.arange(2) for _ in range(2)), 2)
    assert [len(each) for each in pieces] == [2, 2]
