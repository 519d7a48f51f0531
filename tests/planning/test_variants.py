"""Plans with offload and recompute under a memory limit: against all choices there are."""

from itertools import chain, combinations

import pytest

from zbpp import Costs, PlanError, plan, simulate
from zbpp.planning import PlanningRequest, RankCosts, choose
from zbpp.planning.variants import best_variant, variants
from zbpp.render import render_advice
from zbpp.schedule import choose_offload

KEPT = 0.25


def subsets(items):
    return map(frozenset, chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


def by_hand(timetable, costs, chosen, is_offloaded):
    """(makespan, each rank's peak): the F of the chosen stages in their B, and all of `saved` there again."""
    num, per = timetable.num_stages, costs.per_stage(timetable.num_stages)
    f, b, bw = (list(per.duration[op]) for op in per.duration if str(op) in ("F", "B", "BW"))
    saved, host = list(per.held["saved"]), list(per.host)
    again = [0.0] * num
    for stage in chosen:
        b[stage] += f[stage]
        bw[stage] += f[stage]
        again[stage] = (1 - KEPT) * saved[stage]
        saved[stage] *= KEPT
        host[stage] = 0.0
    own = {**costs.numbers, "b": b, "bw": bw, "saved": saved, "host": host}
    changed = type(costs)(**own)
    offload = choose_offload(simulate(timetable, changed), changed) if is_offloaded else ()
    timeline = simulate(timetable, changed, offload)
    extra = [max(again[stage] for stage in timetable.stages_of(rank)) for rank in range(timetable.num_ranks)]
    return timeline.makespan, [peak + more for peak, more in zip(timeline.peak_memory, extra, strict=True)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("limit", [3.0, 4.5, 6.0, 9.0])
@pytest.mark.parametrize("static", [0.0, 1.0])
def test_the_best_variant_is_the_best_of_all(schedule, limit, static):
    timetable = plan(schedule, 2 if schedule == "zb_v" else 4, 6)
    num = timetable.num_stages
    costs = Costs(
        f=[2.0, 3, 2, 3][:num],
        b=3.0,
        w=2.0,
        saved=[2.0, 1, 1, 2][:num],
        host=[1.0, 2, 1, 2][:num],
        static=static,
    )
    found = {
        (chosen, is_offloaded): by_hand(timetable, costs, chosen, is_offloaded)
        for chosen in subsets(range(num))
        for is_offloaded in (False, True)
    }
    times = [time for time, peaks in found.values() if max(peaks) <= limit]
    best = best_variant(simulate(timetable, costs), costs, limit, "makespan", KEPT)
    if not times:
        assert best is None
        return
    assert best.timeline.makespan == pytest.approx(min(times))
    time, peaks = found[best.recomputed, best.is_offloaded]
    assert (best.timeline.makespan, list(best.timeline.peak_memory)) == (time, pytest.approx(peaks))


def test_without_host_costs_and_limit_a_plan_has_no_variants():
    timetable = plan("zb_h1", 4, 8)
    (only,) = variants(simulate(timetable), Costs(), None)
    assert only.title == "nothing"


def test_choose_shows_the_best_variant_of_each_schedule():
    costs = RankCosts(f=10, b=12, w=8, host=6)
    answer = choose(
        PlanningRequest(num_ranks=4, num_microbatches=8, costs=costs, memory_limit=2, time_limit=1)
    )
    shown = {candidate.title: variant for candidate, variant in answer.with_variants}
    assert [each.timeline.makespan for each in shown.values()] == sorted(
        each.timeline.makespan for each in shown.values()
    )
    assert shown["v_half"].title == "offload"  # without it v_half holds 3
    assert "v_half" in [each.name for each in answer.too_large]
    assert all(each.fits(2) for each in shown.values())
    assert "v_half" in str(render_advice(answer)).split("with activation offload")[1].split("needs more")[0]


def test_a_share_out_of_range_is_refused():
    with pytest.raises(PlanError, match="kept=2: write a share"):
        PlanningRequest(num_ranks=2, num_microbatches=2, kept=2)
