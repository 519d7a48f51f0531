"""When whole programs run: as simulated where passes have put nothing in; gates and reductions by hand."""

import random
from dataclasses import replace

import pytest

from helpers.timetables import random_timetable
from zbpp.features.gradient_release.updates import with_updates
from zbpp.features.post_validation.gate import gate_of, gate_positions, with_gate
from zbpp.features.reductions.instructions import with_reductions
from zbpp.planning import plan
from zbpp.schedule import Costs, PlanError, Program, Timetable, lower, simulate
from zbpp.schedule.interpret.timing import program_timeline
from zbpp.schedule.program import Reduced


def random_costs(rng: random.Random, timetable: Timetable) -> Costs:
    def numbers() -> list[float]:
        return [rng.uniform(0, 3) for _ in range(timetable.num_stages)]

    names = ("f", "b", "w", "bw", "comm", "saved", "deferred", "reduce", "static")
    costs = Costs(**{name: numbers() for name in names})
    if rng.random() < 0.3:
        own = {name: [each + 1 for each in getattr(costs, name)] for name in ("f", "b", "bw")}
        costs = replace(costs, **own, exchange=rng.random())
    if rng.random() < 0.3:
        lengths = [rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(timetable.num_microbatches)]
        return Costs.of_lengths(lengths, costs, Costs(f=numbers(), b=numbers(), w=numbers()))
    return costs


def gated(timetable: Timetable) -> list[Program]:
    programs = lower(timetable)
    return [with_gate(program, gate_of(programs, program.rank)) for program in programs]


def ended(program: Program) -> Program:
    """With all that ends a step of replicas and updates its stages, none of which costs time by itself."""
    stages = sorted({action.stage for action in program.row})
    return with_updates(with_reductions(program, stages))


@pytest.mark.parametrize("evaluates", [False, True])
def test_programs_take_the_times_that_simulate_gives_to_the_last_bit(first_seed, evaluates):
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable)
        timetable = timetable.forward_only() if evaluates else timetable
        expected = simulate(timetable, costs)
        for programs in ([*lower(timetable)], [*map(ended, lower(timetable))]):
            found = program_timeline(programs, costs)
            assert found.timetable == expected.timetable
            for name in ("starts", "ends", "exposed"):
                pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
                assert all(mine.tolist() == simulated.tolist() for mine, simulated in pairs), f"seed {seed}"
            for name in ("peak_memory", "lengths", "reductions", "makespan", "memory_unit"):
                assert getattr(found, name) == getattr(expected, name), f"seed {seed}"


def test_a_rank_waits_for_a_reduction_where_its_program_says_so():
    """Stage 1 is reduced from 3 to 8; the rank goes on with stage 0 only then."""
    (program,) = lower(Timetable.parse("0F0 1F0 1BW0 0BW0"))
    costs, instructions = Costs(f=1, bw=1, reduce=[0, 5]), program.instructions
    at = [str(each) for each in instructions].index("0BW0")
    waiting = program._replace(instructions=(*instructions[:at], Reduced(1), *instructions[at:]))
    assert program_timeline([program], costs).ends[0].tolist() == [1, 2, 3, 4]
    assert program_timeline([waiting], costs).ends[0].tolist() == [1, 2, 3, 9]


# ---- Consecutive steps


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_consecutive_steps_of_zero_bubble_schedules_take_what_their_work_takes(name):
    """The makespan of one step holds the (p-1) F's of the fill; between two steps there is none."""
    timetable = plan(name, 4, 8)
    work = 8 * timetable.num_stages / 4 * 3
    assert simulate(timetable).makespan > 1.05 * work
    assert program_timeline(gated(timetable), num_steps=20).makespan / 20 < 1.01 * work


@pytest.mark.parametrize("seed", range(20))
def test_a_gate_costs_no_time_since_the_first_b_needs_an_f_of_every_rank(seed):
    """With and without gates: no rank passes its gate before all ranks have ended the step before."""
    rng = random.Random(seed)
    timetable = random_timetable(rng)
    draw = [[rng.uniform(0, 3) for _ in range(timetable.num_stages)] for _ in range(5)]
    costs = Costs(*draw[:3], comm=draw[3], reduce=draw[4])
    timeline, without = (
        program_timeline(each, costs, num_steps=3) for each in (gated(timetable), lower(timetable))
    )
    for with_it, one in zip(timeline.starts, without.starts, strict=True):
        assert with_it.tolist() == one.tolist()
    for step in (1, 2):
        ends = [ends[step * len(row) - 1] for row, ends in zip(timetable.rows, timeline.ends, strict=True)]
        for rank, (row, gate) in enumerate(zip(timetable.rows, gate_positions(timetable), strict=True)):
            assert timeline.starts[rank][step * len(row) + gate] >= max(ends)


def test_consecutive_steps_by_hand():
    programs = gated(Timetable.parse("0F0 0B0 0W0\n1F0 1B0 1W0"))
    timeline = program_timeline(programs, Costs(f=1, b=1, w=[1, 10]), num_steps=2)
    assert timeline.timetable == Timetable.parse("0F0 0B0 0W0 0F1 0B1 0W1\n1F0 1B0 1W0 1F1 1B1 1W1")
    assert timeline.starts[0].tolist() == [0, 3, 4, 5, 15, 16]  # F of step 1 runs during rank 1's long W
    assert timeline.starts[1].tolist() == [1, 2, 3, 13, 14, 15]


def test_no_step_is_refused():
    with pytest.raises(PlanError, match="num_steps=0: write 1 or more"):
        program_timeline(lower(plan("1f1b", 2, 2)), num_steps=0)
