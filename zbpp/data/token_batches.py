"""Batches of about so many tokens, and how a batch becomes microbatches.

A batch has the next sequences, in the order of the data, as long as they have `tokens_per_batch` tokens in
all or fewer. So it depends on nothing but the sequences and that number: it is the same for any number of
microbatches, ranks and replicas. Where a batch begins depends on the batches before it; a checkpoint holds
that number, or it is found by counting from batch 0 on.

All replicas together cut a batch into microbatches. They are as equal as they can be:

    packed    the longest sequence goes first, each to the microbatch with the fewest tokens so far
    padded    neighbours in length share a microbatch, so that little is padding; the largest microbatch has
              as few tokens, padding included, as so many microbatches allow
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zbpp.data.permutation import Numbers
from zbpp.data.sequences import Sequences, can_be_packed, check_sequence, nothing, packed, padded
from zbpp.data.source import with_target
from zbpp.packing import longest_first
from zbpp.stage_api import TargetNames

Group = tuple[int, ...]
"""The numbers of the sequences of a microbatch; (): an empty one."""


class MicrobatchShape(NamedTuple):
    """rows: of a microbatch. length: of a row in tokens, padding included. filled: tokens but for padding."""

    rows: int
    length: int
    filled: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def squares(self) -> int:
        """What attention grows with: the sum of the squares of the rows' lengths."""
        return self.rows * self.length**2


class TokenBatches:
    """Batches of sequences with `tokens_per_batch` tokens or a few less, as microbatches.

    is_packed: whether a microbatch is one row of several documents, which the model tells apart. names: see
    `with_target`, which is applied to each sequence before sequences share a row.
    Raises ValueError for fewer tokens than the longest sequence has, and for sequences of a wrong form.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        tokens_per_batch: int,
        is_packed: bool,
        names: TargetNames = MappingProxyType({}),
    ) -> None:
        if tokens_per_batch < sequences.longest:
            raise ValueError(
                f"tokens_per_batch={tokens_per_batch}, and the longest sequence has {sequences.longest} "
                f"tokens: write tokens_per_batch={sequences.longest} or more, or a smaller "
                "model.sequence_length, which cuts sequences"
            )
        self.sequences, self.tokens_per_batch, self._names = sequences, tokens_per_batch, names
        first = with_target(sequences.sequence(0), names)
        check_sequence(first)
        self.is_packed = is_packed and can_be_packed(first)
        self._nothing = nothing(first)
        self._firsts = {0: 0}  # of the latest batches: the number of their first sequence

    @property
    def mean_tokens(self) -> float:
        """The tokens of a batch: the mean over the first few batches."""
        first, found = 0, []
        for _ in range(_FEW):
            lengths = self.members(first)[1]
            found.append(int(lengths.sum()))
            first += len(lengths)
        return sum(found) / _FEW

    def members(self, first: int) -> tuple[Numbers, Numbers]:
        """(the sequences of the batch that begins with sequence `first`, their lengths)."""
        count = 2 * int(self.tokens_per_batch / self.sequences.mean) + 16
        while True:
            samples = np.arange(first, first + count)
            lengths = self.sequences.lengths(samples)
            inside = int(np.searchsorted(np.cumsum(lengths), self.tokens_per_batch, side="right"))
            if inside < count:
                return samples[:inside], lengths[:inside]
            count *= 2

    def first_of(self, step: int) -> int:
        """The number of the first sequence of batch `step`, from 0."""
        known = max((each for each in self._firsts if each <= step), default=0)
        first = self._firsts.get(known, 0)
        for number in range(known, step):
            first += len(self.members(first)[0])
            self.note(number + 1, first)
        return first

    def note(self, step: int, first: int) -> None:
        """Remember with which sequence a batch begins; the last few are kept."""
        self._firsts[step] = first
        for each in sorted(self._firsts)[:-_KEPT]:
            del self._firsts[each]

    def cut(self, first: int, num_microbatches: int) -> list[tuple[Group, MicrobatchShape]]:
        """The microbatches of the batch that begins with sequence `first`, the largest first."""
        samples, lengths = self.members(first)
        divide = longest_first if self.is_packed else _padded
        groups = [np.array(each, dtype=np.int64) for each in divide(lengths, num_microbatches)]
        found = [(tuple(samples[each].tolist()), self._shape(lengths[each])) for each in groups]
        return sorted(found, key=lambda each: (-each[1].tokens, each[0]))

    def _shape(self, lengths: Numbers) -> MicrobatchShape:
        if not len(lengths):
            return MicrobatchShape(1, 1, 0)
        filled = int(lengths.sum())
        rows, length = (1, filled) if self.is_packed else (len(lengths), int(lengths.max()))
        return MicrobatchShape(rows, length, filled)

    def microbatch(self, group: Group) -> Any:
        """The inputs and labels of a microbatch, in a form that zbpp/data/source.py can take apart.

        An empty microbatch is one token without a label.
        """
        rows = [with_target(self.sequences.sequence(sample), self._names) for sample in group]
        rows = rows or [self._nothing]
        return packed(rows) if self.is_packed else padded(rows)

    def batch(self, step: int) -> Any:
        """Batch `step` as one microbatch, for one process."""
        return self.microbatch(self.cut(self.first_of(step), 1)[0][0])

    def state_dict(self) -> dict[str, int]:
        """Where the oldest batch that is remembered begins: no later one than the present batch."""
        step = min(self._firsts)
        return {"step": step, "first": self._firsts[step], "tokens_per_batch": self.tokens_per_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. With other batches its number would be wrong: then batches are counted."""
        if state and int(state["tokens_per_batch"]) == self.tokens_per_batch:
            self._firsts = {int(state["step"]): int(state["first"])}


_FEW = 20
_KEPT = 4  # the batch of a step, that of the next one, and those whose outcome is not known yet


def replica_of(found: Sequence[Any], part: int, num_parts: int) -> list[Any]:
    """One replica's share of the microbatches, which are sorted by size: dealt there and back again."""
    rounds = [found[start : start + num_parts] for start in range(0, len(found), num_parts)]
    return [each[part if number % 2 == 0 else num_parts - 1 - part] for number, each in enumerate(rounds)]


def _padded(lengths: Numbers, count: int) -> list[Numbers]:
    """Indices of `count` groups of neighbours in length, some of which may be empty."""
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].tolist()
    least, most = falling[0], falling[0] * len(falling)
    while least < most:  # the smallest bound with which the groups suffice
        middle = (least + most) // 2
        if len(_within(falling, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    starts = _within(falling, least)
    bounds = [*starts, len(falling)]
    groups = [order[begin:end] for begin, end in pairwise(bounds)]
    return _halved(groups, lengths, count) + [np.empty(0, dtype=np.int64)] * max(0, count - len(lengths))


def _within(falling: Sequence[int], bound: int) -> list[int]:
    """Where the groups begin if none has more than `bound` tokens, its padding included."""
    starts, start = [0], 0
    for index in range(1, len(falling)):
        if (index - start + 1) * falling[start] > bound:
            starts.append(index)
            start = index
    return starts


def _halved(groups: list[Numbers], lengths: Numbers, count: int) -> list[Numbers]:
    """As many groups as sequences allow, up to `count`: the largest one is cut in two, again and again."""

    def entry(group: Numbers) -> tuple[int, int, Numbers]:
        is_whole = len(group) < 2
        return (0 if is_whole else -len(group) * int(lengths[group[0]]), int(group[0]), group)

    heap = [entry(each) for each in groups]
    heapq.heapify(heap)
    while len(heap) < min(count, len(lengths)):
        _, _, largest = heapq.heappop(heap)
        middle = (len(largest) + 1) // 2
        for half in (largest[:middle], largest[middle:]):
            heapq.heappush(heap, entry(half))
    return [group for *_, group in sorted(heap, key=lambda each: each[:2])]


def longest_microbatch(
    batches: TokenBatches, num_microbatches: int, num_batches: int
) -> tuple[Group, MicrobatchShape]:
    """The microbatch with the most tokens among those of the first batches."""
    first, found = 0, batches.cut(0, num_microbatches)[0]
    for _ in range(num_batches):
        cut = batches.cut(first, num_microbatches)
        found = max(found, cut[0], key=lambda each: (each[1].tokens, each[1].squares))
        first += sum(len(group) for group, _ in cut)
    return found
