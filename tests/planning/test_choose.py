"""Which schedule to use: what is said is true of every plan, and nothing is said that isn't."""

import os
import random
import re
import sys
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from time import monotonic, sleep

import pytest

from helpers.exact import solve
from zbpp.families import FAMILIES
from zbpp.planning import SCHEDULES, Answer, PlanningRequest, RankCosts, choose, plan
from zbpp.planning.answer import Candidate, num_messages
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import LocalSearch
from zbpp.planning.side_by_side import side_by_side
from zbpp.planning.tolerance import EQUAL
from zbpp.render import render_advice, statements
from zbpp.schedule import Costs, PlanError, Send, Timetable, lower, simulate

DATA = Path(__file__).parent.parent / "reference"
EQUAL_TIMES = RankCosts(f=10, b=10, w=10)
UNEVEN = RankCosts(f=10, b=12, w=7, comm=1)
LONG_B = RankCosts(f=10, b=16, w=8, comm=2)
LONG_W = RankCosts(f=10, b=8, w=14, comm=1)


def request(costs, **options):
    return PlanningRequest(
        **{"num_ranks": 8, "num_microbatches": 24, "time_limit": 2.0, "costs": costs, **options}
    )


@pytest.fixture(scope="module")
def answers():
    """With 1F1B's memory; the search has far too little time to do much."""
    costs = {"EQUAL_TIMES": EQUAL_TIMES, "UNEVEN": UNEVEN, "LONG_B": LONG_B}
    return {name: choose(request(each, memory_limit=8)) for name, each in costs.items()}


def texts(answer, claim):
    return [each.text for each in statements(answer) if each.claim == claim and each.proved]


def known(asked, *timetables):
    """An answer from given plans, without any search."""
    found = [
        Candidate(name, simulate(timetable, asked.costs_for(timetable.num_stages)))
        for name, timetable in timetables
    ]
    return Answer(asked, found, {})


def to_the_bound(asked, limits, **options):
    """zb_auto with one stage per rank: where it soon reaches the bound, whatever the machine."""
    return [
        (
            "zb_auto",
            plan("zb_auto", 8, 24, costs=asked.costs_for(8), memory_limit=limit, time_limit=60, **options),
        )
        for limit in limits
    ]


# ---------------------------------------------------------------- the headlines


@pytest.mark.parametrize(("name", "makespan"), [("EQUAL_TIMES", 790), ("UNEVEN", 829), ("LONG_B", 998)])
def test_zb_h1_is_optimal_at_1f1bs_memory(answers, name, makespan):
    text = (
        f"zb_h1 is optimal at 8 (1.00p) with one stage per rank: makespan {makespan} ms, which is the bound"
    )
    assert text in texts(answers[name], "optimal family")


@pytest.mark.parametrize(
    ("costs", "enough", "makespan"),
    [(EQUAL_TIMES, "8 (1.00p)", 790), (UNEVEN, "12 (1.50p)", 773), (LONG_B, "14 (1.75p)", 900)],
)
def test_past_some_limit_nothing_is_gained(costs, enough, makespan):
    asked = request(costs)
    (text,) = texts(known(asked, *to_the_bound(asked, (8, 12, 14, 16))), "sufficient limit")
    assert text == (
        f"one stage per rank: more memory than {enough} gains nothing: makespan {makespan} ms there, "
        f"and {makespan} ms or more with any memory"
    )


def test_at_equal_times_a_v_needs_no_more_than_1f1bs_memory(answers):
    answer = answers["EQUAL_TIMES"]
    assert answer.best("v", 8).value == answer.best("v", None).bound.value == 755
    assert "a V: more memory than 8 (1.00p) gains nothing" in texts(answer, "sufficient limit")[1]
    assert texts(answer, "beaten placement") == [
        "at 8 (1.00p) a loop of two stages per rank takes 755 ms; one stage per rank takes 790 ms or more, "
        "whatever the plan"
    ]


@pytest.mark.parametrize(("name", "value", "bound"), [("EQUAL_TIMES", 755, 790), ("UNEVEN", 771, 773)])
def test_a_v_at_1f1bs_memory_beats_one_stage_per_rank_at_twice_that(answers, name, value, bound):
    (text,) = texts(answers[name], "V beats 2p")
    assert float(text.split(" takes ")[1].split(" ms")[0]) <= value
    assert f"one stage per rank takes {bound} ms or more at 16 (2.00p), whatever the plan" in text


def test_with_a_long_b_a_v_at_1_25p_beats_one_stage_per_rank_at_2p():
    """The plan was found by `plan.py zb_auto --placement v --memory-limit 10 --seed 2`, and is optimal."""
    asked = request(LONG_B)
    v = Timetable.parse((DATA / "v_at_1.25p.txt").read_text())
    zb_2p = plan("zb_auto", 8, 24, costs=asked.costs_for(8), memory_limit=16, search=False)
    answer = known(asked, ("zb_auto", v), ("zb_2p", zb_2p), ("zb_v", plan("zb_v", 8, 24)))
    assert texts(answer, "V beats 2p") == [
        "a V at 10 (1.25p) takes 894 ms; one stage per rank takes 900 ms or more at 16 (2.00p), "
        "whatever the plan (zb_2p: 922 ms)"
    ]
    assert answer.best("v", 10).proved_optimal


def test_a_v_that_only_beats_zb_2p_is_no_proof():
    """ZB-V takes 956.5 ms: less than the paper's plan, more than the bound of 933."""
    asked = request(RankCosts(f=8, b=17, w=11, comm=1))
    zb_2p = plan("zb_auto", 8, 24, costs=asked.costs_for(8), memory_limit=16, search=False)
    answer = known(asked, ("zb_v", plan("zb_v", 8, 24)), ("zb_2p", zb_2p))
    (found,) = [each for each in statements(answer) if each.claim == "V beats 2p"]
    assert not found.proved
    assert found.text == "a V at 8 (1.00p) takes 956.5 ms; zb_2p takes 963 ms at 16 (2.00p)"


def test_post_validation_pays_with_memory():
    """With a synchronous step, no placement gets below a V's bound at 2p."""
    asked = request(UNEVEN, memory_limit=16)
    answer = known(asked, *to_the_bound(asked, [16]), *to_the_bound(asked, [16], objective="span"))
    assert texts(answer, "post-validation pays") == [
        "with post-validation (optimizer.validation=after) a step at 16 (2.00p) costs its "
        "largest span, 714 ms (one stage per rank), instead of its makespan, 773 ms; no plan with these "
        "placements has a makespan below 738 ms"
    ]


def test_a_span_above_the_bound_on_makespans_is_no_proof():
    """zb_2p's 876 ms against its own makespan of 922; a V with a synchronous step might take 865."""
    asked = request(LONG_B, memory_limit=16)
    answer = known(
        asked, ("zb_2p", plan("zb_auto", 8, 24, costs=asked.costs_for(8), memory_limit=16, search=False))
    )
    (found,) = [each for each in statements(answer) if each.claim == "post-validation pays"]
    assert not found.proved
    assert "876 ms (one stage per rank)" in found.text
    assert "its makespan, 922 ms; no plan with these placements has a makespan below 865 ms" in found.text


# ---------------------------------------------------------------- nothing false


def test_zb_h1_is_not_called_optimal_where_it_is_not():
    """W longer than B: ZB-H1's W's delay the F's and B's that others wait for."""
    asked = request(LONG_W, memory_limit=8)
    answer = known(asked, ("zb_h1", plan("zb_h1", 8, 24)), ("1f1b", plan("1f1b", 8, 24)))
    assert texts(answer, "optimal family") == []


def test_what_is_called_optimal_is_no_longer_than_the_exact_solution():
    """Random costs, W > B among them; CP-SAT is the judge."""
    rng = random.Random(1)
    judged = 0
    for _ in range(6):
        costs = RankCosts(
            f=rng.randint(5, 12), b=rng.randint(5, 12), w=rng.randint(2, 14), comm=rng.choice([0, 1])
        )
        asked = PlanningRequest(num_ranks=2, num_microbatches=4, costs=costs)
        own = asked.costs_for(2)
        for name in ("1f1b", "zb_h1", "zb_h2", "gpipe"):
            answer = known(asked, (name, plan(name, 2, 4)))
            for _ in texts(answer, "optimal family"):
                (candidate,) = answer.candidates
                limit = max(candidate.timeline.peak_memory)
                rank_of = candidate.timeline.timetable.rank_of
                exact = solve(rank_of, 4, costs=own, memory_limit=limit, time_limit=20)
                assert candidate.timeline.makespan <= exact.value * (1 + EQUAL), (name, costs)
                judged += 1
    assert judged >= 6


def test_memory_that_brings_something_is_not_called_useless():
    asked = request(LONG_B)
    answer = known(asked, ("zb_h1", plan("zb_h1", 8, 24)))
    assert [each for each in statements(answer) if each.claim == "sufficient limit"] == []


def test_without_a_gain_post_validation_is_not_praised():
    asked = request(EQUAL_TIMES, memory_limit=8)
    answer = known(asked, ("zb_h1", plan("zb_h1", 8, 24)))
    assert [each for each in statements(answer) if each.claim == "post-validation pays"] == []


# ---------------------------------------------------------------- the answer


def test_everything_that_fits_is_ranked_and_the_rest_listed(answers):
    answer = answers["UNEVEN"]
    ranked, rest = answer.ranked, answer.too_large
    assert all(one.value <= other.value for one, other in pairwise(ranked))
    assert all(max(choice.candidate.timeline.peak_memory) <= 8 for choice in ranked)
    assert all(max(candidate.timeline.peak_memory) > 8 for candidate in rest)
    names = {choice.candidate.title for choice in ranked} | {candidate.name for candidate in rest}
    assert names == {*FAMILIES, "zb_1p", "zb_2p", *(f"zb_auto --placement {each}" for each in PLACEMENTS)}
    assert all(choice.gap >= -EQUAL for choice in ranked)


def test_the_search_is_never_worse_than_a_family(answers):
    for answer in answers.values():
        best = {choice.candidate.title: choice.value for choice in answer.ranked}
        for choice in answer.ranked:
            assert best[f"zb_auto --placement {choice.candidate.placement}"] <= choice.value * (1 + EQUAL)


def test_more_memory_is_never_worse(answers):
    answer = answers["LONG_B"]
    for placement in ("one", "v"):
        values = [answer.best(placement, limit).value for limit in answer.request.limits]
        assert all(one >= other for one, other in pairwise(values))


def test_a_placement_without_a_name_is_ranked_with_a_bound_of_its_own(monkeypatch):
    """Stages 0 and 1 on rank 0, 2 and 3 on rank 1: neither a loop nor a V."""
    monkeypatch.setitem(SCHEDULES, "blocked", lambda num_ranks, num_microbatches: timetable)
    timetable = Timetable.parse("0F0 1F0 1B0 0B0 1W0 0W0\n2F0 3F0 3B0 2B0 3W0 2W0")
    asked = PlanningRequest(num_ranks=2, num_microbatches=1, costs=UNEVEN)
    answer = known(asked, ("blocked", timetable), ("1f1b", plan("1f1b", 2, 1)))
    choices = {choice.candidate.name: choice for choice in answer.ranked}
    assert choices["blocked"].candidate.placement == "other"
    assert choices["blocked"].proved_optimal
    assert "blocked" in str(render_advice(answer))


def test_the_other_objective_can_be_asked_for():
    answer = choose(request(UNEVEN, memory_limit=16, objective="span", time_limit=1.0))
    best = answer.best("one", 16)
    assert best.value == best.candidate.timeline.max_span <= answer.named("zb_2p").timeline.max_span == 716


def test_the_limit_may_differ_between_ranks():
    limits = [8.0] * 4 + [5.0] * 4
    answer = choose(request(EQUAL_TIMES, memory_limit=limits, time_limit=0.5))
    for choice in answer.ranked:
        assert all(
            peak <= most for peak, most in zip(choice.candidate.timeline.peak_memory, limits, strict=True)
        )
    assert answer.request.limits[0] == limits


def test_costs_per_stage_are_the_same_model_in_every_placement():
    rng = random.Random(0)
    costs = RankCosts(f=[rng.uniform(1, 9) for _ in range(4)], b=[rng.uniform(1, 9) for _ in range(8)], w=3)
    asked = PlanningRequest(num_ranks=4, num_microbatches=8, costs=costs)
    for num_stages in (4, 8):
        own = asked.costs_for(num_stages)
        assert sum(own.per_stage(num_stages).duration[0]) == pytest.approx(sum(costs.f))
        assert sum(own.per_stage(num_stages).duration[1]) == pytest.approx(sum(costs.b))
        assert sum(own.per_stage(num_stages).duration[2]) == pytest.approx(4 * 3)


def test_stages_are_halved_or_joined_in_model_order():
    costs = RankCosts(f=[2, 4], b=[1, 2, 3, 4], comm=[5, 6], saved=3)
    finer, coarser = costs.per_stage(4, 2), costs.per_stage(2, 2)
    assert (finer.f, finer.b, finer.comm, finer.saved) == ([1, 1, 2, 2], [1, 2, 3, 4], [5, 5, 6, 6], 1.5)
    assert (coarser.f, coarser.b, coarser.comm, coarser.saved) == ([2, 4], [3, 7], [5, 6], 3)


def test_families_that_cannot_be_planned_say_why():
    answer = choose(request(EQUAL_TIMES, num_microbatches=7, time_limit=0.5))
    assert "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 15" in str(answer.refused["zb_h2"])
    assert "  zb_h2: zb_h2 needs num_microbatches" in str(render_advice(answer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"costs": Costs(f=2)}, "write RankCosts(f=..., b=..., w=...), for one rank's share of the model"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"memory_limit": 0.5}, "can't hold one microbatch; the least that works, per rank: 1, 1"),
        ({"objective": "speed"}, "objective='speed': write makespan or span"),
        ({"costs": RankCosts(f=[1, 2, 3])}, "f has 3 numbers for 8 stages"),
    ],
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        request(**{"costs": EQUAL_TIMES, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_are_counted_as_they_are_sent(name):
    timetable = plan(name, 4, 8)
    sent = [step for program in lower(timetable) for step in program.instructions if isinstance(step, Send)]
    assert num_messages(timetable) == len(sent)


def test_progress_rises_to_the_end():
    shares = []
    choose(
        request(UNEVEN, num_ranks=4, num_microbatches=8, time_limit=0.5),
        lambda share, what: shares.append(share),
    )
    assert shares[0] == 0
    assert all(one <= other for one, other in pairwise(shares))
    assert 0.5 < shares[-1] <= 1


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_find_what_one_finds(num_processes):
    """The plans stand in the same order; progress rises here, too."""
    asked = PlanningRequest(num_ranks=2, num_microbatches=4, costs=EQUAL_TIMES, time_limit=600)
    shares = []
    found = choose(asked, lambda share, what: shares.append(share), num_processes)
    alone = choose(asked)
    for one, other in zip(found.candidates, alone.candidates, strict=True):
        assert (one.name, one.timeline.timetable) == (other.name, other.timeline.timetable)
    assert found.refused.keys() == alone.refused.keys()
    assert all(one <= other for one, other in pairwise(shares))
    assert shares[-1] > 0.5


def test_an_error_in_a_process_is_raised():
    with pytest.raises(PlanError, match="num_ranks=0"):
        side_by_side(fail_for_0, [(2,), (0,)], lambda number, *values: None)


def fail_for_0(num_ranks, tell):
    tell(num_ranks)
    if num_ranks == 0:
        raise PlanError("num_ranks=0")
    return num_ranks


def test_a_killed_process_is_reported():
    with pytest.raises(RuntimeError, match="was killed; is there too little memory"):
        side_by_side(end_at_once, [(), ()], lambda number, *values: None)


def end_at_once(tell):
    os._exit(9)


def test_processes_end_with_their_caller():
    """As with Ctrl-C, which reaches the caller."""

    def interrupt(number, word):
        raise KeyboardInterrupt

    before, start = set(active_children()), monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side(tell_and_sleep, [(60.0,), (60.0,)], interrupt)
    assert monotonic() - start < 30
    assert set(active_children()) == before


def tell_and_sleep(seconds, tell):
    tell("begun")
    sleep(seconds)


def test_the_advice_has_its_sections(answers):
    lines = str(render_advice(answers["UNEVEN"])).splitlines()
    assert (
        lines[0] == "8 ranks, 24 microbatches, at most 8 (1.00p) per rank; times in ms, best makespan first."
    )
    assert lines[1] == (
        "1.00p is 8 times the activations of the largest stage, 8 activations of one rank's share of the "
        "model; with equal stages 1F1B holds as much."
    )
    row = next(line for line in lines if line.startswith("zb_h1"))
    assert row.split() == [
        "zb_h1", "one", "829.0", "829.0", "16.04", "%", "829.0", "0.00", "%", "336", "8",
        "8,", "7.5,", "7,", "6.5,", "6,", "5.5,", "5,", "4.5",
    ]  # fmt: skip
    starts = ("needs more memory", "best makespan at", "best max span *", "what follows")
    assert all(any(line.startswith(start) for line in lines) for start in starts)
    assert [line for line in lines if line.startswith("12 (1.50p) ")]


# ---------------------------------------------------------------- what the searches begin with


def test_a_search_begins_with_the_known_plans_that_fit():
    """Without any time it returns the best of them; a plan above the limit is left out."""
    v = Timetable.parse((DATA / "v_at_1.25p.txt").read_text())
    for limit, is_known in ((10, True), (9, False)):
        problem = request(LONG_B).problem("v", limit, "makespan")
        found = problem.timetable_of(LocalSearch(problem, Deadline(0), 0, known=[v]).run())
        assert (found == v) is is_known
        assert max(simulate(found, problem.costs).peak_memory) <= limit


def test_a_limit_is_not_searched_where_a_lower_ones_plan_is_optimal(monkeypatch):
    """The limits that are searched beside the request's own lead to different makespans."""
    searched = []

    class Recorded(LocalSearch):
        def __init__(self, problem, *rest):
            searched.append((problem.placement, problem.memory_limit, problem.objective))
            super().__init__(problem, *rest)

    monkeypatch.setattr(sys.modules["zbpp.planning.choose"], "LocalSearch", Recorded)
    answer = choose(PlanningRequest(num_ranks=2, num_microbatches=4, costs=EQUAL_TIMES, time_limit=1.0))
    for placement in ("one", "v"):
        limits = [
            limit for other, limit, objective in searched if (other, objective) == (placement, "makespan")
        ]
        assert limits[-1] is None
        values = [answer.best(placement, limit).value for limit in limits[:-1]]
        assert len(set(values)) == len(values)
