"""What `zbpp plan` wrote is what a run executes; what does not fit the job is refused."""

import json

import pytest

from zbpp.config import ScheduleConfig
from zbpp.planning import plan
from zbpp.run.plan import build_timetable
from zbpp.schedule import Costs, PlanError, Timetable, simulate, to_csv

P, M = 2, 6
ODD = Timetable.parse("0F0 0F1 0B0 0B1 0W0 0W1\n1F0 1B0 1F1 1B1 1W0 1W1")  # of no family
MEASURED = {"f": [3, 2], "b": [2, 3], "w": [1, 2], "comm": 0.5, "saved": [2**20, 2**20], "deferred": 2**19}


def plan_by_name(name, num_ranks, num_microbatches, **options):
    return build_timetable(ScheduleConfig(name=name, **options), num_ranks, num_microbatches)


def plan_from_file(file, num_ranks, num_microbatches, **options):
    return build_timetable(ScheduleConfig(timetable=file, **options), num_ranks, num_microbatches)


@pytest.mark.parametrize(("name", "form"), [("plan.txt", str), ("plan.csv", to_csv)])
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_a_plan_in_a_file_is_the_plan(tmp_path, name, form, num_microbatches):
    (tmp_path / name).write_text(form(ODD))
    assert plan_from_file(str(tmp_path / name), 2, num_microbatches, costs=None, placement=None) == ODD


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (4, None),
            {},
            "is a plan for 2 ranks, not for 4: write -n 2, or torchrun --nproc-per-node 2",
        ),
        ((2, 8), {}, "is a plan for 2 microbatches, not for num_microbatches=8: leave num_microbatches out"),
        ((2, None), {"placement": "v"}, "is a plan already: leave schedule.placement=v out"),
        ((2, None), {"memory_limit": 3.0}, "is a plan already: leave schedule.memory_limit=3.0 out"),
    ],
)
def test_a_plan_that_does_not_fit_the_job_is_refused(tmp_path, arguments, options, message):
    file = tmp_path / "plan.txt"
    file.write_text(str(ODD))
    with pytest.raises(PlanError, match=f"plan.txt {message}"):
        plan_from_file(str(file), *arguments, **options)


def test_a_plan_of_forwards_alone_is_refused(tmp_path):
    file = tmp_path / "plan.txt"
    file.write_text("0F0 0F1\n1F0 1F1\n")
    with pytest.raises(PlanError, match="is no plan to train by: a rank has no W and no BW"):
        plan_from_file(str(file), 2, None)


@pytest.fixture
def costs(tmp_path):
    about = {"memory": "bytes"}
    (tmp_path / "costs.json").write_text(json.dumps({**MEASURED, "memory_unit": "bytes", "about": about}))
    return str(tmp_path / "costs.json")


def test_measured_costs_decide_a_plan_that_is_searched(costs):
    found = plan_by_name("zb_auto", P, M, costs=costs)
    own = Costs(**MEASURED)
    assert simulate(found, own).makespan <= simulate(plan("zb_auto", P, M), own).makespan
    assert found == plan("zb_auto", P, M, costs=own)


def test_a_memory_limit_with_a_unit_holds_for_costs_in_bytes(costs):
    free, bounded = (
        plan_by_name("zb_auto", P, M, costs=costs),
        plan_by_name("zb_auto", P, M, costs=costs, memory_limit="1536KiB"),
    )
    held = [max(simulate(each, Costs(**MEASURED)).peak_memory) for each in (bounded, free)]
    assert held[0] <= 1.5 * 2**20 < held[1]


@pytest.mark.parametrize("limit", ["2GiB", "many"])
def test_a_memory_limit_in_another_unit_than_the_costs_is_refused(limit):
    with pytest.raises(PlanError, match=f"memory limit '?{limit}'?.* write how many, such as 8"):
        plan_by_name("zb_auto", P, M, memory_limit=limit)


def test_a_number_of_activations_is_of_one_ranks_share_however_many_stages_it_has():
    """As `zbpp plan` counts: two stages of half the size hold what one stage of the whole size holds."""
    assert plan_by_name("zb_v", 4, 8, memory_limit=4) == plan("zb_v", 4, 8)
    with pytest.raises(PlanError, match=r"zb_h2 needs 7 on rank 0, the memory limit allows 4"):
        plan_by_name("zb_h2", 4, 8, memory_limit="4")


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(PlanError, match="unknown schedule 'zb_h9'"):
        plan_by_name("zb_h9", 2, 4)
