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
