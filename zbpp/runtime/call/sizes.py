"""What all ranks know of a call: the rank that has the inputs tells it, once per call.

It is which call that is, in how many rows, under which timetable; the sizes of the microbatches, and which of
them run in which order. A rank that is in another call, or was given other rows, raises AgreementError before
it sends anything: else a batch to evaluate would be trained on.

A size is the dtypes and shapes of the tensors that the first stage gets for a microbatch, and the dtypes that
autocast computes in. Layouts of messages follow from it (layouts.py), and a microbatch without sequences is
left out. What is told goes the way of the x's, one message to each rank before the first action of a call:

    owner of stage 0  -->  owner of stage 1  -->  owner of stage 2  ...

A rank gets it from the rank before its first stage. It goes from host to host, on gloo: so a host waits until
the one before it has begun the call, and for no device, which may still be several calls behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.devices import accelerator_name
from zbpp.job.agreement import AgreementError
from zbpp.job.errors import communicating
from zbpp.runtime.call.fingerprint import NUM_COMPARED, Fingerprint
from zbpp.runtime.host_links import OWN_LIMIT, LinkGroup, Started, group_of
from zbpp.runtime.layout import name_of

_FIRST_TAG, _NUM_TAGS = 2**30, 2**29  # gloo pairs by tags; those of links.py are below
_NUM_NUMBERS = 32  # of the first tensor: the number of bytes, and the first bytes, eight to a number


class Size(NamedTuple):
    """The tensors of a microbatch: `int64[2, 5] float32[2]` is ("int64[,] float32[]", (2, 5, 2)).

    The kind begins with what autocast computes in, where it is on: "cpu:bfloat16 int64[,]".
    """

    kind: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {list(self.numbers)}"


def size_of(values: Any) -> Size:
    """The size of a microbatch, given what its first stage gets."""
    devices = dict.fromkeys(("cpu", accelerator_name() or "cpu"))
    kinds, numbers = list[str](), list[int]()
    for name in devices:
        if torch.is_autocast_enabled(name):
            kinds.append(f"{name}:{name_of(torch.get_autocast_dtype(name))}")
    for each in tree_leaves(values):
        if isinstance(each, Tensor):
            shape = () if each.is_nested else each.shape
            kinds.append(f"{name_of(each.dtype)}[{',' * (len(shape) - 1)}]{'*' * each.requires_grad}")
            numbers += shape
    return Size(" ".join(kinds), tuple(numbers))


def is_empty(values: Any) -> bool:
    """Whether a microbatch has no sequences: nothing but None, and tensors without elements."""
    return all(
        each is None or (isinstance(each, Tensor) and not each.is_nested and not each.numel())
        for each in tree_leaves(values)
    )


class Sizes(NamedTuple):
    """What all ranks know of one call.

    call: its name, see Call.called. timetable: a number that tells timetables apart. of: the size of each
    microbatch, in the caller's order. order: the microbatches that run, in the order in which they go; the
    empty ones are not among them. lengths: the tokens of each microbatch's sequences, in the caller's order,
    where slices cut sequences of several lengths; else (). loss_scale: see Pipeline. given: fingerprints of
    the inputs and of the target, in the first calls, on the ranks with the first and the last stage; else ().
    rows: of the batch; None if this rank was given none.
    """

    call: str
    timetable: int
    of: tuple[Size, ...]
    order: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    loss_scale: float = 1.0
    given: tuple[Fingerprint | None, ...] = ()
    rows: int | None = None

    @property
    def in_order(self) -> list[Size]:
        """The sizes of the microbatches that run, in the order in which they go."""
        return [self.of[each] for each in self.order]

    def of_units(self, num_slices: int) -> list[Size]:
        """For each unit that runs, the size of its microbatch."""
        return [each for each in self.in_order for _ in range(num_slices)]

    @property
    def left_out(self) -> list[int]:
        """The empty microbatches."""
        return [] if len(self.order) == len(self.of) else sorted({*range(len(self.of))} - {*self.order})

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches run, in the caller's order."""
        return self.order == (*range(len(self.of)),)

    def encoded(self) -> bytes:
        """The inverse of `decoded`."""
        different = [*dict.fromkeys(self.of)]
        number_of = {size: number for number, size in enumerate(different)}
        numbers = [number_of[each] for each in self.of] if len(different) > 1 else len(self.of)
        order = None if self.is_plain else self.order
        told = [self.call, self.timetable, different, numbers, order, self.lengths, self.loss_scale]
        return json.dumps([*told, self.given, self.rows]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Sizes:
        """The sizes that `encoded` has written."""
        call, timetable, different, numbers, order, lengths, loss_scale, told, rows = json.loads(data)
        sizes = [Size(kind, tuple(own)) for kind, own in different]
        of = tuple(sizes * numbers if isinstance(numbers, int) else [sizes[each] for each in numbers])
        order = range(len(of)) if order is None else order
        given = tuple([None if each is None else Fingerprint(*each) for each in told])
        return cls(call, timetable, of, tuple(order), tuple(lengths), loss_scale, given, rows)


def ways_of_sizes(rank_of: Sequence[int]) -> list[tuple[int, int]]:
    """(source, receiver) for each rank that gets the sizes from another one. rank_of: see Timetable."""
    firsts = [(rank_of.index(rank), rank) for rank in sorted({*rank_of})]
    return [(rank_of[stage - 1], rank) for stage, rank in firsts if stage]


def refuse_another_call(mine: str, rank: int, other: str, other_rank: int) -> None:
    """Raise AgreementError if this rank and another one are in different calls."""
    if other != mine:
        raise AgreementError(
            f"rank {other_rank} is in {other}() while rank {rank} is in {mine}(): every rank must make the "
            "same calls of a pipeline in the same order"
        )


def refuse_other_rows(call: str, mine: int | None, rank: int, other: int | None, other_rank: int) -> None:
    """Raise AgreementError if two ranks were given batches of different sizes; None: it was given none."""
    if None not in (mine, other) and mine != other:
        raise AgreementError(
            f"{call}() got {mine} rows on rank {rank} and {other} on rank {other_rank}: give inputs and "
            "targets of one batch"
        )


class Announcer:
    """Takes the sizes of each call from the rank before this one, and passes them on.

    rank_of: the rank of each stage. links: {(sender, receiver): group}, on gloo, of `ways_of_sizes` at least.
    source: the rank before this one; None for the rank that has the inputs. limit: of a wait, see
    `OWN_LIMIT`. in_job: the number in the job of each rank, for AgreementErrors; (): its own number.
    """

    def __init__(
        self,
        rank_of: Sequence[int],
        index: int,
        links: Mapping[tuple[int, int], LinkGroup],
        in_job: Sequence[int] = (),
    ) -> None:
        ways = ways_of_sizes(rank_of)
        self.source = next((source for source, rank in ways if rank == index), None)
        self._groups = {rank: group_of(links[index, rank]) for source, rank in ways if source == index}
        self._inbound = None if self.source is None else group_of(links[self.source, index])
        self._first, self._index, self.limit = rank_of[0], index, OWN_LIMIT
        self._in_job = in_job or range(max(rank_of) + 1)
        self._pending: list[tuple[int, Tensor, Started]] = []  # (receiver, what is sent, the send)
        self._num_calls = 0

    @property
    def compares(self) -> bool:
        """Whether the next call tells fingerprints."""
        return self._num_calls < NUM_COMPARED

    def told(self, mine: Sizes) -> Sizes:
        """The sizes of a call, as the rank that has the inputs tells them. Collective.

        mine: of this rank. The order is () if it was given none; the sizes are () if it has no inputs. Raises
        AgreementError if the rank with the inputs is in another call, was given other rows, follows another
        timetable, has another loss scale, or was given another order or, in the first calls, another batch.
        """
        data = mine.encoded() if self._groups and self._inbound is None else b""
        tag = _FIRST_TAG + self._num_calls % _NUM_TAGS * 2
        self._num_calls += 1
        if self._inbound is not None:
            with communicating(f"rank {self._index}, Recv sizes from {self.source}"):
                data = self._received(self._inbound, tag)
        for peer, group in self._groups.items():
            with self._sending_to(peer):
                self._send(group, peer, data, tag)
        if self._inbound is None:
            return mine
        sizes = Sizes.decoded(data)
        self._check_agree(mine, sizes)
        return sizes

    def _check_agree(self, mine: Sizes, sizes: Sizes) -> None:
        rank, first = self._in_job[self._index], self._in_job[self._first]
        refuse_another_call(mine.call, rank, sizes.call, first)
        refuse_other_rows(mine.call, mine.rows, rank, sizes.rows, first)
        if sizes.timetable != mine.timetable:
            raise AgreementError(
                f"rank {first} follows another timetable than rank {rank}: call use_timetable on all "
                "ranks, with the same timetable"
            )
        if sizes.loss_scale != mine.loss_scale:
            raise AgreementError(
                f"pipeline.loss_scale is {sizes.loss_scale:g} on rank {first} and {mine.loss_scale:g} on "
                f"rank {rank}: set the same on all ranks. A GradScaler sees one rank's gradients; "
                "zbpp.LossScale, with the norm of zbpp.clip_grad_norm_, is the same on all"
            )
        given = [each for each in mine.order if each in sizes.order]
        if given and (*given,) != sizes.order:
            raise AgreementError(
                f"per_microbatch has the order {given} on rank {rank}, and {list(sizes.order)} on rank "
                f"{first}: give it to the first stage's arguments alone, or the same everywhere"
            )

        for name, own, theirs in zip(("inputs", "targets"), mine.given, sizes.given, strict=False):
            if own is not None and theirs is not None and own.is_of_other_values(theirs):
                raise AgreementError(
                    f"rank {rank} was given other {name} than rank {first}: the ranks of one pipeline share "
                    "a batch. Give all of them the same rows, without a DistributedSampler or accelerate's "
                    "prepare, which give each process its own (of replicas, pipeline.place.data_part says "
                    "which rows a process takes); or leave out what a rank does not read"
                )

    def end(self) -> None:
        """Wait until the sizes that this rank has sent are out: called when a call ends.

        Raises CommunicationError if a rank that they go to is gone, or does not come.
        """
        for peer, _, work in self._pending:
            with self._sending_to(peer):
                work.wait(self.limit)
        self._pending.clear()

    def close(self) -> None:
        """Give up the messages under way, and the links."""
        self._pending.clear()
        self._groups.clear()
        self._inbound = None

    def _sending_to(self, peer: int) -> AbstractContextManager[None]:
        return communicating(f"rank {self._index}, Send sizes to {peer}")

    def _send(self, group: LinkGroup, peer: int, data: bytes, tag: int) -> None:
        in_group = int(peer > self._index)  # of two ranks: 0 is the lower one
        words = torch.frombuffer(bytearray(data + bytes(-len(data) % 8)), dtype=torch.int64)
        first = torch.zeros(_NUM_NUMBERS, dtype=torch.int64, device="cpu")
        first[0] = len(data)
        begin, rest = words[: _NUM_NUMBERS - 1], words[_NUM_NUMBERS - 1 :]
        first[1 : 1 + len(begin)] = begin
        for number, part in enumerate((first, rest)):
            if len(part):
                self._pending.append((peer, part, group.send([part], in_group, tag + number)))

    def _received(self, group: LinkGroup, tag: int) -> bytes:
        peer = int((self.source or 0) > self._index)
        first = self._receive(group, peer, tag, _NUM_NUMBERS)
        size = int(first[0])
        words, num_left = first[1:], -(-size // 8) - (_NUM_NUMBERS - 1)
        if num_left > 0:
            words = torch.cat([words, self._receive(group, peer, tag + 1, num_left)])
        return words.numpy().tobytes()[:size]

    def _receive(self, group: LinkGroup, peer: int, tag: int, number: int) -> Tensor:
        buffer = torch.empty(number, dtype=torch.int64, device="cpu")
        group.recv([buffer], peer, tag).wait(self.limit)
        return buffer
