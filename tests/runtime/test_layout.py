"""Headers say what was written, and layouts can be read in error messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zbpp.runtime.layout import TensorLayout, decode, encode

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

tensor_layouts = st.builds(
    TensorLayout,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    st.booleans(),
)


@given(st.lists(st.none() | tensor_layouts, max_size=12).map(tuple))
def test_a_header_says_the_layout_that_was_written(layout):
    header = encode(layout)
    assert (header.dtype, header.shape) == (torch.int64, (256,))
    assert decode(header) == layout


def test_a_layout_too_long_for_a_header_is_refused():
    with pytest.raises(ValueError, match="100 tensors pass between two stages: too many for a header"):
        encode((TensorLayout(torch.float32, (2, 3), True),) * 100)


def test_a_dtype_that_cannot_travel_is_refused_with_those_that_can():
    with pytest.raises(ValueError, match=r"float8_e5m2\[2\] can't be sent: cast it to one of float32, "):
        encode((TensorLayout(torch.float8_e5m2, (2,), False),))
