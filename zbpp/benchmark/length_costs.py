"""How the times of a model's stages grow with the length of a microbatch, measured at a few lengths.

A batch of data is cut: its rows keep their first tokens. Each length is timed as the whole one is, and the
lengths take turns. Per stage and op, two numbers of least square error say all times:

    ms = linear * l + quadratic * l * l        l: the length, 1.0 is a row as the data have it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from zbpp.benchmark.interleaved_timing import ZbppRunner, close_all, start, time_in_turns
from zbpp.benchmark.measurement import both_forms
from zbpp.benchmark.workload import Workload
from zbpp.job.agreement import gather
from zbpp.measure import measured_costs, two_parts
from zbpp.planning import RankCosts
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.schedule import Costs, Timetable
from zbpp.schedule.costs import TIMES


class LengthCosts(NamedTuple):
    """costs: with a quadratic part, and the shape of the microbatch of length 1.

    error: the largest distance between a measured time and the two parts, as a share of the op's time at
    length 1.
    """

    costs: RankCosts
    error: float


def fit_lengths(
    workload: Workload, timetable: Timetable, shares: Sequence[float], num_steps: int, whole: Costs
) -> LengthCosts:
    """`whole`, the costs at length 1, in two parts. Collective.

    shares: the other lengths to measure, above 0 and below 1. Raises ValueError if rows have too few tokens
    for two different lengths.
    """
    rows, tokens = row_shape(workload, timetable)
    counts = sorted({round(share * tokens) for share in shares} - {0, tokens})
    if not counts:
        raise ValueError(
            f"rows of {tokens} tokens have no length of {', '.join(f'{share:g}' for share in shares)}: give "
            "longer rows (model.sequence_length), or other lengths"
        )
    runs = [
        start(f"{name}, {count} tokens", workload, form, partial(ShortRunner, bounds=(0, count, tokens)))
        for count in counts
        for name, form in both_forms(timetable).items()
    ]
    time_in_turns(runs, workload, num_steps)
    close_all(runs)
    each = len(runs) // len(counts)
    found = {
        count: measured_costs(*(line for run in runs[i * each : (i + 1) * each] for line in run.timelines))
        for i, count in enumerate(counts)
    }
    return fitted({count / tokens: costs for count, costs in found.items()} | {1.0: whole}, (rows, tokens))


def row_shape(workload: Workload, timetable: Timetable) -> tuple[int, int]:
    """(rows of a microbatch, tokens of a row), by the inputs of the first stage. Collective."""
    args, _ = workload.batch(timetable, 0)
    shapes = [tuple(each.shape[:2]) for each in args if isinstance(each, Tensor) and each.dim() > 1]
    num_rows, tokens = next(shape for shape in gather(next(iter(shapes), None)) if shape is not None)
    return num_rows // workload.num_microbatches, tokens


class ShortRunner(ZbppRunner):
    """A runner of the first tokens of each row; bounds: 0, their number, and the length of a row."""

    def __init__(self, workload: Workload, timetable: Timetable, bounds: Sequence[int]) -> None:
        super().__init__(workload, timetable)
        self._bounds = bounds

    def step(self, args: tuple[Any, ...], target: Any) -> list[Tensor]:
        """As `ZbppRunner.step`."""
        first, _ = into_microbatches("the batch", (args, target), 1, self._bounds)
        return super().step(*first)


def fitted(measured: Mapping[float, Costs], shape: tuple[int, int]) -> LengthCosts:
    """The two parts of times that were measured at these lengths, of which 1.0 is one.

    All other costs are those of length 1. shape: (rows, tokens of a row) of a microbatch of length 1.
    """
    lengths = sorted(measured)
    powers = np.array([[length, length**2] for length in lengths])
    linear: dict[str, Any] = {}
    squared: dict[str, Any] = {}
    error = 0.0
    for name in TIMES:
        times = np.array([getattr(measured[length], name) for length in lengths])  # by length and stage
        parts = np.array([two_parts(lengths, each) for each in times.T])
        linear[name], squared[name] = parts.T.tolist()
        missed = np.abs(powers @ parts.T - times).max(axis=0)
        error = max(error, float((missed / np.maximum(times[-1], np.finfo(float).tiny)).max()))
    whole = measured[1.0]
    exchange = _within(whole.exchange, *(linear[name] for name in ("f", "b", "bw")))
    numbers: dict[str, Any] = {**whole.numbers, **linear, "exchange": exchange}
    quadratic = RankCosts(**squared)
    return LengthCosts(
        RankCosts(**numbers, memory_unit=whole.memory_unit, quadratic=quadratic, shape=shape), error
    )


def _within(exchange: Any, *times: list[float]) -> list[float]:
    """The exchanges, each no longer than the linear part of the ops that contain it."""
    given = exchange if isinstance(exchange, list) else [exchange] * len(times[0])
    return [min(each) for each in zip(given, *times, strict=True)]
