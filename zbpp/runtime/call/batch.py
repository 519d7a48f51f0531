"""Batch: the arguments of one call on this rank, cut into units, in the order in which the units go.

A unit is a microbatch, or a slice of one where the timetable has slices. microbatch.py says how a value is
cut. The way of x from the user's call to F of stage 0, and the way of the losses back:

    Pipeline.step(x, target=y)     Call: x and y, whole
      Rank.run
        Feature.take               Call: the part of x and y that this process computes
        Batch(call)                x[0:2], x[2:4], ...     cut, once
        Batch.sizes                int64[,] [2, 9], ...    told to all ranks, with the order (sizes.py)
        Batch.arrange, weigh       the order that all ranks are told; the weights of the losses (weights.py)
        Batch.feed(0)              Feed ──► StageWorker.begin
        Executor.run               0F3 ──► StageWorker.forward(3, ())
                                             module(*feed.args[3], **feed.kwargs[3])
        Batch.backward             the gradient of x goes on into the caller's graph
        Batch.result               Result: losses in the caller's order, outputs, metrics
        Feature.give               Result: those of all processes that share x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from zbpp.runtime.call.feed import Call, Feed, LossGradients, Observe
from zbpp.runtime.call.fingerprint import Fingerprint, fingerprint_of
from zbpp.runtime.call.marks import PerMicrobatch
from zbpp.runtime.call.microbatch import Cutter, is_cut_whole
from zbpp.runtime.call.results import JoinedSlices, NamedLosses, Outputs, Result
from zbpp.runtime.call.sizes import Size, Sizes, is_empty, size_of
from zbpp.runtime.call.weights import Count, Weights, weights_of
from zbpp.runtime.stage import StageLosses
from zbpp.schedule.slice_bounds import scaled_bounds


class Batch:
    """The arguments of one call on this rank.

    seeds: {stage of this rank: the seed of its unit 0}. last_stage: of the pipeline. count: how many targets
    a unit has, if the loss says so; see weights.py.

    told: what all ranks know of the call, after `arrange`. rows: of the batch; None if this rank was given
    none. has_graph: whether the inputs have a graph of the caller's, which gets gradients at the end of the
    call.

    Raises ValueError for arguments that don't split into microbatches or slices, and if this rank owns stage
    0 but got no inputs.
    """

    def __init__(
        self,
        call: Call,
        num_microbatches: int,
        seeds: Mapping[int, int],
        last_stage: int,
        count: Count | None = None,
    ) -> None:
        self.call, self.num_microbatches = call, num_microbatches
        self._seeds, self._last_stage, self._count = seeds, last_stage, count
        self._units: Sequence[int] | None = None  # that run, in order; None: all, in the caller's order
        self._weights: Weights | None = None
        self._outputs = Outputs(is_kept=call.returns_outputs, metrics=call.metrics)
        self._cut()

    def _cut(self) -> None:
        call, has_inputs = self.call, 0 in self._seeds
        self._cutter = cutter = Cutter(self.num_microbatches, call.slice_bounds)
        if has_inputs and not (call.args or call.kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs")
        self._find_lengths()
        self._args = cutter.cut_arguments(call.args) if has_inputs else []
        self._kwargs = cutter.cut_keywords(call.kwargs)
        self._targets: list[Any] | None = None
        if self._has_target:
            self._targets = cutter.cut("target", call.target)
        cutter.refuse_rows_of_lists((call.args, call.target))
        self.rows, self.has_graph = cutter.rows, cutter.has_graph

    @property
    def _has_target(self) -> bool:
        return self.call.target is not None and self._last_stage in self._seeds

    def _find_lengths(self) -> None:
        """Find how long the sequences are: by the inputs and the target."""
        call, sequences, has_inputs = self.call, self._cutter.sequences, 0 in self._seeds
        if has_inputs:
            arguments = {f"argument {i}": value for i, value in enumerate(call.args)}
            sequences.find(arguments | dict(call.kwargs))
        if self._has_target:
            sequences.find({"target": call.target})

    def begin_again(self, loss_scale: float | None) -> None:
        """Cut the arguments again, for a step that runs again: F's may have changed their units in place.

        Sizes, order and weights stay. loss_scale: a new one; None: the call's.
        """
        if loss_scale is not None:
            self.call = self.call._replace(loss_scale=loss_scale)
        self._cut()
        self._take_lengths()

    # ---- Sizes and order

    def sizes(self, timetable: int) -> Sizes:
        """The sizes of the microbatches, and the order in which they go, as far as this rank was given them.

        Only the owner of stage 0 knows the sizes. timetable: see Sizes. Raises ValueError if all microbatches
        are empty.
        """
        call, number, cutter = self.call, self.num_microbatches, self._cutter
        order = cutter.order if call.kind == "step" else None
        mine = Sizes(
            call.called, timetable, (), order or (), loss_scale=float(call.loss_scale), rows=self.rows
        )
        if 0 not in self._seeds:
            return mine
        order = order or (*range(number),)
        if cutter.is_even:
            return mine._replace(of=(self._size(0),) * number, order=order)
        sizes = tuple(map(self._size, range(number)))
        order = tuple([each for each in order if not self._is_left_out(each)])
        if not order:
            raise ValueError(f"all {number} microbatches are empty: write None for some of them only")
        return mine._replace(of=sizes, order=order, lengths=cutter.sequences.unequal)

    def fingerprints(self) -> tuple[Fingerprint | None, ...]:
        """Of the inputs and of the target, on the ranks with the first and the last stage; else ()."""
        if not self._seeds.keys() & {0, self._last_stage}:
            return ()
        return fingerprint_of(self.call.args), fingerprint_of(self.call.target)

    def _size(self, microbatch: int) -> Size:
        num = self._cutter.num_slices
        units = slice(microbatch * num, (microbatch + 1) * num)
        return size_of((self._args[units], self._kwargs[units]))

    def _is_left_out(self, microbatch: int) -> bool:
        """Whether a microbatch has no sequences. Values that all microbatches share are not looked at."""
        given = tree_leaves(self.call.args or self.call.kwargs, is_leaf=is_cut_whole)
        if any(isinstance(each, Tensor | BlockMask) for each in given):
            return False  # it was split: each microbatch has rows
        own = [each.values[microbatch] for each in given if isinstance(each, PerMicrobatch)]
        return bool(own) and is_empty(own)

    def arrange(self, sizes: Sizes) -> None:
        """Take the order that all ranks were told.

        Raises ValueError if an empty microbatch has a target, or another one has none, and for sequences of
        other lengths than those of the first stage's rank.
        """
        self.told, num = sizes, self._cutter.num_slices
        self._cutter.sequences.check(sizes.lengths, sizes.left_out)
        self._take_lengths()
        if self._targets is not None:
            self._check_targets(self._targets[::num])
        if not sizes.is_plain:
            self._units = [each * num + part for each in sizes.order for part in range(num)]

    def _take_lengths(self) -> None:
        """Cut the keywords again on a rank without inputs and target, where sequences differ in length."""
        if self.told.lengths and 0 not in self._seeds and not self._has_target:
            self._cutter.sequences.tell(self.told.lengths)
            self._kwargs = self._cutter.cut_keywords(self.call.kwargs)

    def _check_targets(self, targets: Sequence[Any]) -> None:
        for each in self.told.left_out:
            target = targets[each]
            if not (is_empty(target) or (self._count is not None and not self._count(target))):
                raise ValueError(
                    f"microbatch {each} has a target and no inputs: a microbatch is left out if its inputs "
                    "are None or without elements, and its target must be, too"
                )
        for each in self.told.order:
            if targets[each] is None:
                raise ValueError(
                    f"microbatch {each} has inputs, and its target is None: give it a target, or None for "
                    "its inputs, too"
                )

    def weigh(self, device: torch.device, num_parts: int, sum_over_parts: Callable[[Tensor], object]) -> None:
        """Find the weights of the losses, on a rank with targets if the loss counts them. See weights_of."""
        targets = self._in_order(self._targets)
        if self._count is not None and targets is not None:
            numbers = self.num_microbatches, num_parts
            self._weights = weights_of(targets, self._count, device, *numbers, sum_over_parts)

    def _in_order(self, values: Any) -> Any:
        """The values of the units that run, in the order in which they go, given those of all units."""
        return [values[each] for each in self._units] if values and self._units is not None else values

    # ---- What the stages get, and give

    @property
    def sizes_of_units(self) -> list[Size]:
        """For each unit that runs, the size of its microbatch."""
        return self.told.of_units(self._cutter.num_slices)

    @property
    def _bounds(self) -> list[tuple[int, ...]]:
        """For each microbatch that runs, the bounds of its slices."""
        bounds, lengths = self.call.slice_bounds, self.told.lengths
        return [scaled_bounds(bounds, lengths[each] if lengths else bounds[-1]) for each in self.told.order]

    @property
    def _shares(self) -> list[float] | None:
        """For each unit that runs, its share of the microbatch's tokens; None without slices."""
        if not self.call.slice_bounds:
            return None
        return [(end - start) / each[-1] for each in self._bounds for start, end in pairwise(each)]

    def feed(self, stage: int) -> Feed:
        """What a stage of this rank gets of the call."""
        seed = self._seeds[stage]
        return Feed(
            args=self._in_order(self._args) if stage == 0 else (),
            kwargs=self._in_order(self._kwargs),
            targets=self._in_order(self._targets),
            seeds=self._in_order(range(seed, seed + self._cutter.num_units)),
            # The step's loss is the mean over the microbatches.
            loss_grads=LossGradients(self.call.loss_scale / self.num_microbatches),
            observe=self._observe() if stage == self._last_stage else None,
            weights=self._weights if stage == self._last_stage else None,
            shares=self._shares,
            lengths=[self.told.lengths[each] for each in self.told.order] if self.told.lengths else (),
            called="step" if self.call.kind == "step" else "evaluate",
        )

    def _observe(self) -> Observe | None:
        """What the last stage calls for each unit of an evaluation; slices of a microbatch are joined."""
        call = self.call
        observe = self._outputs.take if call.returns_outputs or call.metrics else call.observe
        return JoinedSlices(observe, self._bounds) if observe and call.slice_bounds else observe

    def backward(self) -> None:
        """Run the backward of the caller's graph, from the gradients of the inputs."""
        self._cutter.backward()

    def result(self, ended: Sequence[StageLosses]) -> Result:
        """The result of the call, given what the stages of this rank have returned."""
        losses = self._per_microbatch([loss for each in ended for loss in each.losses])
        named = NamedLosses([each.named for each in ended], self.num_microbatches)
        outputs = self._outputs
        return Result(self._in_callers_order(losses), named, outputs.concatenated(), outputs.metrics())

    def _per_microbatch(self, losses: list[Tensor]) -> list[Tensor]:
        """The losses of microbatches, given those of units: the slices of one are weighted, and add up."""
        num = self._cutter.num_slices
        if num == 1:
            return losses
        return [torch.stack(losses[first : first + num]).sum() for first in range(0, len(losses), num)]

    def _in_callers_order(self, losses: list[Tensor]) -> list[Tensor]:
        """The losses of all microbatches; 0 for an empty one. [] where there are none."""
        if not losses or self.told.is_plain:
            return losses
        of, every = dict(zip(self.told.order, losses, strict=True)), range(self.num_microbatches)
        return [of[each] if each in of else torch.zeros_like(losses[0]) for each in every]
