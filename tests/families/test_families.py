"""Every family over drawn sizes: valid, complete, within its memory; and against torch's generators."""

import re
from collections import Counter

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpp.planning import plan
from zbpp.schedule import Op, PlanError, Recv, Send, lower, simulate
from zbpp.schedule.families import FAMILIES

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW
LOOPED = ("interleaved_1f1b", "interleaved_zb", "looped_bfs")

# Where a family says no, written down once more.
REFUSES = {
    "zb_h2": lambda p, m: m < 2 * p - 1,
    "dualpipe_v": lambda p, m: m < 2 * p,
    "interleaved_1f1b": lambda p, m: m > p and m % p > 0,
    "interleaved_zb": lambda p, m: m > p and m % p > 0,
}


def refuses(name, p, m):
    return REFUSES.get(name, lambda p, m: False)(p, m)


def check_whole(timetable, p, m):
    """Every stage has F, B, W of every microbatch once; it can run, and every message has its receiver."""
    assert (timetable.num_ranks, timetable.num_microbatches) == (p, m)
    found = Counter(action for row in timetable.rows for action in row)
    for stage in range(timetable.num_stages):
        for microbatch in range(m):
            once = [found[stage, op, microbatch] for op in (F, B, W, BW)]
            assert once in ([1, 1, 1, 0], [1, 0, 0, 1])
    assert simulate(timetable).makespan > 0
    sent, received = Counter(), Counter()
    for program in lower(timetable):
        sent.update(step.value for step in program.instructions if isinstance(step, Send))
        received.update(step.value for step in program.instructions if isinstance(step, Recv))
    assert sent == received


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_every_family_plans_any_number_of_microbatches_or_says_no(name, p):
    for m in [*range(1, 2 * p + 3), 3 * p, 4 * p + 1]:
        if refuses(name, p, m):
            with pytest.raises(PlanError, match=f"{name}.*{m}"):
                plan(name, p, m)
        else:
            check_whole(plan(name, p, m), p, m)


@settings(max_examples=60)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 12), st.integers(1, 40))
def test_any_timetable_of_any_family_has_all_actions_and_runs(name, p, m):
    if refuses(name, p, m):
        m = 2 * p * (1 + m % 3)
    check_whole(plan(name, p, m), p, m)


@pytest.mark.parametrize("name", sorted(REFUSES))
def test_the_number_of_microbatches_that_a_refusal_names_works(name):
    for p, m in [(3, 4), (4, 6), (8, 12)]:
        with pytest.raises(PlanError) as caught:
            plan(name, p, m)
        told = str(caught.value)
        named = re.search(r"nearest that are: (\d+), (\d+)$", told) or re.search(r"= (\d+)(?: to|,)", told)
        for number in map(int, named.groups()):
            assert plan(name, p, number).num_microbatches == number


# ---------------------------------------------------------------- memory


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 20))
def test_peak_memory_of_the_v_families(p, m):
    assert_peaks(p, m)


@pytest.mark.nightly
@settings(max_examples=40)
@given(st.integers(1, 16), st.integers(1, 40))
def test_peak_memory_of_larger_v_families(p, m):
    assert_peaks(p, m)


def assert_peaks(p, m):
    """Never above their limits; and V-Half and V-Min use theirs where there are microbatches enough."""
    limits = {"zb_v": 2 * p, "v_half": 2 * ((p + 2) // 2), "v_min": 2 * ((p + 4) // 3)}
    for name, limit in limits.items():
        peak = max(simulate(plan(name, p, m)).peak_memory)
        assert peak <= limit
        assert peak == limit or m < 2 * p
    assert max(simulate(plan("dualpipe_v", p, 2 * p + m)).peak_memory) == 2 * p + 1


# ---------------------------------------------------------------- torch's generators

LETTERS = {"F": F, "I": B, "W": W, "B": BW}


def torch_rows(generator, p, m, v):
    """The rows that torch would run, as (stage, op, microbatch)."""
    rounds = max(1, m // p)
    for rank in range(p):
        schedule = generator.__new__(generator)  # its __init__ wants modules and a process group
        schedule.__dict__.update(
            rank=rank, pp_group_size=p, _n_microbatches=m, n_local_stages=v, _stages=[None] * v,
            num_stages=v * p, _num_stages=v * p, number_of_rounds=rounds, microbatches_per_round=m // rounds,
        )  # fmt: skip
        steps = [step for step in schedule._calculate_single_rank_operations(rank) if step is not None]
        overlapped = [part for step in steps for part in step.sub_actions or (step,)]
        yield [
            (step.stage_index, LETTERS[step.computation_type.value], step.microbatch_index)
            for step in overlapped
        ]


SAME = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zb_v": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": torch_schedules.ScheduleDualPipeV,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_order_is_torchs(name, p):
    stages = (1, 2, 3) if name in LOOPED else (2,)
    for v in stages:
        for m in [m for m in (1, 2, p, 2 * p, 2 * p + 1, 3 * p, 5 * p) if not refuses(name, p, m)]:
            mine = plan(name, p, m, stages_per_rank=v)
            theirs = list(torch_rows(SAME[name], p, m, v))
            assert [list(row) for row in mine.rows] == theirs


@pytest.mark.parametrize("p, m, v", [(1, 3, 2), (2, 3, 2), (4, 8, 2), (3, 5, 3)])
def test_looped_bfs_is_torchs_with_backwards_ascending(p, m, v):
    theirs = torch_rows(torch_schedules.ScheduleLoopedBFS, p, m, v)
    turned = [[(s, op, m - 1 - mb if op == BW else mb) for s, op, mb in row] for row in theirs]
    assert [list(row) for row in plan("looped_bfs", p, m, stages_per_rank=v).rows] == turned


# ---------------------------------------------------------------- words
