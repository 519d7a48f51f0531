"""Measured timelines of EMULATED stages, whose true times are known, and costs made of timelines."""

import time

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Costs, Pipeline, Timetable, plan, simulate
from zbpp.measure import measured_costs, measured_costs_of_lengths
from zbpp.models.emulated import Emulated
from zbpp.observers.record import StepRecord
from zbpp.observers.recorder import Recorder
from zbpp.schedule import Action, Op, Recv, Send, Value, consumes, produces
from zbpp.schedule.timeline import transfers_of

CPU = torch.device("cpu")
TIMES = {"f": 10.0, "b": 20.0, "w": 30.0}  # ms of one stage


def measured(rank, timetable, evaluates):
    """The timeline of a second step (the first agrees on shapes), and its messages."""
    model = Emulated(num_layers=timetable.num_stages, **TIMES)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, model.loss)
    batch = torch.ones(timetable.num_microbatches, 8)
    pipeline.step(batch, target=batch)
    with pipeline.using(Recorder()) as recorder:
        pipeline.step(batch, target=batch)
    if evaluates:
        pipeline.evaluate(batch, target=batch)
    timeline = recorder.timeline()
    return timeline.starts, timeline.ends, timeline.peak_memory, timeline.transfers


@pytest.fixture(scope="module", params=["1f1b", "zb_h1"])
def recorded(request):
    """The timetable, and what each rank says of its measured step, an evaluation after it."""
    timetable = plan(request.param, 2, 4)
    return timetable, run_ranks(measured, 2, timetable, True)


def test_every_rank_sees_the_same_timeline_which_starts_at_0(recorded):
    _, results = recorded
    (starts, ends, peaks, transfers), (other_starts, other_ends, other_peaks, other_transfers) = results
    assert [each.tolist() for each in starts] == [each.tolist() for each in other_starts]
    assert [each.tolist() for each in ends] == [each.tolist() for each in other_ends]
    assert (peaks, transfers) == (other_peaks, other_transfers)
    assert min(start[0] for start in starts) == 0


def test_each_action_is_recorded_in_order_without_overlap(recorded):
    """Also with an evaluation behind the step: it records nothing."""
    timetable, results = recorded
    starts, ends, _, _ = results[0]
    for row, start, end in zip(timetable.rows, starts, ends, strict=True):
        assert len(row) == len(start) == len(end)
        assert (end >= start).all()
        assert (start[1:] >= end[:-1]).all()


def test_a_message_leaves_after_it_is_made_and_is_there_before_it_is_used(recorded):
    """Both ranks read one clock."""
    timetable, results = recorded
    starts, ends, _, transfers = results[0]
    made, used = {}, {}
    for row, row_starts, row_ends in zip(timetable.rows, starts, ends, strict=True):
        for action, start, end in zip(row, row_starts.tolist(), row_ends.tolist(), strict=True):
            made |= dict.fromkeys(produces(action, timetable.num_stages), end)
            used |= dict.fromkeys(consumes(action), start)
    predicted = {each[:3] for each in transfers_of(simulate(timetable))}
    assert {each[:3] for each in transfers} == predicted
    assert all(made[each] <= sent <= arrived <= used[each] for each, _, _, sent, arrived in transfers)


def test_costs_are_in_the_ratio_of_the_true_times():
    timetable = plan("zb_h1", 2, 4)
    starts, ends, peaks, _ = run_ranks(measured, 2, timetable, False)[0]
    timeline = simulate(timetable)  # for its type: what was measured takes its place
    timeline = type(timeline)(timetable, starts, ends, peaks)
    costs = measured_costs(timeline)
    for stage in range(2):
        assert 10 <= costs.f[stage] < 20
        assert costs.b[stage] / costs.f[stage] == pytest.approx(2, rel=0.4)
        assert costs.w[stage] / costs.f[stage] == pytest.approx(3, rel=0.4)
    assert simulate(timetable, costs).makespan == pytest.approx(timeline.makespan, rel=0.4)


# ---------------------------------------------------------------- costs from a timeline

COSTS = Costs(f=[2, 3], b=[4, 5], w=[6, 9], comm=0.25, reduce=[7, 8.5])


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_costs_of_a_predicted_timeline_are_those_it_was_predicted_from(schedule):
    costs = measured_costs(simulate(plan(schedule, 2, 8), COSTS))
    assert costs.f == pytest.approx([2, 3])
    assert costs.b == pytest.approx([4, 5])
    assert costs.w == pytest.approx([6, 9])
    assert costs.bw == pytest.approx([10, 14])
    assert costs.comm == pytest.approx([0.25, 0.25])
    assert costs.reduce == pytest.approx([7, 8.5])


def test_whole_backwards_are_taken_as_half_b_and_half_w():
    costs = measured_costs(simulate(plan("1f1b", 2, 8), COSTS))
    assert costs.bw == pytest.approx([10, 14])
    assert costs.b == costs.w == pytest.approx([5, 7])


@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
def test_costs_of_unequal_microbatches_are_those_they_were_predicted_from(schedule):
    """Of whole backwards, B and W are half each, in both parts of the times."""
    attention = Costs(f=[1.0, 2.0], b=[3.0, 1.0], w=[0.0, 0.5], bw=[3.0, 1.5])
    costs = Costs(f=[2.0, 5.0], b=[4.0, 3.0], w=[3.0, 2.0], bw=[7.0, 5.0], quadratic=attention)
    steps = [[0.5, 1.0, 2.0, 1.5], [1.0, 0.25, 0.75, 3.0]]
    timelines = [simulate(plan(schedule, 2, 4), Costs.of_lengths(each, costs)) for each in steps]
    found = measured_costs_of_lengths(timelines, steps)
    for part, true in ((found, costs), (found.quadratic, attention)):
        half = [each / 2 for each in true.bw]
        b, w = (true.b, true.w) if schedule == "zb_h1" else (half, half)
        assert (part.f, part.b, part.w) == (pytest.approx(true.f), pytest.approx(b), pytest.approx(w))


def test_a_timetable_with_both_kinds_gives_each_its_own_time():
    """Stage 0 has B, W and BW, stage 1 BW alone."""
    timetable = Timetable.parse("0F0 0F1 0B0 0W0 0BW1\n1F0 1BW0 1F1 1BW1")
    costs = measured_costs(simulate(timetable, Costs(f=1, b=[2, 3], w=[4, 5], bw=[7, 11])))
    assert (costs.b, costs.w, costs.bw) == ([2, 5.5], [4, 5.5], [7, 11])


def test_a_message_leaves_where_its_send_begins_and_is_there_where_its_receive_ends():
    x, g = Value("x", 1, 0), Value("g", 0, 0)
    instructions = [None, Action(0, Op.F, 0), Send(x, 1), Recv(g, 1), Action(0, Op.BW, 0)]
    record = StepRecord(CPU)
    mark, clock = record.begin(instructions), []
    for _ in range(2 * len(instructions)):
        clock.append(time.perf_counter() * 1e3)
        mark()
    clock.append(time.perf_counter() * 1e3)

    def place(moment):
        return sum(moment >= each for each in clock) - 1

    assert [[place(each) for each in row] for row in record.times().tolist()] == [[2, 3], [8, 9]]
    sent, arrived = record.messages()
    assert {value: place(moment) for value, moment in sent.items()} == {x: 4}
    assert {value: place(moment) for value, moment in arrived.items()} == {g: 7}


# ---------------------------------------------------------------- reductions


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets, in ms."""
    now = [0.0]
    monkeypatch.setattr("zbpp.observers.record._now", lambda: float(now[0]))
    return now
