"""Reductions of a step's gradients over the processes that hold copies of the same parameters.

A stage's gradients are complete on this rank after its last W. There the program has the instruction Reduce:
the executor starts the stage's Reducer, and goes on with other stages. The step ends when all reductions have
ended.

    ... 2W6  2W7  Reduce 2  1W6  1W7  Reduce 1 | finish 1, finish 2, tied parameters
                  [---- stage 2 on its way ----]
                                     [- stage 1 -]

The order of all sums is fixed: it depends on the order of a stage's parameters and on the size of the group,
and on nothing that happens while the program runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import grad_dtype, total_of
from zbpp.job.errors import communicating
from zbpp.runtime.processes.dtensors import like, local_of
from zbpp.streams import streams_of

Ended = Callable[[], None]

_BUCKET_BYTES = 25 * 2**20  # small gradients travel together up to this size
_ALONE_BYTES = 4 * 2**20  # a gradient from this size on travels by itself, without a copy


class Reducer(Protocol):
    """Makes the gradients of one stage the same on all copies of the stage."""

    def begin(self) -> None:
        """Called before the first F of a step."""

    def start(self, ended: Ended | None) -> None:
        """Start the reduction; called when the stage's gradients are complete on this rank.

        Waits for no other process where the backend allows that.
        ended: a function to call once the reduction has ended, from any thread; not called if there is
        nothing to reduce. On CUDA the current stream must then be one that runs after the reduction, since
        the function records an event on it.
        """

    def finish(self) -> None:
        """Wait, and put the reduced gradients where the optimizer finds them. Raises CommunicationError."""

    def abandon(self) -> None:
        """Called when the step fails: drop all that is left of it."""


class AllReduce:
    """Sums the gradients of some parameters over a group, in buckets, and divides the sums by a number.

    averages: whether the group's backend divides, see `can_average`. The divisor is then the group's size.

    A parameter's gradient is its `main_grad` or else its `.grad`; of a DTensor, this process's part. If a
    parameter has a gradient on some processes of the group only, the others add zeros and get the result,
    too. parameters: in the same order on all processes. group: None: no other process has copies, and
    gradients are divided only. what: for error messages.

    The gradient of earlier steps is in each copy. Where there are fewer copies than the divisor, it is
    multiplied at the begin of a step, so that it counts once.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        divisor: int,
        what: str,
        averages: bool = False,
    ) -> None:
        self._all = list(parameters)
        self._parameters: list[nn.Parameter] = []  # those that are trained in this step
        self._group, self._what = group, what
        self._divisor = 1 if averages else divisor
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._fewer = divisor // (1 if group is None else dist.get_world_size(group))
        self._gradients: list[Tensor] = []  # one per parameter; zeros where it has no gradient here
        self._has_gradient: list[bool] = []
        self._flags = Flags()
        self._counts: Tensor | None = None  # per parameter, on how many processes it has a gradient
        self._buckets: list[_Bucket] = []
        self._works: list[dist.Work] = []

    @property
    def has_trained(self) -> bool:
        """Whether a parameter is trained."""
        return any(each.requires_grad for each in self._all)

    def begin(self) -> None:
        """See Reducer."""
        for parameter in self._all if self._fewer > 1 else ():
            if (total := total_of(parameter)) is not None and parameter.requires_grad:
                with torch.no_grad():
                    local_of(total).mul_(self._fewer)

    def start(self, ended: Ended | None = None) -> None:
        """Start all all-reduces; see Reducer.start."""
        self._parameters = [each for each in self._all if each.requires_grad]
        if not self._parameters:
            return
        totals = [total_of(parameter) for parameter in self._parameters]
        self._has_gradient = [total is not None for total in totals]
        self._gradients = [
            _zeros(parameter) if total is None else local_of(total)
            for parameter, total in zip(self._parameters, totals, strict=True)
        ]
        self._counts = self._flags.on(self._gradients[0].device, self._has_gradient)
        self._buckets = [_Bucket(together) for together in _in_buckets(self._gradients)]
        if self._group is None:
            return None if ended is None else ended()
        with communicating(self._what):
            summed = [(bucket.tensor, self._operation) for bucket in self._buckets]
            for tensor, operation in ((self._counts, dist.ReduceOp.SUM), *summed):
                work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
                assert work is not None  # it is None on processes outside the group only
                self._works.append(work)
        if ended is not None:
            self._works[-1].get_future().then(lambda _: ended())

    def finish(self) -> None:
        """Wait, divide, and put the gradients back where they came from."""
        with communicating(self._what):
            for work in self._works:
                work.wait()
        for bucket in self._buckets:
            bucket.give_back(self._divisor)
        if not all(self._has_gradient) and self._counts is not None:
            self._adopt(self._counts.tolist())
        self.abandon()

    def abandon(self) -> None:
        """Drop the buckets and messages that a step has left."""
        self._works, self._buckets, self._gradients = [], [], []
        self._has_gradient, self._counts = [], None

    def _adopt(self, counts: Sequence[int]) -> None:
        """Store the result for each parameter that has a gradient on other processes, and none here."""
        rows = zip(self._parameters, self._gradients, self._has_gradient, counts, strict=True)
        for parameter, gradient, is_own, count in rows:
            if count and not is_own:
                parameter.grad = like(parameter, gradient)


def can_average(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend has ReduceOp.AVG, tried with one number. Collective over the group."""
    try:
        dist.all_reduce(torch.ones(1, device=device), dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):  # before anything is sent
        return False
    return True


class AllReduces:
    """Several AllReduces as one Reducer: each has a group of its own."""

    def __init__(self, reducers: Sequence[AllReduce]) -> None:
        self._reducers = reducers

    def begin(self) -> None:
        """See Reducer."""
        for each in self._reducers:
            each.begin()

    def start(self, ended: Ended | None = None) -> None:
        """See Reducer. `ended` is called once the last of them has ended."""
        trained = [each for each in self._reducers if each.has_trained]
        others = iter(trained[1:])  # next() of an iterator is one step for all threads

        def one_ended() -> None:
            if ended is not None and next(others, None) is None:
                ended()

        for each in trained:
            each.start(one_ended)

    def finish(self) -> None:
        """See Reducer."""
        for each in self._reducers:
            each.finish()

    def abandon(self) -> None:
        """See Reducer."""
        for each in self._reducers:
            each.abandon()


class Flags:
    """Booleans as a tensor on a device, to be summed over processes.

    They are mostly the same in every step, so the last tensor is kept. The host waits for no copy.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.device, list[bool], Tensor] | None = None

    def on(self, device: torch.device, flags: Sequence[bool]) -> Tensor:
        """int32 on the device, 1 for True; the caller may change it."""
        if self._last is None or self._last[:2] != (device, [*flags]):
            row, streams = torch.tensor(flags, dtype=torch.int32), streams_of(device)
            self._last = device, [*flags], row.to(device) if streams is None else streams.moved(row)
        return self._last[2].clone()


class _Bucket:
    """Gradients that are reduced as one tensor: a single gradient in its own memory, several as one copy."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self._gradients = gradients
        self._is_copy = len(gradients) > 1 or not gradients[0].is_contiguous()
        self.tensor = (
            torch.cat([each.detach().reshape(-1) for each in gradients]) if self._is_copy else gradients[0]
        )

    def give_back(self, divisor: int) -> None:
        """Divide the reduced tensor, and write it into the gradients."""
        if divisor > 1:
            self.tensor.div_(divisor)
        if self._is_copy:
            parts = self.tensor.split([each.numel() for each in self._gradients])
            for gradient, part in zip(self._gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def _in_buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients of each bucket: one large gradient, or small ones of one dtype in their order."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for gradient in gradients:
        if gradient.nbytes >= _ALONE_BYTES:
            yield [gradient]
            continue
        dtype = gradient.dtype
        if sizes[dtype] + gradient.nbytes > _BUCKET_BYTES:
            yield filling.pop(dtype)
            sizes[dtype] = 0
        filling.setdefault(dtype, []).append(gradient)
        sizes[dtype] += gradient.nbytes
    yield from filling.values()


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(local_of(parameter), dtype=grad_dtype(parameter))
