"""Costs of measured steps whose microbatches have different lengths: times in two parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zbpp.measure.costs import measured_costs
from zbpp.schedule import Costs, Op, Timeline

Floats = npt.NDArray[np.float64]
_OPS = {"f": Op.F, "b": Op.B, "w": Op.W, "bw": Op.BW}


def two_parts(lengths: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(linear, quadratic), neither negative: linear * length + quadratic * length ** 2 is nearest to `times`.

    Nearest in the sense of least squares.
    """
    powers = np.array([[length, length**2] for length in lengths])
    wanted = np.array(times)
    both = np.linalg.lstsq(powers, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = powers.T @ wanted / (powers**2).sum(axis=0)
    misses = ((powers * alone - wanted[:, None]) ** 2).sum(axis=0)
    return (float(alone[0]), 0.0) if misses[0] <= misses[1] else (0.0, float(alone[1]))


def measured_costs_of_lengths(timelines: Sequence[Timeline], lengths: Sequence[Sequence[float]]) -> Costs:
    """As `measured_costs`, with F, B, W and BW in two parts, of which `quadratic` is one.

    lengths: for each timeline, those of its microbatches. A message's time is divided by the mean length.
    """
    usual, num_stages = measured_costs(*timelines), timelines[0].timetable.num_stages
    found: dict[tuple[int, Op], list[tuple[float, float]]] = defaultdict(list)
    for timeline, own in zip(timelines, lengths, strict=True):
        for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True):
            for action, duration in zip(row, (ends - starts).tolist(), strict=True):
                if own[action.microbatch]:
                    found[action.stage, action.op].append((own[action.microbatch], duration))
    parts = {name: _of_op(found, op, num_stages) for name, op in _OPS.items()}
    linear: dict[str, Any] = {name: part[0] for name, part in parts.items() if part}
    squared: dict[str, Any] = {name: part[1] for name, part in parts.items() if part}
    mean = float(np.mean([length for own in lengths for length in own if length] or [1.0]))
    comm = [each / mean for each in usual.per_stage(num_stages).comm]
    if "bw" not in linear:
        linear["bw"] = None
    elif "b" not in linear:  # half each, as `measured_costs` has them
        linear |= {name: [each / 2 for each in linear["bw"]] for name in ("b", "w")}
        squared |= {name: [each / 2 for each in squared["bw"]] for name in ("b", "w")}
    quadratic = Costs(**{"f": 0.0, "b": 0.0, "w": 0.0, **squared})
    return replace(usual, **linear, comm=comm, exchange=0.0, quadratic=quadratic)


def _of_op(
    found: dict[tuple[int, Op], list[tuple[float, float]]], op: Op, num_stages: int
) -> tuple[list[float], list[float]] | None:
    """(the linear part on each stage, the quadratic part); None for an op that no timeline has."""
    if (0, op) not in found:
        return None
    pairs = [two_parts(*zip(*found[stage, op], strict=True)) for stage in range(num_stages)]
    return [linear for linear, _ in pairs], [squared for _, squared in pairs]
