"""Conclusions from an answer of `choose`, as sentences with their figures.

A proved sentence compares a plan that was found with a bound, so no better plan can make it wrong. The other
sentences compare two plans that were found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zbpp.families import FAMILIES
from zbpp.planning.answer import Answer, Choice
from zbpp.planning.bounds import Bound
from zbpp.planning.memory_limit import MemoryLimit, memory_text
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.request import SWEEP_PLACEMENTS
from zbpp.planning.tolerance import EQUAL
from zbpp.render.table import digits
from zbpp.schedule.simulate import Timeline

SHAPES = {"one": "one stage per rank", "looped": "a loop of two stages per rank", "v": "a V"}
_NEARLY = 0.01  # more memory brings nearly nothing if it can shorten the step by this share at most


@dataclass(frozen=True)
class Statement:
    """A sentence; claim: what kind of conclusion it is."""

    claim: str
    text: str
    proved: bool


def statements(answer: Answer) -> list[Statement]:
    """All conclusions of this file that hold for the answer."""
    return [
        *_optimal_families(answer),
        *_beaten_placements(answer),
        *_twice_the_memory(answer),
        *_sufficient_limits(answer),
        *_splitting(answer),
        *_post_validation(answer),
    ]


def limit_text(answer: Answer, limit: MemoryLimit) -> str:
    """A memory limit as `10 (1.25p)`: in parentheses how much that is of 1F1B's memory, which is 1.00p."""
    if limit is None:
        return "any memory"
    if not isinstance(limit, int | float):
        return "the given memory"
    request = answer.request
    unit, text = request.memory_of_1f1b, memory_text(limit, request.costs.memory_unit)
    return f"{text} ({(limit - request.static) / unit:.2f}p)" if unit else text


def _undercuts(best: Choice, bound: Bound) -> bool:
    """Whether a plan takes less time than any plan that the bound holds for."""
    return best.value < bound.value * (1 - EQUAL)


def _ms(time: float) -> str:
    return f"{digits(time)} ms"


def _optimal_families(answer: Answer) -> Iterator[Statement]:
    """Families that no plan of the same placement and memory beats."""
    request = answer.request
    for candidate in answer.candidates:
        peak = max(candidate.timeline.peak_memory)
        bound = request.bound(candidate.placement, peak)
        if candidate.name not in FAMILIES or bound is None:
            continue
        choice = Choice(candidate, request.objective, bound)
        if choice.proved_optimal:
            text = (
                f"{candidate.name} is optimal at {limit_text(answer, peak)} with "
                f"{SHAPES[candidate.placement]}: {request.objective} {_ms(choice.value)}, which is the bound"
            )
            yield Statement("optimal family", text, proved=True)


def _beaten_placements(answer: Answer) -> Iterator[Statement]:
    """Placements with which no plan under the same limit is as good as the best plan found."""
    request = answer.request
    limit = request.memory_limit
    best = answer.best_of_all(limit)
    for placement in PLACEMENTS if best else ():
        bound = request.bound(placement, limit)
        if best and bound and _undercuts(best, bound):
            text = (
                f"at {limit_text(answer, limit)} {SHAPES[best.candidate.placement]} takes {_ms(best.value)}; "
                f"{SHAPES[placement]} takes {_ms(bound.value)} or more, whatever the plan"
            )
            yield Statement("beaten placement", text, proved=True)


def _twice_the_memory(answer: Answer) -> Iterator[Statement]:
    """The smallest limit below 2p, twice 1F1B's memory, at which a V beats zb_2p.

    Proved if the V beats every plan with one stage per rank at 2p.
    """
    request = answer.request
    twice, paper = request.multiple(2), answer.named("zb_2p")
    bound = request.bound("one", twice)
    theirs = paper.value(request.objective) if paper else 0.0
    for limit in request.limits:
        choice = answer.best("v", limit)
        if not choice or not bound or not isinstance(limit, int | float) or limit >= twice:
            continue
        mine = f"a V at {limit_text(answer, limit)} takes {_ms(choice.value)}"
        there = f"at {limit_text(answer, twice)}"
        if choice.value < bound.value * (1 - EQUAL):
            text = f"{mine}; one stage per rank takes {_ms(bound.value)} or more {there}, whatever the plan"
            if paper:
                text += f" (zb_2p: {_ms(theirs)})"
            yield Statement("V beats 2p", text, proved=True)
            return
        if choice.value < theirs * (1 - EQUAL):
            yield Statement("V beats 2p", f"{mine}; zb_2p takes {_ms(theirs)} {there}", proved=False)
            return


def _sufficient_limits(answer: Answer) -> Iterator[Statement]:
    """For each placement the limit above which nothing, or nearly nothing, can be gained.

    A plan found under that limit meets, or nearly meets, the bound for any memory.
    """
    request = answer.request
    for placement in SWEEP_PLACEMENTS:
        free = request.bound(placement, None)
        choices = [(limit, answer.best(placement, limit)) for limit in request.limits]
        for most in (EQUAL, _NEARLY):
            enough = [
                (limit, choice)
                for limit, choice in choices
                if free and choice and limit is not None and choice.value <= free.value * (1 + most)
            ]
            if enough and free:
                limit, choice = enough[0]
                gain = "nothing" if most == EQUAL else f"at most {1 - free.value / choice.value:.2%}"
                text = (
                    f"{SHAPES[placement]}: more memory than {limit_text(answer, limit)} gains "
                    f"{gain}: {request.objective} "
                    f"{_ms(choice.value)} there, and {_ms(free.value)} or more with any memory"
                )
                yield Statement("sufficient limit", text, proved=True)
                break


def _splitting(answer: Answer) -> Iterator[Statement]:
    """Whether the best plan beats every plan of its placement that has whole backwards only."""
    request = answer.request
    best = answer.best_of_all(request.memory_limit)
    whole = best and request.bound(best.candidate.placement, request.memory_limit, splits=False)
    if best and whole and _undercuts(best, whole):
        text = (
            f"splitting pays: with whole backwards, {SHAPES[best.candidate.placement]} takes "
            f"{_ms(whole.value)} or more, whatever the plan"
        )
        yield Statement("splitting pays", text, proved=True)


def _post_validation(answer: Answer) -> Iterator[Statement]:
    """What a step costs with post-validation (optimizer.validation=after).

    Post-validation (arXiv:2401.10241, section 4) lets a rank go on before the other ranks have finished the
    step. Then a step costs the largest span of a rank, with the rank's reductions, instead of the makespan.
    """
    request = answer.request
    for limit in request.span_limits:
        span, makespan = answer.best_of_all(limit, "span"), answer.best_of_all(limit, "makespan")
        bounds = [request.bound(placement, limit, "makespan") for placement in PLACEMENTS]
        least = min((bound.value for bound in bounds if bound), default=0.0)
        cost = _largest_span_with_reductions(span.candidate.timeline) if span else math.inf
        if span and makespan and cost < makespan.value * (1 - EQUAL):
            shape = SHAPES[span.candidate.placement]
            text = (
                f"with post-validation (optimizer.validation=after) a step at {limit_text(answer, limit)} "
                f"costs its largest span, {_ms(cost)} ({shape}), instead of its makespan, "
                f"{_ms(makespan.value)}; no plan with these placements has a makespan below {_ms(least)}"
            )
            yield Statement("post-validation pays", text, proved=cost < least * (1 - EQUAL))


def _largest_span_with_reductions(timeline: Timeline) -> float:
    """The largest over ranks of the time (ms) from a rank's first start to the end of its last reduction."""
    ends = [float(end[-1]) for end in timeline.ends]
    for each in timeline.reductions:
        ends[each.rank] = max(ends[each.rank], each.end)
    return max(end - float(start[0]) for start, end in zip(timeline.starts, ends, strict=True))
