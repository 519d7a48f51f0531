"""Batches of prepared tokens, from one set or from several in fixed shares.

The number of a sample decides which set of a mixture it comes from. Samples come in blocks; each block has
exactly its share of each set, in an order drawn from (seed, block):

    weights 3 and 1, blocks of 4:    a b a a | a a a b | b a a a | ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.prepared import HELD_OUT, TRAIN, Prepared, digest_of, open_prepared
from zbpp.data.sequences import Sequences
from zbpp.data.source import Data, check_vocab_size
from zbpp.data.text import data_of_samples
from zbpp.data.tokenizer import fingerprint_of
from zbpp.data.windows import Rows, Samples, Windows
from zbpp.seeding import seed_of


def token_data(
    *,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    seed: int,
    path: str | None = None,
    mixture: Sequence[Mapping[str, Any]] | None = None,
    across_documents: bool = True,
    tokenizer: str | None = None,
) -> Data:
    """Batches from a set that scripts/prepare_data.py wrote, `path`, or from several, `mixture`.

    mixture: entries with a `path` and a `weight`, its share of the samples up to a factor. across_documents:
    whether tokens see the documents before their own in a window; if not, batches are dicts with
    `position_ids`, and the model has to honour them. tokenizer: a file that the sets must have been made
    with. Raises FileNotFoundError; ValueError if tokenizers or vocabulary disagree, and for fewer samples
    than a batch.
    """
    paths, weights = _entries(path, mixture)
    sets = [open_prepared(each) for each in paths]
    _check_tokenizers(sets, tokenizer)
    check_vocab_size(max(each.header.vocab_size for each in sets), vocab_size)

    def samples(part: str, seed: int | None) -> Samples:
        windows = []
        for number, each in enumerate(sets):
            tokens, ends = each.part(part)
            own_seed = None if seed is None else seed_of(seed, "set", number)
            found = Windows(
                tokens,
                sequence_length=sequence_length,
                seed=own_seed,
                ends=None if across_documents else ends,
                name=f"{each.folder} ({part})",
            )
            windows.append(found)
        return windows[0] if len(sets) == 1 else Mixture(windows, weights, seed=seed)

    has_evaluation = all(each.header.parts[HELD_OUT].num_tokens for each in sets)
    return data_of_samples(
        samples(TRAIN, seed),
        samples(HELD_OUT, None) if has_evaluation else None,
        sequence_length=sequence_length,
        batch_size=batch_size,
        fingerprint=digest_of(repr([(each.header.fingerprint, *weights) for each in sets]).encode()),
        name=" and ".join(map(str, paths)),
    )


def _entries(path: str | None, mixture: Sequence[Mapping[str, Any]] | None) -> tuple[list[str], list[float]]:
    if (path is None) == (mixture is None):
        raise ValueError(
            "write data.path=FOLDER, or data.mixture=[{path: FOLDER, weight: 3}, {path: FOLDER, weight: 1}]"
        )
    if path is not None:
        return [path], [1.0]
    entries = mixture or []
    wrong = [dict(entry) for entry in entries if set(entry) != {"path", "weight"}]
    if wrong or not entries:
        raise ValueError(f"data.mixture has {wrong or 'no entry'}: write entries {{path: ..., weight: ...}}")
    weights = [entry["weight"] for entry in entries]
    shares_in_block(weights)  # raises ValueError for a bad weight, also for that of a single set
    return [str(entry["path"]) for entry in entries], weights


def _check_tokenizers(sets: Sequence[Prepared], tokenizer: str | None) -> None:
    """Raises ValueError if sets were made by different tokenizers, or not by the given one."""
    given = {} if tokenizer is None else {tokenizer: fingerprint_of(Path(tokenizer).expanduser())}
    found = given | {str(each.folder): each.header.tokenizer for each in sets}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name}: {fingerprint}" for name, fingerprint in found.items())
        raise ValueError(
            f"the tokens are of different tokenizers ({listed}), so a number means another token in each: "
            "prepare them again by one, or name the one that made them as data.tokenizer"
        )


# ---------------------------------------------------------------- mixtures


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
        chosen, numbers = self.sources(samples)
        found = {each: self._sets[each].rows(numbers[chosen == each]) for each in np.unique(chosen)}
        return _merged(found, chosen)

    def sequences(self) -> Sequences:
        """Those of the sets, each set with its share."""
        return _MixedSequences([each.sequences() for each in self._sets], self._counts, self.sources)

    def sources(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(the set of each sample, its number in the set)."""
        blocks, places = np.divmod(samples, self._counts.sum())
        if self._seed is not None:
            places = permute(places, int(self._counts.sum()), keys_of(seed_of(self._seed, "mixture"), blocks))
        chosen = np.searchsorted(self._firsts, places, side="right") - 1
        # Within a set, samples are numbered on from block to block: each comes once, as without a mixture.
        return chosen, blocks * self._counts[chosen] + places - self._firsts[chosen]


class _MixedSequences:
    """Sequences of several sets. counts: of each set in a block; sources: see `Mixture.sources`."""

    def __init__(
        self,
        sets: Sequence[Sequences],
        counts: Numbers,
        sources: Callable[[Numbers], tuple[Numbers, Numbers]],
    ) -> None:
        self._sets, self._sources = sets, sources
        self.longest = max(each.longest for each in sets)
        self.mean = float(np.average([each.mean for each in sets], weights=counts))

    def lengths(self, samples: Numbers) -> Numbers:
        """See `Sequences.lengths`."""
        chosen, numbers = self._sources(samples)
        found = np.empty_like(numbers)
        for each in np.unique(chosen):
            found[chosen == each] = self._sets[each].lengths(numbers[chosen == each])
        return found

    def sequence(self, sample: int) -> Any:
        """See `Sequences.sequence`."""
        chosen, numbers = self._sources(np.array([sample]))
        return self._sets[int(chosen[0])].sequence(int(numbers[0]))


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
