"""One call of `Pipeline.step`, `evaluate` or `predict`: what it gives to a rank's stages, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zbpp.runtime.microbatch import Cutter
from zbpp.runtime.results import NamedLosses

Observe = Callable[[Any, Any], None]  # (output, target)


class Feed(NamedTuple):
    """What one stage is given from outside the pipeline. Each sequence has one entry per microbatch."""

    args: Sequence[tuple[Any, ...]]  # empty for a stage whose inputs come from the stage before it
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    seeds: Sequence[int]  # of the random numbers that F draws
    loss_grad: float = 1.0  # the gradient of each microbatch's loss
    observe: Observe | None = None  # in an evaluation: called by the last stage


NO_FEED = Feed((), (), None, ())


class Call(NamedTuple):
    """The arguments of one call on this rank.

    kind: which program it runs, such as "step". name: must be the same on all ranks; "": kind. rows: of the
    batch; None if this rank was given no part of it. has_graph: whether a graph of the caller gets gradients
    at the end of the call.
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

    def feeds(self, cutter: Cutter, seeds: Mapping[int, int], last_stage: int) -> dict[int, Feed]:
        """{stage: its feed} for each stage of this rank.

        seeds: per stage of this rank, the seed of its microbatch 0. Raises ValueError for arguments that
        don't split into microbatches, and if this rank owns stage 0 but got no inputs.
        """
        if 0 in seeds and not (self.args or self.kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs")
        inputs = cutter.cut_arguments(self.args) if 0 in seeds else []
        keywords = cutter.cut_keywords(self.kwargs)
        has_targets = self.target is not None and last_stage in seeds
        targets = cutter.cut("target", self.target) if has_targets else None
        return {
            stage: Feed(
                args=inputs if stage == 0 else (),
                kwargs=keywords,
                targets=targets,
                seeds=range(seed, seed + cutter.num_microbatches),
                # The step's loss is the mean over the microbatches.
                loss_grad=self.loss_scale / cutter.num_microbatches,
                observe=self.observe,
            )
            for stage, seed in seeds.items()
        }


class Result(NamedTuple):
    """The losses of one call on this rank; `losses` is empty but on the last stage's owner."""

    losses: list[Tensor]
    named: NamedLosses
