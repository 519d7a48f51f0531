"""One call of `Pipeline.step`, `evaluate` or `predict`: the arguments of the stages, and the results.

Named losses are auxiliary losses, and the entries of a loss that is a dict. A StageWorker keeps them as
tensors. They become numbers when a caller asks for them, so a step does not wait for the device. An
evaluation also returns the last stage's outputs and their metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zbpp.autograd.models.auxiliary import named_scalar
from zbpp.error_text import kind_of
from zbpp.runtime.microbatch import Cutter, PerMicrobatch, is_cut_whole
from zbpp.runtime.sizes import Sizes, is_empty, size_of
from zbpp.runtime.weights import Weights

Observe = Callable[[Any, Any], None]  # (output, target)


class LossGradients:
    """The gradients that B starts from at the losses of a stage: one tensor for each kind of loss."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._made: dict[Any, Tensor] = {}

    def of(self, loss: Tensor) -> Tensor:
        """The gradient of a loss."""
        kind = type(loss), loss.dtype, loss.device
        if kind not in self._made:
            self._made[kind] = torch.full_like(loss, self.value, requires_grad=False)
        return self._made[kind]

    def set(self, value: float) -> None:
        """Give all of them another value, in the same memory."""
        self.value = value
        for each in self._made.values():
            each.fill_(value)


class Feed(NamedTuple):
    """One stage's arguments from outside the pipeline. Each sequence has one entry per unit.

    A unit is a microbatch, or a slice of one where the timetable has slices.
    """

    args: Sequence[tuple[Any, ...]]  # empty for a stage whose inputs come from the stage before it
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    seeds: Sequence[int] | None  # of the random numbers that F draws; None: F seeds no generator
    loss_grads: LossGradients
    observe: Observe | None = None  # in an evaluation: called by the last stage
    weights: Weights | None = None  # of the losses, see weights.py; None: all weigh the same
    shares: Sequence[float] | None = None  # of each slice in the tokens of its microbatch; None: no slices

    def in_order(self, units: Sequence[int]) -> Feed:
        """The feed of these units, in this order."""

        def chosen(values: Any) -> Any:
            return [values[each] for each in units] if values else values

        return self._replace(
            args=chosen(self.args),
            kwargs=chosen(self.kwargs),
            targets=chosen(self.targets),
            seeds=chosen(self.seeds),
            shares=chosen(self.shares),
        )


NO_FEED = Feed((), (), None, (), LossGradients())


class Call(NamedTuple):
    """The arguments of one call on this rank.

    kind: the program that the call runs: "step", "evaluate" or "predict". name: ranks compare it, and refuse
    the call where it differs; "": the kind. rows: the number of the batch's rows; None if this rank was given
    none. has_graph: whether the inputs have a graph of the caller's, which gets gradients at the end of the
    call. weights: of the losses; None until they are computed.
    """

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any]
    observe: Observe | None = None
    loss_scale: float = 1.0
    kind: str = "step"
    name: str = ""
    rows: int | None = None
    has_graph: bool = False
    weights: Weights | None = None

    def feeds(self, cutter: Cutter, seeds: Mapping[int, int], last_stage: int) -> dict[int, Feed]:
        """{stage: its feed} for each stage of this rank.

        seeds: per stage of this rank, the seed of its unit 0. Raises ValueError for arguments that don't
        split into microbatches or slices, and if this rank owns stage 0 but got no inputs.
        """
        if 0 in seeds and not (self.args or self.kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs")
        if 0 in seeds:
            arguments = {f"argument {i}": value for i, value in enumerate(self.args)}
            cutter.check_sequences(arguments | dict(self.kwargs))
        inputs = cutter.cut_arguments(self.args) if 0 in seeds else []
        keywords = cutter.cut_keywords(self.kwargs)
        has_targets = self.target is not None and last_stage in seeds
        if has_targets:
            cutter.check_sequences({"target": self.target})
        targets = cutter.cut("target", self.target) if has_targets else None
        cutter.refuse_rows_of_lists((self.args, self.target))
        return {
            stage: Feed(
                args=inputs if stage == 0 else (),
                kwargs=keywords,
                targets=targets,
                seeds=range(seed, seed + cutter.num_units),
                # The step's loss is the mean over the microbatches.
                loss_grads=LossGradients(self.loss_scale / cutter.num_microbatches),
                observe=self._observe(cutter),
                shares=cutter.shares,
            )
            for stage, seed in seeds.items()
        }

    def _observe(self, cutter: Cutter) -> Observe | None:
        """What the last stage calls for each unit: `observe`, or what joins the slices for it."""
        if self.observe is None or not cutter.slice_bounds:
            return self.observe
        return _JoinedSlices(self.observe, cutter.slice_bounds)

    def sizes(self, cutter: Cutter, feed: Feed, timetable: int) -> Sizes:
        """The sizes of the microbatches, and the order in which they go; `feed` is stage 0's.

        timetable: see Sizes. Raises ValueError if all microbatches are empty.
        """
        number = cutter.num_microbatches
        order = cutter.order if self.kind == "step" and cutter.order else (*range(number),)
        if cutter.is_even:
            return Sizes(self.kind, timetable, (size_of(_given(feed, 0, cutter)),) * number, order)
        given = [_given(feed, each, cutter) for each in range(number)]
        sizes = tuple(map(size_of, given))
        order = tuple([each for each in order if not self._is_left_out(each)])
        if not order:
            raise ValueError(f"all {number} microbatches are empty: write None for some of them only")
        return Sizes(self.kind, timetable, sizes, order)

    def _is_left_out(self, microbatch: int) -> bool:
        """Whether a microbatch has no sequences; what all microbatches get alike doesn't count."""
        given = tree_leaves(self.args or self.kwargs, is_leaf=is_cut_whole)
        if any(isinstance(each, Tensor | BlockMask) for each in given):
            return False  # it was split: each microbatch has rows
        own = [each.values[microbatch] for each in given if isinstance(each, PerMicrobatch)]
        return bool(own) and is_empty(own)


class _JoinedSlices:
    """Joins what the last stage returned for the slices of a microbatch, and their targets, along time."""

    def __init__(self, observe: Observe, bounds: Sequence[int]) -> None:
        self._observe, self._lengths = observe, [end - start for start, end in pairwise(bounds)]
        self._seen: list[tuple[Any, Any]] = []

    def __call__(self, output: Any, target: Any) -> None:
        """Take the next slice. Raises ValueError for an output without a number of tokens."""
        self._seen.append((output, target))
        if len(self._seen) < len(self._lengths):
            return
        outputs, targets = zip(*self._seen, strict=True)
        self._seen.clear()
        self._observe(self._joined(outputs), self._joined(targets))

    def _joined(self, slices: Sequence[Any]) -> Any:
        columns = zip(*map(tree_leaves, slices), strict=True)
        return tree_unflatten([*map(self._column, columns)], tree_flatten(slices[0])[1])

    def _column(self, values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        lengths = [each.shape[1] if each.dim() > 1 else None for each in values]
        if lengths != self._lengths:
            shapes = ", ".join(str(list(each.shape)) for each in values)
            raise ValueError(
                f"the slices of a microbatch have outputs of shapes {shapes}, which can't be joined along "
                "dimension 1: metrics and outputs of such a stage need evaluate_as_one, whose sequences are "
                "whole"
            )
        return torch.cat([*values], dim=1)


def _given(feed: Feed, microbatch: int, cutter: Cutter) -> tuple[list[Any], list[Any]]:
    """The arguments and keywords of a microbatch: those of all its slices."""
    units = slice(microbatch * cutter.num_slices, (microbatch + 1) * cutter.num_slices)
    args = [each for each in feed.args[units] if each]
    return args, [*feed.kwargs[units]]


def in_callers_order(losses: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    """The losses of all microbatches in the caller's order; 0 for an empty one. [] where there are none."""
    if not losses or sizes.is_plain:
        return [*losses]
    of = dict(zip(sizes.order, losses, strict=True))
    return [of[each] if each in of else torch.zeros_like(losses[0]) for each in range(len(sizes.of))]


class Result(NamedTuple):
    """The losses of one call on this rank; without the last stage `losses` is empty."""

    losses: list[Tensor]
    named: NamedLosses


Means = dict[str, list[float]]
"""{name: one mean over microbatches per stage that reported the name, in the order of stages}."""


class NamedLosses:
    """What the stages of one rank reported in one step or evaluation.

    stages: for each stage {name: scalar tensors, one per microbatch that reported the name}.
    """

    def __init__(
        self, stages: Iterable[Mapping[str, Sequence[Tensor]]] = (), num_microbatches: int = 1
    ) -> None:
        self._stages, self._num_microbatches = list(stages), num_microbatches

    def means(self) -> Means:
        """This rank's means, for `summed`. A microbatch in which a stage reported nothing counts as zero."""
        pairs = [(name, values) for stage in self._stages for name, values in stage.items()]
        if not pairs:
            return {}
        totals = [torch.stack([*values]).double().sum() for _, values in pairs]
        numbers = torch.stack([total.to(totals[0].device) for total in totals]).tolist()
        means: Means = {}
        for (name, _), number in zip(pairs, numbers, strict=True):
            means.setdefault(name, []).append(number / self._num_microbatches)
        return means


def summed(means: Iterable[Means], num_pipelines: int = 1) -> dict[str, float]:
    """{name: the sum over all stages, averaged over pipelines}, names sorted.

    means: of each rank of each pipeline. The sum does not depend on which rank has which stage.
    """
    everything: Means = {}
    for each in means:
        for name, numbers in each.items():
            everything.setdefault(name, []).extend(numbers)
    return {name: _sum(everything[name]) / num_pipelines for name in sorted(everything)}


def _sum(numbers: Sequence[float]) -> float:
    """The sum, rounded once; inf or NaN if it is not finite, where math.fsum raises an error."""
    return math.fsum(numbers) if math.isfinite(sum(numbers)) else sum(numbers)


def checked_losses(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A loss that is a dict, each entry with shape []. Raises ValueError for entries that are no losses."""
    if not losses:
        raise ValueError("the loss is an empty dict: return {name: scalar tensor}, or one scalar tensor")
    if "loss" in losses:
        raise ValueError(
            f"the loss is a dict with the entries {', '.join(map(repr, losses))}. Entries are summed, and "
            "in many libraries 'loss' is the sum already: return output['loss'] alone if it is; if it is one "
            "of the terms, give it another name"
        )
    return {name: named_scalar("the loss", name, value) for name, value in losses.items()}


Metrics = Callable[[Any, Any], Mapping[str, float | Tensor]]


class Outputs:
    """Collects the outputs and metrics of the microbatches of one call of `Pipeline.evaluate`."""

    def __init__(self, *, is_kept: bool, metrics: Metrics | None) -> None:
        self._is_kept, self._compute = is_kept, metrics
        self._outputs: list[Any] = []
        self._metrics: list[tuple[int, dict[str, float]]] = []  # (rows, values)

    def take(self, output: Any, target: Any) -> None:
        """Take what the last stage returned for the next microbatch, and the microbatch's target."""
        if self._is_kept:
            self._outputs.append(tree_map(_kept, output))
        if self._compute is not None:
            self._metrics.append((_rows(output), _numbers(self._compute(output, target))))

    def concatenated(self) -> Any:
        """The outputs in the last stage's structure, concatenated along dim 0; None on other ranks.

        Tensors without dimensions are stacked; None stays None; any other value, and tensors that differ
        beyond dim 0, become a list with one value per microbatch that is not empty.
        """
        if not self._outputs:
            return None
        columns = zip(*(tree_leaves(output) for output in self._outputs), strict=True)
        return tree_unflatten(list(map(_joined, columns)), tree_flatten(self._outputs[0])[1])

    def metrics(self) -> dict[str, float]:
        """The mean of each metric over all rows; {} on other ranks."""
        if not self._metrics:
            return {}
        total = sum(rows for rows, _ in self._metrics)
        _, names = self._metrics[0]
        return {
            name: math.fsum(rows * values[name] for rows, values in self._metrics) / total for name in names
        }


def _numbers(found: Any) -> dict[str, float]:
    """What `metrics` returned, as floats. Raises ValueError, with the metric's name, if one is no number."""
    if not isinstance(found, Mapping):
        raise ValueError(f"metrics returned {kind_of(found)}: return a dict, name -> number")
    numbers = {}
    for name, value in found.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"the metric {name!r} is {what}: return one number, such as a mean")
        numbers[name] = float(value)
    return numbers


def _kept(value: Any) -> Any:
    # A copy: a stage may write its next output into the same memory.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _joined(values: tuple[Any, ...]) -> Any:
    if not isinstance(values[0], Tensor):
        return None if values[0] is None else list(values)
    if not values[0].dim():
        return torch.stack(values)
    return torch.cat(values) if len({each.shape[1:] for each in values}) == 1 else list(values)


def _rows(output: Any) -> int:
    """How many rows an output has: those of its first tensor that has dimensions; 1 without such a tensor.

    Microbatches of a `per_microbatch` may differ in it.
    """
    sizes = (len(each) for each in tree_leaves(output) if isinstance(each, Tensor) and each.dim())
    return next(sizes, 1)
