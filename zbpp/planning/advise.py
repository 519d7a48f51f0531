"""What would have made a measured step faster: another schedule, more microbatches, another cut.

All three are simulated with the costs that the step was measured to have. Memory is counted in activations of
one rank's share of the model, as `zbpp plan` does without measured bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbpp.families import FAMILIES
from zbpp.partition import loads, partition
from zbpp.planning.plan import plan
from zbpp.planning.rank_costs import RankCosts
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Op, PlanError, Timetable

LEAST_GAIN = 0.02  # a smaller share of the step's time is not worth a change
_MORE_MEMORY = 1.05  # from here on a plan needs more memory than the one that ran
_MOST_ACTIONS = 100_000  # plans with more take seconds to simulate


class Advice(NamedTuple):
    """One change. kind: "balance", "schedule" or "microbatches"; setting: what to write.

    makespan: of a step with this change, in ms, as simulated. gain: the share of the time per microbatch that
    it saves. memory: activations at the peak, as a multiple of what the plan that ran holds.
    """

    kind: str
    setting: str
    makespan: float
    gain: float
    memory: float

    def __str__(self) -> str:
        """A sentence with the figures."""
        percent = f"{100 * self.gain:.0f} %"
        if self.kind == "balance":
            return (
                f"Stages are out of balance: {self.setting} would shorten the simulated step by {percent}, "
                f"to {self.makespan:.3g} ms."
            )
        if self.kind == "schedule":
            more = f", with {self.memory:.1f} times the activations" * (self.memory > _MORE_MEMORY)
            return (
                f"{self.setting} would shorten the simulated step by {percent}, to {self.makespan:.3g} ms"
                f"{more}."
            )
        return (
            f"{self.setting} would take {percent} less time per microbatch, with a batch twice as large "
            "(or microbatches half as large, if the devices compute them as efficiently)."
        )


def advise(
    timetable: Timetable, costs: Costs, *, schedule: str, layers_per_stage: Sequence[int] | None = None
) -> list[Advice]:
    """At most one advice of each kind, the largest gain first; none below LEAST_GAIN.

    costs: of the timetable's stages, in ms. schedule: the timetable's name; more microbatches are tried if it
    is in FAMILIES. layers_per_stage: None where it is not known; then no other cut is tried,
    and schedules with as many stages alone.
    """
    if timetable.num_ranks == 1 or sum(map(len, timetable.rows)) > _MOST_ACTIONS:
        return []
    usual = _for_rank_shares(timetable, costs)
    ran = simulate(timetable, usual.per_stage(timetable.num_stages, timetable.num_ranks))
    found = [
        *_balanced(timetable, costs, ran, layers_per_stage),
        *_other_schedule(timetable, usual, ran, layers_per_stage),
        *_more_microbatches(timetable, usual, schedule),
    ]
    return sorted((each for each in found if each.gain >= LEAST_GAIN), key=lambda each: -each.gain)


def _for_rank_shares(timetable: Timetable, costs: Costs) -> RankCosts:
    """The times as costs that other numbers of stages have, too; memory in activations of a rank's share."""
    times = costs.per_stage(timetable.num_stages)
    duration = times.duration
    return RankCosts(
        f=duration[Op.F], b=duration[Op.B], w=duration[Op.W], bw=duration[Op.BW], comm=times.comm
    )


# ---------------------------------------------------------------- another cut


def _balanced(
    timetable: Timetable, costs: Costs, ran: Timeline, counts: Sequence[int] | None
) -> Iterator[Advice]:
    """The cut with the lightest heaviest rank, if it is another one."""
    if counts is None or min(counts) < 1:
        return
    durations = costs.per_stage(timetable.num_stages).duration
    whole = [sum(each) for each in zip(durations[Op.F], durations[Op.BW], strict=True)]
    layers, first, last = layer_costs(whole, counts)
    better = partition(layers, len(counts), first=first, last=last, rank_of=timetable.rank_of)
    if better == list(counts):
        return

    def cut_again(op: Op) -> list[float]:
        layers, first, last = layer_costs(durations[op], counts)
        return loads(better, layers, first=first, last=last)

    others = Costs(
        f=cut_again(Op.F), b=cut_again(Op.B), w=cut_again(Op.W), bw=cut_again(Op.BW), comm=costs.comm
    )
    makespan = simulate(timetable, others).makespan
    text = f"model.layers_per_stage=[{','.join(map(str, better))}]"
    yield Advice("balance", text, makespan, _gain(makespan, ran.makespan), 1.0)


def layer_costs(stages: Sequence[float], counts: Sequence[int]) -> tuple[list[float], float, float]:
    """(cost of each layer, first, last) for `partition`, from the measured cost of each stage.

    A stage's layers are taken to be alike. What the first and last stage cost beyond layers as heavy as the
    average between them counts as embedding and head; with two stages nothing lies between them, and
    nothing counts so.
    """
    between = [cost / count for cost, count in zip(stages[1:-1], counts[1:-1], strict=True)]
    extra = [0.0] * len(stages)
    for end in (0, -1) if between else ():
        extra[end] = max(0.0, stages[end] - counts[end] * sum(between) / len(between))
    layers = [
        (cost - beside) / count
        for cost, beside, count in zip(stages, extra, counts, strict=True)
        for _ in range(count)
    ]
    return layers, extra[0], extra[-1]


# ---------------------------------------------------------------- another plan


def _other_schedule(
    timetable: Timetable, costs: RankCosts, ran: Timeline, counts: Sequence[int] | None
) -> Iterator[Advice]:
    """The fastest schedule that holds no more activations; if none is faster, the fastest of all."""
    most_stages = timetable.num_stages if counts is None else sum(counts)
    tried = []
    for name in FAMILIES:
        other = _simulated(name, timetable.num_ranks, timetable.num_microbatches, costs)
        if other is None or other.timetable.num_stages > most_stages:
            continue
        if counts is None and other.timetable.num_stages != timetable.num_stages:
            continue
        memory = max(other.peak_memory) / max(ran.peak_memory)
        gain = _gain(other.makespan, ran.makespan)
        tried.append(Advice("schedule", f"schedule={name}", other.makespan, gain, memory))
    small = [each for each in tried if each.memory <= _MORE_MEMORY and each.gain >= LEAST_GAIN]
    if small or tried:
        yield max(small or tried, key=lambda each: each.gain)


def _more_microbatches(timetable: Timetable, costs: RankCosts, schedule: str) -> Iterator[Advice]:
    """Twice as many microbatches under the same schedule."""
    if schedule not in FAMILIES:
        return
    num_ranks, number = timetable.num_ranks, timetable.num_microbatches
    ran, more = (_simulated(schedule, num_ranks, each, costs) for each in (number, 2 * number))
    if ran is None or more is None:
        return
    yield Advice(
        "microbatches",
        f"num_microbatches={2 * number}",
        more.makespan,
        _gain(more.makespan / 2, ran.makespan),
        max(more.peak_memory) / max(ran.peak_memory),
    )


def _simulated(name: str, num_ranks: int, num_microbatches: int, costs: RankCosts) -> Timeline | None:
    """The timeline of a family with these costs; None if it refuses these numbers."""
    try:
        timetable = plan(name, num_ranks, num_microbatches)
        return simulate(timetable, costs.per_stage(timetable.num_stages, num_ranks))
    except PlanError:
        return None


def _gain(after: float, before: float) -> float:
    return 1 - after / before if before > 0 else 0.0
