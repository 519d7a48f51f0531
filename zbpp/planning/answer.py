"""What `choose` has found: all plans, which is best under which limit, how far each is from a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zbpp.planning.bounds import Bound, bound_of
from zbpp.planning.memory_limit import MemoryLimit, fits, limits_per_rank
from zbpp.planning.objective import objective_value
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.plan import placement_of, plan
from zbpp.planning.problem import Problem
from zbpp.planning.request import PlanningRequest
from zbpp.planning.schedules import takes_costs
from zbpp.planning.tolerance import EQUAL
from zbpp.planning.variants import Variant, best_variant
from zbpp.schedule.dataflow_arrays import op_of, producers, stage_of
from zbpp.schedule.simulate import Timeline
from zbpp.schedule.timetable import Op, PlanError, Timetable


@dataclass(frozen=True)
class Candidate:
    """A plan, and the name under which `plan` makes it."""

    name: str
    timeline: Timeline

    @property
    def placement(self) -> str:
        return placement_of(self.timeline.timetable)

    @property
    def title(self) -> str:
        """What to type after `zbpp plan` for this plan: its name; for zb_auto its placement, too."""
        return f"{self.name} --placement {self.placement}" if self.name == "zb_auto" else self.name

    @property
    def depends_on_costs(self) -> bool:
        """Whether the name alone is not enough for `plan` to make this timetable."""
        own = self.timeline.timetable
        return takes_costs(self.name) or own != plan(self.name, own.num_ranks, own.num_microbatches)

    def value(self, objective: str) -> float:
        return objective_value(self.timeline, objective)

    def fits(self, limit: MemoryLimit) -> bool:
        peaks = self.timeline.peak_memory
        return fits(peaks, limits_per_rank(limit, len(peaks)))


@dataclass(frozen=True)
class Choice:
    """A candidate, and the lower bound for its placement and a memory limit."""

    candidate: Candidate
    objective: str
    bound: Bound

    @property
    def value(self) -> float:
        return self.candidate.value(self.objective)

    @property
    def gap(self) -> float:
        return self.bound.gap(self.value)

    @property
    def proved_optimal(self) -> bool:
        return self.gap <= EQUAL


@dataclass(frozen=True)
class Answer:
    """All plans found for a request; refused: why a schedule has none, by its name."""

    request: PlanningRequest
    candidates: list[Candidate]
    refused: dict[str, PlanError]

    @property
    def ranked(self) -> list[Choice]:
        """The plans that fit the request's limit, best first; of zb_auto's only the best per placement."""
        limit, objective = self.request.memory_limit, self.request.objective
        fitting = [each for each in self.candidates if each.fits(limit)]
        searched = [
            min(found, key=lambda each: each.value(objective))
            for placement in PLACEMENTS
            if (found := [each for each in fitting if each.name == "zb_auto" and each.placement == placement])
        ]
        shown = [each for each in fitting if each.name != "zb_auto"] + searched
        return sorted(map(self._choice, shown), key=_worth)

    @property
    def too_large(self) -> list[Candidate]:
        """The plans that don't fit, without zb_auto's, the least memory first."""
        limit = self.request.memory_limit
        rest = [each for each in self.candidates if each.name != "zb_auto" and not each.fits(limit)]
        return sorted(rest, key=lambda each: max(each.timeline.peak_memory))

    @cached_property
    def with_variants(self) -> list[tuple[Candidate, Variant]]:
        """Each schedule with the offload and recompute that suit it best within the limit, best first.

        A schedule is missing that doesn't fit with any of them; of zb_auto the best plan per placement stays.
        """
        request = self.request
        shown: dict[str, tuple[Candidate, Variant]] = {}
        for each in self.candidates:
            costs = request.costs_for(each.timeline.timetable.num_stages)
            found = best_variant(each.timeline, costs, request.memory_limit, request.objective, request.kept)
            known = shown.get(each.title)
            if found is not None and (known is None or self._time(found) < self._time(known[1])):
                shown[each.title] = each, found
        return sorted(shown.values(), key=lambda pair: self._time(pair[1]))

    def _time(self, variant: Variant) -> float:
        return float(f"{objective_value(variant.timeline, self.request.objective):.9g}")

    def best(self, placement: str, limit: MemoryLimit, objective: str | None = None) -> Choice | None:
        """The best plan with this placement that fits; None if there is none."""
        objective = objective or self.request.objective
        bound = self.request.bound(placement, limit, objective)
        fitting = [each for each in self.candidates if each.placement == placement and each.fits(limit)]
        if bound is None or not fitting:
            return None
        return Choice(min(fitting, key=lambda each: each.value(objective)), objective, bound)

    def best_of_all(self, limit: MemoryLimit, objective: str | None = None) -> Choice | None:
        """The best plan that fits, whatever its placement."""
        found = [self.best(placement, limit, objective) for placement in PLACEMENTS]
        return min(filter(None, found), key=lambda choice: choice.value, default=None)

    def named(self, name: str) -> Candidate | None:
        return next((each for each in self.candidates if each.name == name), None)

    def _choice(self, candidate: Candidate) -> Choice:
        """The bound is for the timetable's own rank_of: a placement without a name has one, too."""
        request, timetable = self.request, candidate.timeline.timetable
        costs, objective = request.costs_for(timetable.num_stages), request.objective
        problem = Problem(
            timetable.rank_of, timetable.num_microbatches, costs, request.memory_limit, objective
        )
        return Choice(candidate, objective, bound_of(problem))


def _worth(choice: Choice) -> tuple[float, bool, int]:
    """A key to sort choices by: the best comes first.

    The shorter time wins. Among equal times a plan that does not depend on costs wins, then the plan with
    fewer messages.
    """
    name, timetable = choice.candidate.name, choice.candidate.timeline.timetable
    return float(f"{choice.value:.9g}"), takes_costs(name), num_messages(timetable)


def num_messages(timetable: Timetable) -> int:
    """Messages of a step: one per microbatch for each value that one rank makes and another consumes."""
    rank_of = timetable.rank_of
    consumed = [
        (stage_of(kind), made_by[0])
        for kind, values in enumerate(producers(timetable.num_stages))
        for made_by in values
        if op_of(kind) != Op.BW  # a plan has BW or B, which consume the same values
    ]
    remote = [stage for stage, producer in consumed if rank_of[stage] != rank_of[stage_of(producer)]]
    return len(remote) * timetable.num_microbatches
