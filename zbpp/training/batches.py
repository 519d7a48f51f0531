"""The batches that one process reads: of each step, and of each evaluation.

Each replica and each shard reads batches of its own. The ranks of one pipeline share a batch: the owner of
stage 0 reads its inputs, the owner of the last stage its target, and the ranks between read nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zbpp.data import Data
from zbpp.data.read_ahead import ReadAhead, check_thread_may_read
from zbpp.data.source import Source, parts_of
from zbpp.runtime import Pipeline

Batch = tuple[tuple[Any, ...], Any]  # args for stage 0, target for the last stage; () and None elsewhere


class Batches:
    """Reads for the stages of one pipeline. ahead: how many batches a thread reads before their steps.

    target_dtype: of floating-point targets; None: that of the parameters.
    """

    def __init__(
        self, pipeline: Pipeline, data: Data, ahead: int = 0, target_dtype: torch.dtype | None = None
    ) -> None:
        """Raises ValueError for data that a thread can't read."""
        self._pipeline, self._data, self._target_dtype = pipeline, data, target_dtype
        self._num_ahead = ahead
        self._ahead = self._read_ahead()

    def of_step(self, step: int) -> Batch:
        """This process's part of the data of a training step."""
        if self._ahead is not None:
            found: Batch = self._ahead.batch(step)
            return found
        return self._read(self._data.train, step, self._pipeline.device)

    def of_evaluation(self, number: int) -> Batch:
        """This process's part of a held-out batch."""
        return self._read(self._data.evaluation, number, self._pipeline.device)

    def replace_pipeline(self, pipeline: Pipeline) -> None:
        """Read for another pipeline, which may have other stages. Batches read ahead are read again."""
        self.close()
        self._pipeline = pipeline
        self._ahead = self._read_ahead()

    def close(self) -> None:
        """End the thread that reads ahead; the next `of_step` starts it again."""
        if self._ahead is not None:
            self._ahead.close()

    def _read_ahead(self) -> ReadAhead | None:
        """None where nothing is to be read ahead."""
        ends = {0, self._pipeline.timetable.num_stages - 1}
        if not self._num_ahead or not ends & self._pipeline.stages.keys():
            return None
        check_thread_may_read(self._data.train)
        host = torch.device("cpu")  # the thread itself moves batches from there to the device
        return ReadAhead(
            lambda step: self._read(self._data.train, step, host), self._num_ahead, self._pipeline.device
        )

    def _read(self, source: Source, number: int, device: torch.device) -> Batch:
        pipeline, place = self._pipeline, self._pipeline.place
        own_number = number * place.num_data_parts + place.data_part
        return batch_for(
            pipeline.stages,
            pipeline.timetable.num_stages,
            source,
            own_number,
            device,
            target_dtype=self._target_dtype,
        )


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

    number: the batch's number in the source. Floating-point inputs and targets get the dtype of the stages'
    parameters; `target_dtype`, if given, replaces it for targets. Raises ValueError for a batch that
    zbpp/data/source.py can't take apart, and for inputs that stage 0 does not take.
    """
    if not stages.keys() & {0, num_stages - 1}:
        return (), None
    dtypes = (p.dtype for stage in stages.values() for p in stage.parameters() if p.is_floating_point())
    dtype = next(dtypes, torch.float32)

    def moved(dtype: torch.dtype, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    inputs, target = parts_of(source.batch(number))
    args = tree_map(partial(moved, dtype), positional(inputs, stages[0])) if 0 in stages else ()
    is_last = num_stages - 1 in stages
    return args, tree_map(partial(moved, target_dtype or dtype), target) if is_last else None


def positional(inputs: tuple[Any, ...] | dict[str, Any], module: nn.Module) -> tuple[Any, ...]:
    """The inputs in the order of forward's arguments. Raises ValueError if forward can't take them so."""
    if isinstance(inputs, tuple):
        return inputs
    if len(inputs) == 1:
        return tuple(inputs.values())
    try:
        # The class has the real signature: recompute and compile replace `module.forward`.
        bound = inspect.signature(type(module).forward).bind(module, **inputs)
    except TypeError as error:
        raise ValueError(f"a batch has the inputs {', '.join(inputs)}, but stage 0: {error}") from None
    bound.apply_defaults()
    if bound.kwargs:
        raise ValueError(
            f"stage 0 takes {', '.join(bound.kwargs)} by name only, but a pipeline passes them by position: "
            "let its forward take them as ordinary arguments"
        )
    return bound.args[1:]
