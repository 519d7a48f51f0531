"""Pseudo-random permutations that are computed number by number: no array of the whole order is kept.

A Feistel network permutes 0 .. 4^k - 1: it splits a number into two halves and changes one half by a hash of
the other, several times. A number that leaves the range 0 .. size - 1 is permuted again until it is back in
it ("cycle walking", Black and Rogaway 2002, section 3): that is a permutation of the range, and takes fewer
than four passes on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

NUM_ROUNDS = 8  # four permute large ranges well; ranges below ten fail a chi-squared test with six


def permute(places: Numbers, size: int, key: int | Numbers) -> Numbers:
    """For each place in 0 .. size - 1, the number that stands there under the permutation `key`.

    key: one permutation for all places, or one for each of them. Equal arguments give equal results on every
    machine.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = np.broadcast_to(np.asarray(key).astype(np.uint64), places.shape)
    numbers = _pass(places.astype(np.uint64), half, keys)
    outside = np.flatnonzero(numbers >= size)
    while len(outside):
        numbers[outside] = _pass(numbers[outside], half, keys[outside])
        outside = outside[numbers[outside] >= size]
    return numbers.astype(np.int64)


def _pass(numbers: _Words, half: np.uint64, keys: _Words) -> _Words:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for number in range(NUM_ROUNDS):
        # The top bits of the hash: the low bits of a product depend on few bits of its factors.
        changed = left ^ (mixed(right + mixed(keys + np.uint64(number))) >> (np.uint64(64) - half))
        left, right = right, changed
    return (left << half) | right


def mixed(words: _Words) -> _Words:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): each bit of a word changes half of the bits."""
    words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keys_of(seed: int, numbers: Numbers) -> Numbers:
    """A key for each number (of an epoch, say): other seeds or numbers give unrelated permutations."""
    return mixed(mixed(numbers.astype(np.uint64)) + np.uint64(seed)).astype(np.int64)
