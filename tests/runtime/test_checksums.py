"""A checksum sees every changed bit, and elements that change places; it doesn't depend on strides."""

import pytest
import torch

from zbpp.runtime.checksums import checksum
from zbpp.runtime.layout import _DTYPES


def value(tensor):
    return int(checksum(tensor))


def drawn(dtype, num_elements, seed=0):
    """Random bits of this dtype."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (num_elements * size,), generator=generator)
    return numbers.to(torch.uint8).view(dtype)


def with_a_flipped_bit(tensor, bit):
    changed = tensor.clone()
    changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 3, 8])
def test_every_single_bit_counts(dtype, num_elements):
    tensor = drawn(dtype, num_elements)
    step = 8 if dtype == torch.bool else 1  # a bool is a byte, 0 or 1
    bits = range(0, 8 * num_elements * tensor.element_size(), step)
    changed = {value(with_a_flipped_bit(tensor, bit)) for bit in bits}
    assert len(changed) == len(bits)
    assert value(tensor) not in changed


@pytest.mark.parametrize("num_elements", [70_000, 3 * 2**15])
def test_in_a_long_tensor_a_bit_counts_anywhere(num_elements):
    tensor = drawn(torch.float32, num_elements)
    places = [0, 31, 2**15 * 32 - 1, 2**15 * 32, 2**16 * 32 + 5, num_elements * 32 - 1]
    assert len({value(tensor), *(value(with_a_flipped_bit(tensor, bit)) for bit in places)}) == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_elements_that_change_places_are_seen(dtype):
    """x and -x of float64 differ in the highest bit alone: there a sum of odd multiples of words is blind."""
    for one, other in [(1, -1), (1, 2), (0, 3)]:
        row = torch.full((100,), one, dtype=dtype)
        found = set()
        for place in range(100):
            found.add(value(row.index_fill(0, torch.tensor([place]), other)))
        assert len(found) == 100


def test_the_same_elements_have_the_same_checksum_wherever_they_lie():
    for dtype in _DTYPES:
        tensor = drawn(dtype, 12).view(3, 4)
        shifted = torch.cat([drawn(dtype, 1), tensor.view(-1)])[1:].view(3, 4)
        assert value(tensor) == value(shifted) == value(tensor.t().contiguous().t())
    assert value(torch.empty(0)) == 0
    assert value(torch.tensor(2.0)) == value(torch.tensor([2.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_finds_the_same_checksums_without_a_wait():
    tensors = [drawn(dtype, size) for dtype in _DTYPES for size in (1, 7, 70_001)]
    on_gpu = [each.cuda() for each in tensors]
    checksum(on_gpu[0])  # makes the weights
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [checksum(each) for each in on_gpu]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(each) for each in found] == list(map(value, tensors))
