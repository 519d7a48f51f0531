"""Measured costs of EMULATED stages, whose true costs are known; plans that travel."""

import pytest
import torch
from torch import nn

from helpers.processes import open_things, run_ranks
from helpers.timetables import choose_offload, with_offload
from zbpp import Costs, Timetable, plan, simulate
from zbpp.benchmark.bench import Options, bench
from zbpp.benchmark.length_costs import fit_lengths, fitted
from zbpp.benchmark.measurement import measure, with_split_backward, with_whole_backward
from zbpp.benchmark.workload import Workload
from zbpp.data import regression_data, text_data
from zbpp.job.world import World
from zbpp.models.emulated import Emulated, sleep
from zbpp.planning import SCHEDULES
from zbpp.runtime.processes.mesh import planned_by_rank_0
from zbpp.schedule import PlanError

P, M = 2, 4
CPU = torch.device("cpu")
ROW = 8 * 4  # bytes of one row of an activation


def workload(rank, num_layers, f=6.0, b=12.0, w=3.0):
    return Workload(
        model=Emulated(num_layers=num_layers, f=f, b=b, w=w),
        data=regression_data(in_features=8, out_features=8, batch_size=2 * M, seed=0),
        here=World(rank, P, CPU),
        num_microbatches=M,
        timeout=100,
    )


# ---------------------------------------------------------------- whole and split


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "1f1b", "v_min"])
def test_whole_and_split_backwards_keep_the_order_and_the_places(name):
    timetable = plan(name, 4, 8)
    forms = with_whole_backward(timetable), with_split_backward(timetable)
    for form in forms:
        simulate(form)
        assert form.rank_of == timetable.rank_of
        assert [r.microbatches[r.ops == 0].tolist() for r in form.rows] == [
            r.microbatches[r.ops == 0].tolist() for r in timetable.rows
        ]
    assert {str(a.op) for row in forms[0].rows for a in row} == {"F", "BW"}
    assert {str(a.op) for row in forms[1].rows for a in row} == {"F", "B", "W"}


def test_a_whole_backward_stands_where_b_stood_and_a_split_ones_w_behind_its_b():
    assert str(with_whole_backward(Timetable.parse("0F0 0F1 0B0 0B1 0W0 0W1"))) == "0F0 0F1 0BW0 0BW1"
    assert str(with_split_backward(Timetable.parse("0F0 0F1 0BW0 0BW1"))) == "0F0 0F1 0B0 0W0 0B1 0W1"


# ---------------------------------------------------------------- measured costs


def measured(rank):
    found = measure(workload(rank, 2 * P), plan("zb_v", P, M), 2)
    return found.costs, found.in_activations, found.deferred_share


def test_times_and_bytes_are_those_that_the_stages_emulate():
    (costs, relative, share), other = run_ranks(measured, P)
    assert costs == other[0]
    for name, least in (("f", 6), ("b", 12), ("w", 3), ("bw", 15)):
        assert min(getattr(costs, name)) >= least
    assert max(costs.w) < min(costs.b)
    # Two rows per microbatch; from F until B four times a layer's input, of which stage 0's is the batch's.
    assert costs.saved == [2 * 3 * ROW, 2 * 4 * ROW, 2 * 4 * ROW, pytest.approx(2 * 5 * ROW, abs=300)]
    assert costs.deferred[1:3] == [2 * 2 * ROW] * 2
    # A plan with these costs counts on offload, at the measured time of a copy.
    assert min(costs.host) > 0
    without = simulate(plan("zb_v", P, M), costs)
    left = with_offload(without.timetable, costs, choose_offload(without, costs, late=True))
    assert left.peak_memory[0] < without.peak_memory[0]
    assert len(left.copies) >= 2
    assert share == pytest.approx(0.5, abs=0.2)
    assert sum(relative.saved) == pytest.approx(4)
    assert sum(relative.deferred) == pytest.approx(4 * share)


# ---------------------------------------------------------------- costs of lengths


def exact(linear, squared):
    """What `fitted` is given: two stages, each with times of exactly two parts at three lengths."""
    at = Costs.of_lengths([1.0], Costs(**linear, saved=[7, 8]), Costs(**squared)).of_length
    return {length: at(length) for length in (0.25, 0.5, 1.0)}


def test_times_of_exactly_two_parts_are_found_again():
    linear = {"f": [3, 4], "b": [5, 6], "w": [7, 0], "bw": [11, 12]}
    squared = {"f": [1, 0], "b": [2, 3], "w": [0, 1], "bw": [0.5, 3]}
    costs, error = fitted(exact(linear, squared), (2, 64))
    for name in linear:
        assert getattr(costs, name) == pytest.approx(linear[name])
        assert getattr(costs.quadratic, name) == pytest.approx(squared[name])
    assert (costs.saved, costs.shape, error) == ([7, 8], (2, 64), pytest.approx(0, abs=1e-9))


def test_no_part_is_negative():
    """Times with a constant overhead would have a negative square, times that grow faster a negative line."""
    constant, cubes = ({n: Costs(f=t, b=t, w=t, bw=t) for n, t in each} for each in (
        [(0.25, [10.0]), (0.5, [12.0]), (1.0, [14.0])], [(0.25, [1.0]), (0.5, [8.0]), (1.0, [64.0])],
    ))  # fmt: skip
    (flat, off), (steep, _) = fitted(constant, (1, 8)), fitted(cubes, (1, 8))
    assert flat.quadratic.f == [0.0]
    assert flat.f == pytest.approx([(0.25 * 10 + 0.5 * 12 + 14) / (0.25**2 + 0.5**2 + 1)])
    assert off == pytest.approx((10 - 0.25 * flat.f[0]) / 14)
    assert (steep.f, steep.quadratic.f[0]) == ([0.0], pytest.approx(64, rel=0.1))


class Sleeper(nn.Module):
    """Sleeps 4 l + 12 l * l ms in F, l being the tokens of a row over 16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        sleep(4 * (share := x.shape[1] / 16) + 12 * share**2)
        return x.float() * self.weight


class Sleepers:
    def build_stage(self, index, num_stages):
        return Sleeper()

    def loss(self, output, target):
        return (output - target).square().mean()


def of_lengths(rank):
    data = text_data(path=None, vocab_size=256, sequence_length=16, batch_size=2 * M, seed=0, max_bytes=5000)
    work = Workload(model=Sleepers(), data=data, here=World(rank, P, CPU), num_microbatches=M, timeout=100)
    timetable = plan("zb_h1", P, M)
    whole = measure(work, timetable, 2).costs
    costs, _ = fit_lengths(work, timetable, [0.25, 0.5], 2, whole)
    with pytest.raises(ValueError, match=r"rows of 16 tokens have no length of 0.01"):
        fit_lengths(work, timetable, [0.01], 2, whole)
    return costs


def test_a_stage_is_measured_at_a_few_lengths():
    costs, other = run_ranks(of_lengths, P)
    assert costs == other
    assert costs.shape == (2, 16)
    for tokens in (4, 8, 16):
        own = costs.of_tokens([2 * tokens])
        times = own.per_stage(P, P).of_length(own.lengths[0]).f
        assert min(times) >= 0.9 * (4 * tokens / 16 + 12 * (tokens / 16) ** 2)
    assert min(costs.quadratic.f) > 0


# ---------------------------------------------------------------- plans that travel


def agreed(rank):
    plans = [plan("1f1b", P, M), plan("zb_h1", P, M)]
    text = str(planned_by_rank_0(lambda: plans[rank]))

    def refuse():
        raise PlanError(f"rank {rank} can't")

    with pytest.raises(PlanError, match="^rank 0 can't$"):
        planned_by_rank_0(refuse)
    return text


def test_all_ranks_get_the_plan_of_rank_0_and_its_refusal():
    assert run_ranks(agreed, P) == [str(plan("1f1b", P, M))] * P


# ---------------------------------------------------------------- the whole benchmark


def benched(rank):
    options = Options(num_repeats=1, compare="torch", memory_limit=None, time_limit=0.2)
    timed = bench(workload(rank, 6, 2.0, 2.0, 2.0), ["1f1b", "zb_auto"], options)
    rows = [(t.name, t.runtime, str(t.timetable), t.failure, len(t.wall_times)) for t in timed]
    return rows, open_things()[0]


@pytest.fixture(scope="module")
def results(ran):
    return [found for found, _ in ran]


@pytest.fixture(scope="module")
def ran():
    return run_ranks(benched, P)


def test_when_a_benchmark_is_over_nobody_has_a_process_group_left(ran):
    assert [num_groups for _, num_groups in ran] == [1] * P  # the job's


def test_a_benchmark_has_both_runtimes(results):
    first, second = results
    assert first == second
    assert [each[:2] for each in first] == [
        ("1f1b", "zbpp"), ("1f1b", "torch"), ("zb_auto", "zbpp"),
    ]  # fmt: skip
    assert [each[3:] for each in first] == [("", 1)] * 3


def test_the_searched_plan_holds_no_more_than_1f1b(results):
    (text,) = [text for name, _, text, *_ in results[0] if name == "zb_auto"]
    assert max(simulate(Timetable.parse(text), Costs(saved=1, deferred=0)).peak_memory) <= 2


def test_every_schedule_that_torch_has_is_one_of_ours():
    from zbpp.benchmark.torch_runner import SCHEDULES as THEIRS

    assert set(THEIRS) <= set(SCHEDULES)
