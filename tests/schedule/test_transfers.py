"""Messages between ranks: when they are on their way, and how a trace shows them."""

import pytest

from zbpp.planning import SCHEDULES, plan
from zbpp.render import chrome_trace
from zbpp.schedule import Costs, Timetable, lower, simulate
from zbpp.schedule.lower import Send
from zbpp.schedule.transfers import transfers_of


def test_a_predicted_message_leaves_when_it_is_made_and_takes_the_time_of_the_stage_that_it_leaves():
    timetable = Timetable.parse("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1")
    timeline = simulate(timetable, Costs(f=2, bw=5, comm=[1, 3]))
    assert [(str(value), *rest) for value, *rest in transfers_of(timeline)] == [
        ("x(1,0)", 0, 1, 2.0, 3.0),
        ("x(1,1)", 0, 1, 4.0, 5.0),
        ("g(0,0)", 1, 0, 10.0, 13.0),
        ("g(0,1)", 1, 0, 17.0, 20.0),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_is_what_the_programs_send(name):
    timetable = plan(name, 3, 6, time_limit=0.3)
    found = [(each.sender, each.receiver, each.value) for each in transfers_of(simulate(timetable))]
    sends = [
        (program.rank, step.peer, step.value)
        for program in lower(timetable)
        for step in program.instructions
        if isinstance(step, Send)
    ]
    assert found == sends


def test_one_rank_sends_nothing():
    assert transfers_of(simulate(plan("zb_v", 1, 4), Costs(comm=1))) == []


def lanes(trace):
    """{(process, lane): [(name, start, duration)]} in ms, the actions left out."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] > 0:
            lane = event["pid"], names[event["pid"], event["tid"]]
            found.setdefault(lane, []).append((event["name"], event["ts"] / 1e3, event["dur"] / 1e3))
    return found


def test_a_trace_shows_each_message_with_its_sender_and_its_receiver():
    """x(1,1) is sent while x(1,0) is on its way, and a link delivers in order."""
    timetable = Timetable.parse("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1")
    found = lanes(chrome_trace({"a": simulate(timetable, Costs(f=2, bw=5, comm=3))}))
    there = [("x(1,0)", 2.0, 3.0), ("x(1,1)", 5.0, 2.0)]
    back = [("g(0,0)", 12.0, 3.0), ("g(0,1)", 19.0, 3.0)]
    assert found == {
        (0, "send to 1"): there,
        (1, "receive from 0"): there,
        (1, "send to 0"): back,
        (0, "receive from 1"): back,
    }


def test_each_pair_of_ranks_has_lanes_of_its_own():
    found = lanes(chrome_trace({"a": simulate(plan("interleaved_1f1b", 3, 6), Costs(comm=0.5))}))
    assert {lane for process, lane in found if process == 1} == {
        "send to 0", "receive from 0", "send to 2", "receive from 2",
    }  # fmt: skip
