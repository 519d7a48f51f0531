"""Samples from several sets in fixed shares. The number of a sample decides which set it comes from.

Samples come in blocks; each block has exactly its share of each set, in an order drawn from (seed, block):

    weights 3 and 1, blocks of 4:    a b a a | a a a b | b a a a | ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.windows import Rows, Samples
from zbpp.seeding import seed_of

LARGEST_BLOCK = 1000
"""Weights whose shares need larger blocks are rounded to thousandths."""


class Mixture:
    """Samples of several sets, each in its own order and epochs.

    weights: the shares, up to a factor. seed: of the order of sets in each block; None: one set after the
    other, for evaluation. Raises ValueError for weights that are no shares.
    """

    def __init__(self, sets: Sequence[Samples], weights: Sequence[float], *, seed: int | None) -> None:
        self._sets, self._seed = sets, seed
        self._counts = shares_in_block(weights)
        self._firsts = np.cumsum(self._counts) - self._counts

    @property
    def num_samples(self) -> int:
        """How many samples it takes until the first epoch of a set ends, of the set where it ends first."""
        blocks = min(each.num_samples / count for each, count in zip(self._sets, self._counts, strict=True))
        return int(blocks * self._counts.sum())

    def rows(self, samples: Numbers) -> Rows:
        """See `Samples.rows`."""
        blocks, places = np.divmod(samples, self._counts.sum())
        if self._seed is not None:
            places = permute(places, int(self._counts.sum()), keys_of(seed_of(self._seed, "mixture"), blocks))
        chosen = np.searchsorted(self._firsts, places, side="right") - 1
        # Within a set, samples are numbered on from block to block: each comes once, as without a mixture.
        numbers = blocks * self._counts[chosen] + places - self._firsts[chosen]
        found = {each: self._sets[each].rows(numbers[chosen == each]) for each in np.unique(chosen)}
        return _merged(found, chosen)


def shares_in_block(weights: Sequence[float]) -> Numbers:
    """How many samples of each set are in a block: the smallest whole numbers with the weights' ratios.

    If these add up to more than 1000, shares are rounded to thousandths, at least one. Raises ValueError.
    """
    numbers = [each for each in weights if isinstance(each, int | float) and not isinstance(each, bool)]
    bad = [weight for weight in numbers if not 0 < weight < math.inf]
    if bad or not weights or len(numbers) < len(weights):
        raise ValueError(f"the weights of a mixture are {list(weights)}: write a number above 0 for each set")
    # As they are written: 0.7 is 7/10, not the binary fraction next to it.
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(each * math.lcm(*(other.denominator for other in exact))) for each in exact]
    counts = [each // math.gcd(*whole) for each in whole]
    if sum(counts) > LARGEST_BLOCK:
        counts = [max(1, round(each * LARGEST_BLOCK / sum(counts))) for each in counts]
    return np.array(counts, dtype=np.int64)


def _merged(found: dict[int, Rows], chosen: Numbers) -> Rows:
    """One batch of rows. found: {set: its rows}; chosen: each row's set. All sets have positions, or none."""
    first = next(iter(found.values()))
    tokens = np.empty((len(chosen), first.tokens.shape[1]), dtype=np.int64)
    positions = None if first.positions is None else np.empty_like(tokens[:, :-1])
    for each, rows in found.items():
        tokens[chosen == each] = rows.tokens
        if positions is not None and rows.positions is not None:
            positions[chosen == each] = rows.positions
    return Rows(tokens, positions)
