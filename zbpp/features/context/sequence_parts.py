"""Batches whose sequences are divided over the processes of a group: what a call takes and gives back.

Every process of the group is given the whole batch, and computes a contiguous part of each sequence:
dimension 1 of the tensors. A call's results are those of the whole sequences, equal on all processes of the
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.devices import sum_over
from zbpp.job.errors import communicating
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.marks import PerMicrobatch, Replicated
from zbpp.runtime.call.results import Result
from zbpp.runtime.call.sequence_lengths import sequence_length


class SequenceParts:
    """The parts of the sequences that the processes of a group compute.

    has_inputs: whether this rank owns stage 0, whose keywords are inputs, too.
    """

    def __init__(self, group: dist.ProcessGroup, *, has_inputs: bool = True) -> None:
        self._group, self._has_inputs = group, has_inputs
        self.index, self.num = dist.get_rank(group), dist.get_world_size(group)

    def of(self, call: Call) -> Call:
        """The call with this process's part of each sequence in its tensors.

        With slices it is the part of each slice; the slice bounds are multiples of the group's size.

        The length is dimension 1 of the first argument, else of the target, else of the first keyword of
        stage 0. Tensors with another dimension 1 stay whole, and `replicate(tensor)` does. Raises ValueError
        for a length that doesn't split, a target without the sequence's dimension, keywords on a rank that is
        not given the length, and `per_microbatch`.
        """
        given = (call.args, call.target, dict(call.kwargs))
        if any(isinstance(each, PerMicrobatch) for each in _leaves(given)):
            raise ValueError(
                "per_microbatch(...) doesn't go with a mesh's dimension context, which divides the "
                "sequences of one batch: give one tensor of the whole batch"
            )
        bounds = call.slice_bounds
        time = self._time(*given, bounds)
        if time is None:
            return call
        if any(
            sequence_length(each) != time for each in tree_leaves(call.target) if isinstance(each, Tensor)
        ):
            raise ValueError(
                f"the sequences have {time} tokens, and the target has no dimension 1 of this size: with a "
                f"mesh's dimension context a loss is a mean over tokens, so give a target for each, [batch, "
                f"time]"
            )
        given = tree_map(self._with_mean_gradient, given, is_leaf=_is_replicated)
        args, target, kwargs = sequence_part(given, time, self.index, self.num, bounds)
        own = tuple([bound // self.num for bound in bounds])
        return call._replace(args=args, target=target, kwargs=kwargs, slice_bounds=own)

    def _with_mean_gradient(self, value: Any) -> Any:
        """A tensor of the caller's graph, which gets the gradient of whole sequences on each process."""
        if isinstance(value, Replicated):
            return Replicated(tree_map(self._with_mean_gradient, value.value))
        is_trained = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return _MeanGradient.apply(value, self) if is_trained else value  # type: ignore[no-untyped-call]  # torch's

    def _time(self, args: Any, target: Any, kwargs: Mapping[str, Any], bounds: Sequence[int]) -> int | None:
        """The length of the sequences; None on a rank that is given none."""
        for some in (args, target, kwargs) if self._has_inputs else (args, target):
            if lengths := [*_lengths(_leaves(some))]:
                return lengths[0]
        if bounds:
            return bounds[-1]
        for name, value in kwargs.items():
            if lengths := [*_lengths(_leaves(value))]:
                raise ValueError(
                    f"this rank is given keywords alone, and {name} has {lengths[0]} entries along dimension "
                    "1, which may be tokens or not: with a mesh's dimension context pass the batch's "
                    "inputs on every rank that passes keywords; they say how long the sequences are"
                )
        return None

    def whole(self, call: Call, result: Result) -> Result:
        """The result of whole sequences, given that of each process's part. Collective.

        Losses and metrics are means over the processes; tensors in outputs are joined along dimension 1.
        """
        losses, metrics = result.losses, result.metrics
        if losses:
            losses = [*self._mean(torch.stack(losses)).unbind()]
        outputs = tree_map(partial(self._joined, call.slice_bounds), result.outputs)
        if metrics:
            means = self._mean(torch.tensor([*metrics.values()], dtype=torch.float64))
            metrics = dict(zip(metrics, means.tolist(), strict=True))
        return result._replace(losses=losses, outputs=outputs, metrics=metrics)

    def _mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.num

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values, in place, over the processes; returns them. Collective."""
        with communicating("summing over the processes that share sequences"):
            sum_over(self._group, values)
        return values

    def _joined(self, slice_bounds: Sequence[int], value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.num)]
        with communicating("joining outputs of the processes that share sequences"):
            dist.all_gather(parts, value.contiguous(), group=self._group)
        bounds = slice_bounds or (0, value.shape[1])
        return torch.cat([part[:, start:end] for start, end in pairwise(bounds) for part in parts], 1)


class _MeanGradient(torch.autograd.Function):
    """x -> x. Its gradient is the mean over the processes, as that of a weight is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: SequenceParts) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.sum(grad.clone(memory_format=torch.contiguous_format)) / ctx.parts.num, None


def sequence_part(given: Any, time: int, index: int, num: int, slice_bounds: Sequence[int] = ()) -> Any:
    """Part `index` of `num` of the sequences: of the tensors whose dimension 1 has `time` entries.

    With slices it is the part of each of them, one behind the other. Raises ValueError for a length that
    doesn't split.
    """
    if time % num:
        raise ValueError(
            f"a sequence of {time} tokens doesn't split over context={num} processes: give "
            f"{time // num * num or num} or {-(-time // num) * num} tokens"
        )
    bounds = slice_bounds if slice_bounds and slice_bounds[-1] == time else (0, time)

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or sequence_length(value) != time:
            return value
        slices = [value[:, start:end].chunk(num, dim=1)[index] for start, end in pairwise(bounds)]
        return torch.cat(slices, 1)

    return tree_map(part, given, is_leaf=_is_replicated)


def _leaves(value: Any) -> Iterable[Any]:
    return tree_leaves(value, is_leaf=lambda each: isinstance(each, Replicated | PerMicrobatch))


def _is_replicated(value: Any) -> bool:
    return isinstance(value, Replicated)


def _lengths(values: Iterable[Any]) -> Iterator[int]:
    lengths = (sequence_length(each) for each in values if isinstance(each, Tensor))
    return (each for each in lengths if each is not None)
