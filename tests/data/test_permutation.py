"""The computed order is a permutation, different for each key, and even."""

import numpy as np
import pytest

from zbpp.data.permutation import keys_of, permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_every_number_comes_once(size):
    for key in range(3):
        assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_a_place_is_computed_alone_as_among_others():
    whole = permute(np.arange(1000), 1000, 7)
    assert [int(permute(np.array([place]), 1000, 7)[0]) for place in (0, 3, 999)] == whole[
        [0, 3, 999]
    ].tolist()


@pytest.mark.parametrize(("size", "num_keys"), [(4, 12_000), (10, 12_000)])
def test_over_many_keys_each_pair_of_numbers_stands_first_equally_often(size, num_keys):
    """Chi-squared over ordered pairs, six standard deviations: a range of ten is as even as a large one."""
    keys = keys_of(3, np.arange(num_keys))
    first, second = (permute(np.full(num_keys, place), size, keys) for place in (0, 1))
    pairs = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    counts, freedom = pairs[~np.eye(size, dtype=bool)], size * (size - 1) - 1
    expected = num_keys / (size * (size - 1))
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def test_the_order_is_the_same_on_every_machine():
    """The numbers that this page had when it was written: a resumed run goes on in the same order."""
    assert permute(np.arange(8), 1000, 1).tolist() == [220, 513, 305, 397, 56, 784, 47, 984]
