"""Each argument of the lower bounds removed in turn: in how many cases the bound falls, and how far.

A bound that falls loses the proof that a plan which attains it is optimal. The figures are exact.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from scripts.dev import heterogeneous, targets
from zbpp.planning.bounds import bound_of, first_backward_bound, idle_bound, round_trip_bound
from zbpp.planning.problem import Problem
from zbpp.schedule import Costs

# `zbpp.planning.bounds.lower_bound` is the function of this name, not the module.
_LOWER_BOUND = sys.modules["zbpp.planning.bounds.lower_bound"]
_SMALL = 1e-9  # a relative fall below this is rounding


class Component(NamedTuple):
    """What is removed: (owner, attribute, replacement) each; the code that it consists of; where it acts."""

    name: str
    replaced: list[tuple[Any, str, Any]]
    code: tuple[Any, ...] = ()
    acts_on: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsource(each).splitlines()) for each in self.code)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, attribute, replacement in self.replaced:
                stack.enter_context(patch.object(owner, attribute, replacement))
            yield


def components() -> list[Component]:
    idle, trips = idle_bound.Idle, round_trip_bound
    return [
        Component("late first B's", [(_LOWER_BOUND, "late_first_b", _floor)], (first_backward_bound,)),
        Component("round trips", [(_LOWER_BOUND, "round_trips", _zero)], (trips,)),
        Component(
            "round trips: relay", [(trips, "_relay", _zero)], (trips._relay, trips._ways, trips._ready)
        ),
        Component("round trips: Little's law", [(trips, "_little", _zero)], (trips._little,)),
        Component("round trips: by memory", [(trips, "_by_memory", _zero)], (trips._by_memory,)),
        Component("idle: head (see late first B's)", [(idle, "head", 0.0)]),
        Component("idle: tail", [(_LOWER_BOUND.Relaxation, "after_last_f", _zero)]),
        Component("idle: what follows", [(_LOWER_BOUND, "after_last_b", _none_follow)]),
        Component("idle: order of stages", [(idle, "_forward_blocks", _unordered)], (idle._forward_blocks,)),
        Component("idle: whole units", [(idle, "_beside_the_first", _cut)], (idle._beside_the_first,)),
    ]


def _zero(*_: object) -> float:
    return 0.0


def _floor(relaxation: object, idles: object, objective: object, floor: float) -> float:
    return floor


def _none_follow(relaxation: Any, objective: str) -> list[float]:
    return [0.0] * relaxation.problem.num_ranks


def _unordered(self: Any) -> list[tuple[float, float]]:
    return [(stage.saved, stage.f) for stage in self.stages]


def _cut(self: Any) -> float:
    return max(0.0, self.limit - sum(stage.saved for stage in self.stages))


def cases() -> Iterator[tuple[str, Problem]]:
    """The cells, the V's, 100 heterogeneous pipelines, and pipelines with less memory than 1F1B needs.

    equal saved: heterogeneous in times, but each stage holds the same.
    """
    cells = list(targets.one_per_rank())
    for cell in (*cells, *targets.in_a_v()):
        yield "cells" if cell.placement == "one" else "V", targets.problem_of(cell)
    for instance in map(heterogeneous.draw, range(100)):
        yield instance.placement, heterogeneous.problem_of(instance)
        tight = heterogeneous.with_little_memory(instance)
        yield f"low {instance.placement}", heterogeneous.problem_of(tight)
        alike = replace(instance, costs=replace(instance.costs, saved=1.0, deferred=0.5))
        yield "equal saved", heterogeneous.problem_of(heterogeneous.with_little_memory(alike))
    for share in (0.25, 0.5, 0.75):
        for cell in cells[::5]:
            yield "low one", targets.problem_of(cell._replace(memory=share * cell.num_ranks))
        for f, b, w, comm in targets.COLUMNS:
            costs = Costs(f=f / 2, b=b / 2, w=w / 2, comm=comm, saved=0.5, deferred=0.25)
            for placement in ("looped", "v"):
                problem = Problem.placed(8, 24, costs=costs, memory_limit=share * 8, placement=placement)
                yield f"low {placement}", problem


def ablate_bounds(only: str) -> None:
    """Print the table for the arguments whose name contains `only`."""
    kinds, problems = zip(*cases(), strict=True)
    numbers = Counter(kinds)
    whole = [bound_of(problem).value for problem in problems]
    print("cases whose bound falls without the argument, and the largest fall")
    columns = "".join(f"{f'{kind} ({number})':>16}" for kind, number in numbers.items())
    print(f"{'without':<34}{'lines':>5}{columns}")
    for component in components():
        if only not in component.name:
            continue
        with component.removed():
            without = [bound_of(problem).value for problem in problems]
        falls = [1 - least / most for least, most in zip(without, whole, strict=True)]
        columns = ""
        for kind in numbers:
            fallen = [
                fall for fall, other in zip(falls, kinds, strict=True) if other == kind and fall > _SMALL
            ]
            columns += f"{f'{len(fallen)} ({max(fallen):.1%})' if fallen else '-':>16}"
        print(f"{component.name:<34}{component.lines or '':>5}{columns}", flush=True)
