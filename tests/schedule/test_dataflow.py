"""The data-flow table over arrays says what the table says."""

import pytest

from zbpp.schedule import Action, Op, consumes, produces
from zbpp.schedule.dataflow_arrays import producers


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_producers_are_the_actions_that_make_what_an_action_consumes(num_stages):
    actions = [Action(stage, op, 0) for stage in range(num_stages) for op in Op]
    for action, waits_for in zip(actions, producers(num_stages), strict=True):
        made = [
            {value for kind in kinds for value in produces(actions[kind], num_stages)} for kinds in waits_for
        ]
        assert all(value in some for value, some in zip(consumes(action), made, strict=True))


def test_producers_of_two_stages_read_as_the_table_does():
    f0, b0, _, _, f1, b1, _, bw1 = range(8)
    assert (Op.F, Op.B, Op.W, Op.BW) == (0, 1, 2, 3)
    assert producers(2) == [
        [],
        [(b1, bw1), (f0,)],
        [(b0,)],
        [(b1, bw1), (f0,)],
        [(f0,)],
        [(f1,), (f1,)],
        [(b1,)],
        [(f1,), (f1,)],
    ]
