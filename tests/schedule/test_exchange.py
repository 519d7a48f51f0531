"""W's in the shadow of exchanges: by hand, against a clock that ticks, and the published figures."""

import random
from collections import Counter

import pytest

from helpers.timetables import makes, needs, random_timetable
from zbpp.planning import plan
from zbpp.schedule import Action, Costs, Op, PlanError, Timetable, simulate

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW


def one_microbatch_later(timetable):
    """Each W of a rank stands where the rank's next W was, the last one at the end."""
    rows = []
    for row in timetable.rows:
        weights = [action for action in row if action.op == W]
        places = iter([None, *weights[:-1]])
        moved = [next(places) if action.op == W else action for action in row]
        rows.append([action for action in moved if action is not None] + weights[-1:])
    return Timetable(rows)


def of_a_rank(f, w, share, stages_per_rank):
    """Costs per stage where exchanges are this share of a rank's time; f is F, and B, without them."""
    exchange = share / (1 - share) * (2 * f + w) / 2
    numbers = {"f": f + exchange, "b": f + exchange, "w": w, "exchange": exchange}
    return {name: number / stages_per_rank for name, number in numbers.items()}


@pytest.mark.parametrize(
    "name, p, m, share, exposed, as_it_is, later, hidden",
    [
        ("zb_h1", 4, 16, 0.25, 700, 700, 585, 510),
        ("zb_v", 8, 32, 0.25, 1332.5, 1317.5, 1080, 995),
        ("zb_v", 8, 32, 0.15, 1173.7, 1161.3, 1035.6, 995),
        ("zb_v", 8, 32, 0.40, 1670, 1670, 1425, 995),
    ],
)
def test_a_w_one_microbatch_later_hides_the_exchanges(name, p, m, share, exposed, as_it_is, later, hidden):
    """F = B = W = 10 ms of a rank. It costs one more `deferred`. Above a quarter W's are too short."""
    timetable = plan(name, p, m)
    costs = of_a_rank(10, 10, share, timetable.num_stages // p)
    without = {key: number for key, number in costs.items() if key != "exchange"}
    computing = {**without, "f": costs["f"] - costs["exchange"], "b": costs["b"] - costs["exchange"]}
    moved = one_microbatch_later(timetable)
    timelines = [
        simulate(timetable, Costs(**without)),
        simulate(timetable, Costs(**costs)),
        simulate(moved, Costs(**costs)),
        simulate(timetable, Costs(**computing)),
    ]
    assert [round(each.makespan, 1) for each in timelines] == [exposed, as_it_is, later, hidden]
    assert max(timelines[2].peak_memory) == max(timelines[1].peak_memory) + 0.5


def ticking(timetable, costs):
    """Makespan and exposed exchange per rank, by a clock of 1 ms: a rank knows only what is pending now.

    The exchange is at the beginning of F, B and BW.
    """
    per_stage = costs.per_stage(timetable.num_stages)
    have, now = set(), 0
    rows = [list(row) for row in timetable.rows]
    busy = [0] * len(rows)  # ms left of the action at the head of a row; 0: the action has not begun
    pending = [{} for _ in rows]  # pending W -> ms left of this W
    exposed = [0] * len(rows)
    while any(rows):
        made, has_run = [], False
        for rank, row in enumerate(rows):
            while row and row[0].op == W and pending[rank].get(row[0]) == 0 and not busy[rank]:
                row.pop(0)
            if not row:
                continue
            stage, op, microbatch = action = row[0]
            if not busy[rank]:
                if op != W and not set(needs(action)) <= have:
                    continue
                busy[rank] = pending[rank][action] if op == W else per_stage.duration[op][stage]
            ran = per_stage.duration[op][stage] - busy[rank]
            if op != W and ran < per_stage.exchange[stage]:
                left = [each for each in row if pending[rank].get(each, 0) > 0]
                if left:
                    pending[rank][left[0]] -= 1
                else:
                    exposed[rank] += 1
            busy[rank] -= 1
            has_run = True
            if busy[rank] == 0:
                row.pop(0)
                made += makes(action, timetable.num_stages)
                if op == B:
                    w = Action(stage, W, microbatch)
                    pending[rank][w] = per_stage.duration[W][stage]
        have |= set(made)
        now += has_run  # not if all that is left are W's that have run
    return now, tuple(exposed)


def test_it_is_what_a_ticking_clock_shows(first_seed):
    seen = Counter()
    for seed in range(first_seed, first_seed + 150):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        exchange = [rng.randint(0, 4) for _ in range(timetable.num_stages)]
        costs = Costs(
            f=[each + rng.randint(1, 4) for each in exchange],
            b=[each + rng.randint(1, 4) for each in exchange],
            w=[rng.randint(1, 7) for _ in exchange],
            exchange=exchange,
        )
        timeline = simulate(timetable, costs)
        assert (timeline.makespan, timeline.exposed_exchange or (0,) * timetable.num_ranks) == ticking(
            timetable, costs
        ), f"seed {seed}"
        seen[timeline.makespan < simulate(timetable, Costs(**{**costs.numbers, "exchange": 0})).makespan] += 1
    assert seen[True] > 20


def test_without_exchanges_nothing_changes():
    timetable = plan("zb_v", 4, 8)
    timeline = simulate(timetable, Costs(exchange=0))
    assert timeline.exposed == timeline.exposed_exchange == ()
    assert timeline.makespan == simulate(timetable).makespan


def test_an_evaluation_has_nothing_to_hide():
    timeline = simulate(plan("zb_v", 2, 4).forward_only(), Costs(f=2, exchange=1, b=2))
    assert timeline.exposed_exchange == (8, 8)


@pytest.mark.parametrize(
    "costs",
    [{"exchange": 2}, {"f": 3, "b": 2, "exchange": [1, 3]}, {"f": 3, "b": 3, "bw": 2, "exchange": 2.5}],
)
def test_an_exchange_is_a_part_of_f_and_of_b(costs):
    with pytest.raises(PlanError, match="is a part of"):
        Costs(**costs)
