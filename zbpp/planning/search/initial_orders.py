"""Plans to begin with: the families, the paper's planner, and one that always fits.

W's may also be inserted anew into a family's order of F's and B's, event by event: into waits, and to free
memory (`insert_weight_grads`). With exchanges of experts W's are postponed (`postponed_plans`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate

from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Plan, Problem, one_by_one
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.paper_planner import paper_plan
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.timetable import Op, PlanError, Timetable

# Gives F's and B's in order, per rank; empty if the family can't have so many ranks and microbatches.
MakeOrder = Callable[[Problem], list[list[int]]]

_LEAST_WAITS = (1.0, 0.5, 0.0)  # see insert_weight_grads
_MOST_REBUILT = 12  # plans
_MOST_TIME = 0.25  # share of the time for trying orders
_MOST_PLACES = 3  # by which a W is postponed


def initial_plans(problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Whole plans within memory, with their objective; at least one."""
    for plan in [one_by_one(problem), *_by_paper_planner(problem), *_by_families(problem)]:
        apart = split(problem, plan)
        tried = [plan] if apart == plan else [plan, apart]
        if problem.has_exchange:
            tried += postponed_plans(problem, apart)
        for each in tried:
            value = problem.value_of_plan(each)
            if value < math.inf:
                yield value, each


def postponed_plans(problem: Problem, plan: Plan) -> list[Plan]:
    """A plan without BW, with W's one place later, two, and three: each rank as far as memory allows.

    So W's are pending when F and B exchange tokens among experts:

        rank 0   F2 B0 W0 F3 B1 W1 F4 B2 W2      families run a W at once: none is pending in F and B
                 F2 B0 F3 B1 W0 F4 B2 W1 W2      one place later: W0 runs in the exchanges of F3 and B1

    A W at the place of the rank's next W costs one `deferred` of memory. One place is enough to have a W
    pending in every exchange; more places fill exchanges that are longer than a W.
    """
    return [
        [_within_memory(problem, rank, row, places) for rank, row in enumerate(plan)]
        for places in range(1, _MOST_PLACES + 1)
    ]


def _within_memory(problem: Problem, rank: int, row: list[int], places: int) -> list[int]:
    """The row with W's as many places later, or fewer."""
    for fewer in range(places, 0, -1):
        later = _later(problem, row, fewer)
        levels = accumulate(problem.memory[a] for a in later)
        if max(levels) <= problem.ceilings[rank]:
            return later
    return row


def _later(problem: Problem, row: list[int], places: int) -> list[int]:
    """Each W at the place of the W that comes `places` W's later; the last ones at the end."""
    new: list[int] = []
    waiting: list[int] = []
    for a in row:
        if op_of(a // problem.num_units) != Op.W:
            new.append(a)
            continue
        waiting.append(a)
        if len(waiting) > places:
            new.append(waiting.pop(0))
    return new + waiting


def rebuilt_plans(problem: Problem, deadline: Deadline) -> list[Plan]:
    """Orders of families with their W's inserted anew: the best dozen, best first."""
    plans: list[Plan] = []
    seen: set[float] = set()
    for small_value, least_wait, make_order in _ranked(problem, deadline):
        if len(plans) == _MOST_REBUILT or deadline.over:
            break
        if small_value in seen:
            continue
        seen.add(small_value)
        order = make_order(problem)
        value, plan = insert_weight_grads(problem, order, least_wait) if order else (math.inf, [])
        if value < math.inf:
            plans.append(plan)
    return plans


def _ranked(problem: Problem, deadline: Deadline) -> list[tuple[float, float, MakeOrder]]:
    """(objective for few microbatches, least wait, order) of what fits, best first."""
    small = problem.with_microbatches(min(problem.num_microbatches, 3 * problem.num_ranks))
    found: list[tuple[float, float, MakeOrder]] = []
    met: list[list[list[int]]] = [[]]  # families may have the same order
    for make_order in orders(problem):
        order = make_order(small)
        if order not in met:
            met.append(order)
            for least_wait in _LEAST_WAITS:
                value, _ = insert_weight_grads(small, order, least_wait)
                if value < math.inf:
                    found.append((value, least_wait, make_order))
        if deadline.over or deadline.fraction > _MOST_TIME:
            break
    return sorted(found, key=lambda each: each[0])


def _by_paper_planner(problem: Problem) -> list[Plan]:
    """Empty where the paper's planner does not apply."""
    if problem.placement != "one" or problem.num_slices > 1:
        return []
    try:
        return [paper_plan(problem)]
    except PlanError:
        return []  # it has no whole backwards, which need less


def _by_families(problem: Problem) -> Iterator[Plan]:
    """The plans of this placement's families, whether they fit the memory or not."""
    for family in _own_families(problem):
        plan = _family_plan(family, problem)
        if plan:
            yield plan


def orders(problem: Problem) -> Iterator[MakeOrder]:
    """Functions that make an order: one per family with this placement."""
    for family in _own_families(problem):
        yield partial(_family_order, family)


def _own_families(problem: Problem) -> Iterator[Callable[..., Timetable]]:
    """The families with this placement, as one rank or two show it, cheaply."""
    per_rank = problem.num_stages // problem.num_ranks
    num_ranks = min(problem.num_ranks, 2)  # on one rank a V is a loop, too
    own = place_stages(num_ranks, problem.placement, per_rank)
    for family in FAMILIES.values():
        if "stages_per_rank" in inspect.signature(family).parameters:
            family = partial(family, stages_per_rank=per_rank)
        with suppress(PlanError):  # a family that refuses these numbers is left out
            if family(num_ranks, 4).rank_of == own:
                yield family


def _family_plan(family: Callable[..., Timetable], problem: Problem) -> Plan:
    """Empty if the family can't have these numbers of ranks and microbatches."""
    try:
        counts = problem.num_ranks, problem.num_microbatches
        return problem.plan_of(family(*counts, num_slices=problem.num_slices))
    except PlanError:
        return []


def _family_order(family: Callable[..., Timetable], problem: Problem) -> list[list[int]]:
    plan = split(problem, _family_plan(family, problem))
    return [[a for a in row if op_of(a // problem.num_units) != Op.W] for row in plan]


def split(problem: Problem, plan: Plan) -> Plan:
    """Each BW as B and W, one after the other."""
    number = problem.num_units
    rows: Plan = []
    for row in plan:
        rows.append([])
        for a in row:
            f = a - op_of(a // number) * number
            is_whole = op_of(a // number) == Op.BW
            rows[-1] += (f + Op.B * number, f + Op.W * number) if is_whole else (a,)
    return rows


F, B, W, BW = map(int, Op)


def insert_weight_grads(problem: Problem, orders: list[list[int]], least_wait: float) -> tuple[float, Plan]:
    """F's and B's (as ids) in the order given per rank, W's added: objective and plan.

    A rank without memory for its next action runs a W. A rank that must wait runs a W if the wait is
    at least `least_wait` times as long as the W: with 0 no wait stays idle while there is a W, with
    1 no W delays anything. While the sender of a message has not started, the wait is estimated
    as the sender's duration plus the message's. The objective is inf if the order can't run, or not
    within memory.
    """
    insertion = _Insertion(problem, orders, least_wait)
    return insertion.run(), insertion.plan


class _Insertion:
    """Events in order of time: a rank is free, or the message that a rank waits for arrives."""

    def __init__(self, problem: Problem, orders: list[list[int]], least_wait: float) -> None:
        self.problem, self.orders, self.least_wait = problem, orders, least_wait
        self.number = problem.num_units
        messages = problem.messages
        # A gradient may come from a B or a BW, and go to either. Orders hold B's only; B stands first here.
        self.sender, self.receiver = (
            [kinds[0] if kinds else None for kinds in each] for each in (messages.senders, messages.receivers)
        )
        self.latency = problem.latency
        ranks = range(problem.num_ranks)
        self.plan: Plan = [[] for _ in ranks]
        self.reached = [0 for _ in ranks]  # place in the order
        self.level = [0.0 for _ in ranks]  # of memory
        self.free = [0.0 for _ in ranks]  # end of the last action
        self.pending: list[list[int]] = [[] for _ in ranks]  # W's, the oldest last
        self.occupied: dict[tuple[int, int], float] = {}  # until when the link of two ranks is
        self.arrival: dict[int, float] = {}  # of the message for an action, if its sender has started
        self.waiting: dict[int, int] = {}  # action whose sender has not started -> its rank
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> float:
        while self.events:
            self._step(*heappop(self.events))
        if any(at < len(row) for at, row in zip(self.reached, self.orders, strict=True)) or any(self.pending):
            return math.inf
        return max(end - offset for end, offset in zip(self.free, self.problem.offsets, strict=True))

    def _step(self, now: float, rank: int) -> None:
        """A rank may choose its next action."""
        order, at, pending = self.orders[rank], self.reached[rank], self.pending[rank]
        if at == len(order):
            if pending:
                self._run_w(now, rank)
            return
        action = order[at]
        kind = action // self.number
        if self.level[rank] + self.problem.memory[action] > self.problem.ceilings[rank]:
            if pending:
                self._run_w(now, rank)
            return  # with nothing to free, the plan ends here
        arrival = 0.0 if self.sender[kind] is None else self.arrival.get(action, math.inf)
        if arrival <= now:
            self._run_next(now, rank, action, kind)
        elif pending and self._wait(now, arrival, action) >= self.least_wait * self._next_w(rank):
            self._run_w(now, rank)
        elif arrival < math.inf:
            heappush(self.events, (arrival, rank))
        else:
            self.waiting[action] = rank

    def _wait(self, now: float, arrival: float, action: int) -> float:
        """How long the message for an action is still on its way, at least."""
        if arrival < math.inf:
            return arrival - now
        kind = action // self.number
        sender = self.sender[kind]
        sent_in = 0.0 if sender is None else self.problem.duration[action + (sender - kind) * self.number]
        return self.latency(action) + sent_in

    def _next_w(self, rank: int) -> float:
        return self.problem.duration[self.pending[rank][-1]]

    def _run_next(self, now: float, rank: int, action: int, kind: int) -> None:
        self._run(now, rank, action, kind)
        self.reached[rank] += 1
        if op_of(kind) == B:
            self.pending[rank].insert(0, action + (W - B) * self.number)

    def _run_w(self, now: float, rank: int) -> None:
        action = self.pending[rank].pop()
        self._run(now, rank, action, action // self.number)

    def _run(self, now: float, rank: int, action: int, kind: int) -> None:
        self.free[rank] = end = now + self.problem.duration[action]
        self.level[rank] += self.problem.memory[action]
        self.plan[rank].append(action)
        heappush(self.events, (end, rank))
        receiver = self.receiver[kind]
        if receiver is not None:
            target = action + (receiver - kind) * self.number
            self._send(now, target, self._gone(rank, kind, action % self.number, end) + self.latency(target))

    def _gone(self, rank: int, kind: int, unit: int, made: float) -> float:
        """When the link begins to send the message of an action, where messages occupy links; else `made`."""
        route = self.problem.stage_costs.routes[kind] if self.problem.has_queues else None
        if route is None:
            return made
        link = rank, route.receiver
        begins = max(made, self.occupied.get(link, 0.0))
        self.occupied[link] = begins + route.busy * self.problem.length(unit)
        return begins

    def _send(self, now: float, target: int, arrival: float) -> None:
        """Note when a message will arrive, as its sender starts; a rank that waits for it chooses again."""
        self.arrival[target] = arrival
        if target in self.waiting:
            heappush(self.events, (now, self.waiting.pop(target)))
