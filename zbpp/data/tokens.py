"""Batches of prepared tokens, from one set or from several in fixed shares.

The number of a sample decides which set of a mixture it comes from. Samples come in blocks; each block has
exactly its share of each set, in an order drawn from (seed, block):

    weights 3 and 1, blocks of 4:    a b a a | a a a b | b a a a | ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.prepared import BYTES, HELD_OUT, TRAIN, Prepared, digest_of, open_prepared
from zbpp.data.source import Data
from zbpp.data.text import Batches, check_fills_a_batch
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
    _check_vocabulary(sets, vocab_size, tokenizer)

    def batches(part: str, seed: int | None) -> Batches:
        windows = [
            _windows(
                each,
                part,
                sequence_length,
                seed_of(seed, "set", number) if seed is not None else None,
                across_documents=across_documents,
            )
            for number, each in enumerate(sets)
        ]
        samples = windows[0] if len(sets) == 1 else Mixture(windows, weights, seed=seed)
        return Batches(samples, batch_size)

    train = batches(TRAIN, seed)
    check_fills_a_batch(train, " and ".join(map(str, paths)))
    has_evaluation = all(each.header.parts[HELD_OUT].num_tokens for each in sets)
    evaluation = batches(HELD_OUT, None) if has_evaluation else None
    entropies = [each.header.unigram_entropy for each in sets]
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_batches if evaluation else 0,
        items_per_batch=batch_size * sequence_length,
        fingerprint=_fingerprint(sets, weights),
        unigram_entropy=entropies[0] if len(sets) == 1 else None,
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


def _windows(
    prepared: Prepared, part: str, sequence_length: int, seed: int | None, *, across_documents: bool
) -> Samples:
    tokens, ends = prepared.part(part)
    return Windows(
        tokens,
        sequence_length=sequence_length,
        seed=seed,
        ends=None if across_documents else ends,
        name=f"{prepared.folder} ({part})",
    )


def _check_vocabulary(sets: Sequence[Prepared], vocab_size: int, tokenizer: str | None) -> None:
    """Raises ValueError if the sets' tokenizers differ, or from the given one, or vocab_size is too small."""
    first = sets[0]
    for other in sets[1:]:
        if other.header.tokenizer != first.header.tokenizer:
            raise ValueError(
                f"{first.folder} and {other.folder} were made by different tokenizers "
                f"({first.header.tokenizer}, {other.header.tokenizer}), so a number means another token in "
                "each: prepare one of them again"
            )
    if tokenizer is not None:
        given = fingerprint_of(Path(tokenizer).expanduser())
        if given != first.header.tokenizer:
            found = first.header.tokenizer
            holds = "bytes" if found == BYTES else f"tokens of another one ({found})"
            raise ValueError(
                f"{first.folder} was not made by data.tokenizer={tokenizer} ({given}), but holds {holds}: "
                "name the one that made it, or prepare the tokens again"
            )
    needed = max(each.header.vocab_size for each in sets)
    if needed > vocab_size:
        raise ValueError(
            f"the data has {needed} tokens, the model's vocab_size={vocab_size} is smaller: write "
            f"model.vocab_size={needed}"
        )


def _fingerprint(sets: Sequence[Prepared], weights: Sequence[float]) -> str:
    return digest_of(repr([(each.header.fingerprint, *weights) for each in sets]).encode())


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
