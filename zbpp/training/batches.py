"""The batches that one process reads: of each step, and of each evaluation.

Each replica and each shard reads batches of its own. The ranks of one pipeline share a batch: the owner of
stage 0 reads its inputs, the owner of the last stage its target, and the ranks between read nothing.

Batches of so many tokens (zbpp/data/token_batches.py) belong to all replicas together. They are planned ahead
(length_plans.py), and come as microbatches of different shapes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zbpp.data import Data
from zbpp.data.source import Source, has_targets_of_inputs, parts_of, with_target
from zbpp.data.token_batches import Group, TokenBatches
from zbpp.runtime import Pipeline, per_microbatch
from zbpp.stage_api import target_names
from zbpp.training.length_plans import LengthPlanner, StepPlan, agreed_plan

_log = logging.getLogger(__name__)

Batch = tuple[tuple[Any, ...], Any]  # args for stage 0, target for the last stage; () and None elsewhere


class Batches:
    """Reads for the stages of one pipeline.

    target_dtype: of floating-point targets; None: that of the parameters. planner: of batches of so many
    tokens, on ranks that read them. plan: of the latest step of such a batch; None before it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        data: Data,
        target_dtype: torch.dtype | None = None,
        planner: LengthPlanner | None = None,
    ) -> None:
        self.pipeline, self._data, self._target_dtype = pipeline, data, target_dtype
        self._planner = planner
        if planner is not None:
            planner.leaves_out = pipeline.can_leave_out
        self.plan: StepPlan | None = None
        self._is_looked_at = False

    def of_step(self, step: int) -> Batch:
        """This process's part of the data of a training step. Collective for batches of so many tokens."""
        if not self._data.is_shared:
            return self._read(self._data.train, step)
        is_first = 0 in self.pipeline.stages
        plan = self._planner.of_step(step) if self._planner and is_first else None
        self.plan = agreed_plan(plan, self.pipeline.place)
        if self._planner is None:
            return (), None
        self._planner.batches.note(step + 1, self.plan.next_first)
        return self._of_groups(self._planner.batches, self.plan.groups)

    @property
    def lengths(self) -> list[float] | None:
        """The lengths of the microbatches that the latest step ran; None where all are alike."""
        return None if self.plan is None else self.plan.lengths

    def close(self) -> None:
        """End the thread that plans batches."""
        if self._planner is not None:
            self._planner.close()

    def of_evaluation(self, number: int) -> Batch:
        """This process's part of a held-out batch."""
        return self._read(self._data.evaluation, number)

    def _of_groups(self, batches: TokenBatches, groups: Sequence[Group]) -> Batch:
        """The microbatches of these sequences, in this order; the others of the step are left out."""
        parts = [self._part_of(batches.microbatch(each)) for each in groups]
        nothing = (None,) * len(parts[0][0]), None
        parts += [nothing] * (self.pipeline.timetable.num_microbatches - len(groups))
        args = tuple(per_microbatch(each) for each in zip(*(args for args, _ in parts), strict=True))
        targets = [target for _, target in parts]
        return args, None if targets[0] is None else per_microbatch(targets)

    def _read(self, source: Source, number: int) -> Batch:
        pipeline, place = self.pipeline, self.pipeline.place
        if not pipeline.stages.keys() & {0, pipeline.timetable.num_stages - 1}:
            return (), None
        return self._part_of(source.batch(number * place.num_data_parts + place.data_part))

    def _part_of(self, batch: Any) -> Batch:
        """This rank's part of a batch. The first one with targets is looked at, by one process of the job."""
        pipeline, place = self.pipeline, self.pipeline.place
        stages, num_stages = pipeline.stages, pipeline.timetable.num_stages
        if not self._is_looked_at and num_stages - 1 in stages and place.is_first:
            self._is_looked_at = True
            if has_targets_of_inputs(with_target(batch, target_names(stages.values()))):
                _log.warning(
                    "each target of the first batch is its own input token, so the model learns to copy: a "
                    "target is the token after its input. Shift the targets; with a model of transformers, "
                    "call them labels, which it shifts"
                )
        return part_for(stages, num_stages, batch, pipeline.device, target_dtype=self._target_dtype)


# ----------------------------------------------------------------
# A rank's part of a batch: the inputs if it owns stage 0, the target if it owns the last stage.


def batch_for(
    stages: Mapping[int, nn.Module],
    num_stages: int,
    source: Source,
    number: int,
    device: torch.device,
    *,
    target_dtype: torch.dtype | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """(args, target) of a step for the owner of `stages`: () without stage 0, None without the last stage.

    number: the batch's number in the source. Floating-point inputs become float32, float64 if the stages'
    parameters are: 16-bit weights round no data. Targets get `target_dtype`, or else the narrowest dtype of
    the parameters. Raises ValueError for a batch that zbpp/data/source.py can't take apart, and for inputs
    that stage 0 does not take.
    """
    if not stages.keys() & {0, num_stages - 1}:
        return (), None
    return part_for(stages, num_stages, source.batch(number), device, target_dtype=target_dtype)


def part_for(
    stages: Mapping[int, nn.Module],
    num_stages: int,
    batch: Any,
    device: torch.device,
    *,
    target_dtype: torch.dtype | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """`batch_for` of a batch that was read."""
    dtypes = {p.dtype for stage in stages.values() for p in stage.parameters() if p.is_floating_point()}
    narrowest = min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
    of_inputs = torch.float64 if torch.float64 in dtypes else torch.float32

    def moved(dtype: torch.dtype, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    inputs, target = parts_of(with_target(batch, target_names(stages.values())))
    args = tree_map(partial(moved, of_inputs), positional(inputs, stages[0])) if 0 in stages else ()
    is_last = num_stages - 1 in stages
    return args, tree_map(partial(moved, target_dtype or narrowest), target) if is_last else None


def _by_position(bound: inspect.BoundArguments) -> tuple[Any, ...]:
    """The arguments of a traced stage, which takes by position what forward takes by name only."""
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values())


def positional(inputs: tuple[Any, ...] | dict[str, Any], module: nn.Module) -> tuple[Any, ...]:
    """The inputs in the order of forward's arguments. Raises ValueError if forward can't take them so."""
    if isinstance(inputs, tuple):
        return inputs
    if len(inputs) == 1:
        return tuple(inputs.values())
    try:
        # The class has the real signature: recompute and compile replace `module.forward`. A traced stage has
        # that of the whole module.
        traced = getattr(module, "signature", None)
        if isinstance(traced, inspect.Signature):
            return _by_position(traced.bind(**inputs))
        bound = inspect.signature(type(module).forward).bind(module, **inputs)
    except TypeError as error:
        raise ValueError(f"a batch has the inputs {', '.join(inputs)}, but stage 0: {error}") from None
    bound.apply_defaults()
    by_name = ", ".join(name for name in bound.kwargs if name in inputs)
    if by_name:
        raise ValueError(
            f"stage 0 takes {by_name} by name only, but a pipeline passes them by position: "
            "let its forward take them as ordinary arguments"
        )
    return bound.args[1:]
