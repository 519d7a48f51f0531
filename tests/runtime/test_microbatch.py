"""Cutting a batch: equal pieces, no copies, and a way out where it doesn't divide."""

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from zbpp import Pipeline, per_microbatch, plan, replicate
from zbpp.runtime.microbatch import Cutter, into_microbatches


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6])
def test_a_tensor_is_split_along_dim_0_as_chunk_does(num_microbatches):
    batch = torch.arange(24).reshape(6, 4)
    pieces = into_microbatches("x", batch, num_microbatches)
    expected = batch.chunk(num_microbatches)
    assert len(pieces) == num_microbatches
    assert all(torch.equal(one, other) for one, other in zip(pieces, expected, strict=True))


def test_pieces_are_views_of_the_batch():
    batch = torch.zeros(4, 2)
    pieces = into_microbatches("x", batch, 2)
    pieces[1].fill_(1)
    assert batch.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_a_replicated_tensor_reaches_every_microbatch_whole():
    tensor = torch.zeros(5)
    assert [piece is tensor for piece in into_microbatches("mask", replicate(tensor), 3)] == [True] * 3


def test_values_made_for_each_microbatch_are_given_out_as_they_are():
    values = (torch.zeros(2), torch.zeros(5, 1), None)
    pieces = into_microbatches("x", per_microbatch(values), 3)
    assert [piece is value for piece, value in zip(pieces, values, strict=True)] == [True] * 3


def test_per_microbatch_with_another_number_of_values_is_refused():
    with pytest.raises(ValueError, match="argument 0 has 2 values, num_microbatches=3"):
        into_microbatches("argument 0", per_microbatch([1, 2]), 3)


@pytest.mark.parametrize(
    ("rows", "num_microbatches", "nearest"), [(10, 4, "8, 12"), (3, 4, "4"), (0, 4, "4"), (9, 8, "8, 16")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(rows, num_microbatches, nearest):
    with pytest.raises(ValueError) as caught:
        into_microbatches("target", torch.zeros(rows, 2), num_microbatches)
    assert f"target has {rows} rows" in str(caught.value)
    assert f"nearest that do: {nearest}; or zbpp.replicate(target)" in str(caught.value)


def test_a_tensor_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"scale is a tensor without dimensions.*zbpp.replicate\(scale\)"):
        into_microbatches("scale", torch.tensor(2.0), 2)


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


def test_marks_work_inside_containers():
    shared, x = torch.zeros(3), torch.arange(4)
    value = {"mask": replicate(shared), "x": x, "sizes": per_microbatch([1, 2]), "all": replicate((x, 1))}
    first, second = into_microbatches("argument 0", value, 2)
    assert first["mask"] is second["mask"] is shared
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [2, 3])
    assert (first["sizes"], second["sizes"]) == (1, 2)
    assert first["all"][0] is second["all"][0] is x


def test_a_tensor_inside_that_does_not_divide_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"argument 0\['ids'\]\[1\] has 3 rows, which don't split"):
        into_microbatches("argument 0", {"ids": [torch.zeros(4), torch.zeros(3)]}, 2)


class Holder:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("value", [Holder(torch.zeros(4)), UserDict(x=torch.zeros(4))])
def test_an_object_that_hides_tensors_is_refused(value):
    kind = type(value).__name__
    with pytest.raises(
        ValueError, match=f"argument 0\\[1\\] is a {kind}, which holds tensors that torch's pyt"
    ):
        into_microbatches("argument 0", (torch.zeros(4), value), 2)
    assert into_microbatches("argument 0", replicate(value), 2) == [value, value]


def test_a_target_with_another_number_of_rows_is_refused():
    cutter = Cutter(2)
    cutter.cut("argument 0", torch.zeros(4, 3))
    cutter.cut_keywords({"mask": replicate(torch.zeros(5)), "sizes": per_microbatch([torch.zeros(7)] * 2)})
    with pytest.raises(ValueError, match=r"target\['y'\] has 6 rows, argument 0 has 4: .*replicate\(target"):
        cutter.cut("target", {"y": torch.zeros(6)})


def test_sparse_and_nested_tensors_say_what_to_pass():
    with pytest.raises(ValueError, match=r"x is a sparse tensor, .*: pass x.to_dense\(\) or zbpp.per_micro"):
        into_microbatches("x", torch.eye(4).to_sparse(), 2)
    for layout in (torch.jagged, torch.strided):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of prototypes
            nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)
        with pytest.raises(ValueError, match=r"x is a nested tensor, .*: pass zbpp.per_microbatch\(\["):
            into_microbatches("x", nested, 2)


# ---------------------------------------------------------------- arrays, and changes in place


@pytest.mark.parametrize(
    "given", [np.zeros((4, 2)), {"lengths": np.arange(4)}], ids=["argument", "in a dict"]
)
def test_an_array_with_rows_is_refused(given):
    with pytest.raises(ValueError, match=r"is a ndarray, which is not split .* torch.as_tensor"):
        into_microbatches("argument 0", given, 2)
    assert into_microbatches("argument 0", np.float32(1.5), 2) == [1.5, 1.5]


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
