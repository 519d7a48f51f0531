"""Costs of stages whose weights are copied for each F, B and W."""

import random

import pytest

from zbpp import Costs, plan, simulate
from zbpp.prediction.step_time import with_weight_copies


def pass_block_by_block(time, copy, num_blocks):
    """One copy ahead: a block runs when its weights are there and the block before has run."""
    copied = ended = start = 0.0
    for _ in range(num_blocks):
        # Two buffers: the copy of a block begins when the block before it begins to run.
        copied = max(copied, start) + copy / num_blocks
        start = max(ended, copied)
        ended = start + time / num_blocks
    return ended


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_takes_what_blocks_with_one_copy_ahead_take(seed):
    rng = random.Random(seed)
    f, b, copy, blocks = rng.uniform(1, 5), rng.uniform(1, 5), rng.uniform(0, 8), rng.randint(1, 9)
    found = with_weight_copies(Costs(f=f, b=b, w=1), copy, num_stages=1, num_blocks=blocks)
    assert found.f == pytest.approx([pass_block_by_block(f, copy, blocks)])
    assert found.b == pytest.approx([pass_block_by_block(b, copy, blocks)])
    assert found.w == pytest.approx([1 + 2 * copy])


def test_without_copies_nothing_changes_and_memory_never_does():
    costs = Costs(f=[1, 2], b=3, w=2, bw=4.5, saved=3, comm=0.5)
    same = with_weight_copies(costs, 0.0, num_stages=2, num_blocks=4).per_stage(2)
    for name, value in costs.per_stage(2)._asdict().items():
        assert getattr(same, name) == value, name


def test_copies_that_hide_behind_f_and_b_make_w_the_price():
    timetable = plan("zb_h1", 4, 8)
    costs = Costs(f=10, b=10, w=10)
    hidden = with_weight_copies(costs, 4.0, num_stages=4, num_blocks=40)
    assert hidden.f == pytest.approx([10.1] * 4)
    without, one = (simulate(timetable, each).makespan for each in (costs, hidden))
    assert without < one
