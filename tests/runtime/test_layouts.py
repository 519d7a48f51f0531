"""Layouts that are derived from those of other sizes: what is derived is right, or is not derived."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zbpp.runtime.call.sizes import Size, Sizes, is_empty, size_of
from zbpp.runtime.layout import TensorLayout
from zbpp.runtime.layouts import Layouts
from zbpp.schedule import Value

numbers = st.integers(0, 50)
factors = st.fractions(-2, 3, max_denominator=2)


def layout(*shape, dtype=torch.float32):
    return TensorLayout(dtype, shape, True)


def run(layouts, sizes, layout_of):
    """One call: a message of each size on one channel. Returns what was known of each before it came."""
    layouts.begin(sizes)
    found = []
    for number, size in enumerate(sizes):
        value = Value("x", 1, number)
        found.append(layouts.of(value))
        if found[-1] is None:
            layouts.learn(value, layout_of(*size.numbers))
    return found


def sizes(*rows):
    return [Size("int64[,]", row) for row in rows]


def hidden(rows, length):
    return (layout(rows, length, 64), None, layout(length + 2, dtype=torch.int64))


def test_a_size_is_derived_once_a_third_one_on_its_line_had_the_layout_that_follows():
    layouts = Layouts()
    assert run(layouts, sizes((2, 5), (2, 9)), hidden) == [None, None]
    assert run(layouts, sizes((2, 5), (2, 7), (3, 7)), hidden) == [hidden(2, 5), None, None]
    assert run(layouts, sizes((2, 100), (2, 1), (3, 8), (1, 4)), hidden) == [
        hidden(2, 100), hidden(2, 1), hidden(3, 8), hidden(1, 4),
    ]  # fmt: skip


def test_what_a_call_learns_is_derived_from_in_the_next_call():
    """Else the two ends of a link could differ: one may learn a layout before the other."""
    layouts = Layouts()
    three = sizes((2, 5), (2, 9), (2, 6), (2, 7), (2, 5))
    assert run(layouts, three, hidden) == [None] * 4 + [hidden(2, 5)]
    assert run(layouts, sizes((2, 8)), hidden) == [hidden(2, 8)]


@pytest.mark.parametrize(
    "shape",
    [
        lambda rows, length: (layout(rows, -(-length // 8) * 8),),  # padded
        lambda rows, length: (layout(rows * length),),
        lambda rows, length: (layout(length),) * (1 + length % 2),
        lambda rows, length: (layout(length, dtype=torch.float64 if length > 6 else torch.float32),),
        lambda rows, length: (layout(length) if length > 6 else None,),
    ],
)
def test_layouts_that_do_not_grow_with_the_size_always_have_headers(shape):
    layouts = Layouts()
    rows = [(rows, length) for rows in (1, 2, 3) for length in (5, 9, 6, 4)]
    run(layouts, sizes(*rows), shape)
    assert run(layouts, sizes((2, 7), (2, 11)), shape) == [None, None]
    assert run(layouts, sizes((2, 7), *rows), shape)[1:] == [shape(*each) for each in rows]


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), st.lists(factors, min_size=6, max_size=6)
)
def test_what_is_derived_from_affine_layouts_is_right(rows, factors):
    a, b, c, d, e, f = factors

    def shape(one, other):
        dims = a * one + b * other + c + 200, d * one + e * other + f + 200
        return (layout(*(int(each) if each.denominator == 1 else 7 for each in dims)),)

    is_whole = all(each.denominator == 1 for each in factors)
    layouts = Layouts()
    for half in (rows[::2], rows[1::2], rows):
        for row, found in zip(half, run(layouts, sizes(*half), shape) if half else (), strict=True):
            assert found is None or not is_whole or found == shape(*row)


def test_dynamic_layouts_are_never_known():
    layouts = Layouts(is_dynamic=True)
    for _ in range(2):
        assert run(layouts, sizes((2, 5), (2, 5)), hidden) == [None, None]


def test_a_call_with_a_size_that_was_not_there_before_is_new():
    layouts = Layouts()
    begun = [layouts.begin(sizes(*rows)) for rows in ([(1, 2)], [(1, 2)], [(1, 2), (1, 3)], [(1, 3)])]
    assert begun == [True, False, True, False]


# ---------------------------------------------------------------- sizes


def test_a_size_tells_shapes_dtypes_and_what_requires_grad():
    values = (torch.ones(2, 3), {"mask": torch.ones(4, dtype=torch.bool), "name": "x"}), torch.tensor(1.0)
    assert size_of(values) == Size("float32[,] bool[] float32[]", (2, 3, 4))
    assert size_of(torch.ones(2, requires_grad=True)) != size_of(torch.ones(2))
    assert size_of(torch.ones(2, 1)) != size_of(torch.ones(2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, True), (torch.ones(0, 5), True), ((None, torch.ones(3, 0)), True), ([], True),
        (torch.ones(1), False), ((torch.ones(0), torch.ones(1)), False), (["text"], False), (0, False),
    ],
)  # fmt: skip
def test_a_microbatch_is_empty_if_it_has_nothing(value, expected):
    assert is_empty(value) == expected


@pytest.mark.parametrize("num_microbatches", [1, 3, 700])
@pytest.mark.parametrize("order", [None, "reversed", "without the first"])
def test_sizes_are_decoded_as_they_were_encoded(num_microbatches, order):
    for of in (sizes(*((1, n) for n in range(num_microbatches))), sizes((4, 5)) * num_microbatches):
        places = (*range(num_microbatches),)
        chosen = {"reversed": places[::-1], "without the first": places[1:]}.get(order, places)
        made = Sizes("step", 123, tuple(of), chosen)
        assert Sizes.decoded(made.encoded()) == made
