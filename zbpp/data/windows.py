"""Windows of a sequence of tokens, by the number of a sample. Their order is computed, so nothing is stored.

Documents lie one after the other in the sequence, and windows are cut without regard to them (packing). So no
token is padding, and a document may continue in the next window.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.sequences import Known, Sequences
from zbpp.data.source import check_at_least_one
from zbpp.seeding import seed_of

Tokens = npt.NDArray[np.integer]
"""A sequence of tokens, any integer type."""


class Rows(NamedTuple):
    """Samples. tokens: [rows, sequence_length + 1]; the last token of a row is a target only.

    positions: [rows, sequence_length], each token's place in the part of its document that is in the window;
    None: documents are not told apart.
    """

    tokens: Numbers
    positions: Numbers | None


class Samples(Protocol):
    """Samples by number, without end; an epoch has `num_samples`."""

    @property
    def num_samples(self) -> int: ...

    def rows(self, samples: Numbers) -> Rows: ...

    def sequences(self) -> Sequences: ...


class Windows:
    """The windows of a sequence. The last token of a window is the first one of the next.

    Each epoch takes every window once, in an order drawn from (seed, epoch); with `seed` None in the order of
    the text, for evaluation. Tokens at the end that don't fill a window are not used. ends: where each
    document ends, ascending; None: documents are not told apart. name: what error messages call the tokens.
    Raises ValueError for fewer tokens than a window has.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        seed: int | None,
        ends: Numbers | None = None,
        name: str = "the corpus",
    ) -> None:
        check_at_least_one(sequence_length=sequence_length)
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"sequence_length={sequence_length} needs {sequence_length + 1} tokens (each target is the "
                f"next one), but {name} has {len(tokens)}: write sequence_length={max(1, len(tokens) - 1)} "
                "or less, or give more text"
            )
        self.sequence_length, self.seed = sequence_length, seed
        self._tokens, self._ends = tokens, ends

    @property
    def num_samples(self) -> int:
        """Windows per epoch."""
        return (len(self._tokens) - 1) // self.sequence_length

    def rows(self, samples: Numbers) -> Rows:
        """The windows of these samples. Numbers count from 0 through all epochs."""
        starts = self._windows(samples) * self.sequence_length
        # Windows are read one by one: each is one piece of the file.
        tokens = np.empty((len(starts), self.sequence_length + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            tokens[row] = self._tokens[start : start + self.sequence_length + 1]
        if self._ends is None:
            return Rows(tokens, None)
        return Rows(tokens, positions_in_documents(starts, self.sequence_length, self._ends))

    def sequences(self) -> Sequences:
        """The documents, in pieces of at most sequence_length tokens; the windows if there are no `ends`."""
        if self._ends is None:
            starts = np.arange(self.num_samples) * self.sequence_length
            lengths = np.full(self.num_samples, self.sequence_length)
        else:
            starts, lengths = pieces_of_documents(np.asarray(self._ends), self.sequence_length)

        def places(samples: Numbers) -> Numbers:
            return self._in_order(samples, len(lengths))

        def read(sample: int) -> tuple[Tensor, Tensor]:
            place = int(places(np.array([sample]))[0])
            start, length = int(starts[place]), int(lengths[place])
            tokens = torch.from_numpy(self._tokens[start : start + length + 1].astype(np.int64))
            return tokens[:-1], tokens[1:]

        return Known(lengths, places, read)

    def _windows(self, samples: Numbers) -> Numbers:
        return self._in_order(samples, self.num_samples)

    def _in_order(self, samples: Numbers, count: int) -> Numbers:
        """Which of `count` places each sample has, in the order of its epoch."""
        epochs, places = np.divmod(samples, count)
        if self.seed is None:
            return places
        return permute(places, count, keys_of(seed_of(self.seed, "order"), epochs))


def pieces_of_documents(ends: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """(where each piece begins, how many of its tokens are inputs), `most` or fewer.

    The last token of a piece is a target only, and the first input of the next piece of the same document.
    ends: where the documents end, ascending. Raises ValueError if no document has two tokens.
    """
    begins = np.concatenate([[0], ends[:-1]])
    inputs = np.maximum(0, ends - begins - 1)
    counts = -(-inputs // most)
    if not counts.sum():
        raise ValueError("no document has two tokens: there is nothing to predict")
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + within * most
    return starts, np.minimum(most, np.repeat(begins + inputs, counts) - starts)


def positions_in_documents(starts: Numbers, length: int, ends: Numbers) -> Numbers:
    """Positions of tokens [windows, length]: from 0 at each window's start, and anew where a document begins.

    starts: where the windows begin. ends: where the documents of the whole sequence end, ascending.
    """
    positions = np.empty((len(starts), length), dtype=np.int64)
    positions[:] = np.arange(length)
    firsts = np.searchsorted(ends, starts, side="right")
    lasts = np.searchsorted(ends, starts + length, side="left")
    for row, (start, first, last) in enumerate(zip(starts, firsts, lasts, strict=True)):
        inside = (
            np.asarray(ends[first:last]) - start
        )  # where documents begin in this window, after its first token
        positions[row] -= np.repeat([0, *inside], np.diff([0, *inside, length]))
    return positions
