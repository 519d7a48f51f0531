"""Windows of a sequence of tokens, by the number of a sample. Their order is computed, so nothing is stored.

Documents lie one after the other in the sequence, and windows are cut without regard to them (packing). So no
token is padding, and a document may continue in the next window.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zbpp.data.permutation import Numbers, keys_of, permute
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

    def _windows(self, samples: Numbers) -> Numbers:
        epochs, places = np.divmod(samples, self.num_samples)
        if self.seed is None:
            return places
        return permute(places, self.num_samples, keys_of(seed_of(self.seed, "order"), epochs))


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
