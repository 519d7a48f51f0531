"""Messages between ranks: when each one is sent and when it arrives."""

import pytest

from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import Costs, Timetable, lower, simulate
from zbpp.schedule.program import Send
from zbpp.schedule.timeline import transfers_of


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
