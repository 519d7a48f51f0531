"""Links that delay each message: the gradients stay, and a step takes what is predicted at the least."""

import time

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Links, Pipeline, plan, simulate
from zbpp.benchmark.delayed_links import delayed_links
from zbpp.models.emulated import Emulated
from zbpp.schedule import Costs

SLOW, M = Links(0.0, 0.0, {(0, 1): (60.0, 20.0), (1, 0): (60.0, 20.0)}), 3


def steps(rank, schedule):
    """(the last step's time in ms, losses and gradients) with delayed links, and without."""
    found = []
    for links in (SLOW, Links()):
        model = Emulated(num_layers=4, f=5, b=5, w=5)
        with delayed_links(links), Pipeline(model, schedule, num_microbatches=M) as pipeline:
            for seed in range(2):
                x, target = torch.randn(2, M, 8, generator=torch.Generator().manual_seed(seed))
                torch.distributed.barrier()
                start = time.perf_counter()
                losses = pipeline.step(x, target=target)
                torch.distributed.barrier()
                took = 1e3 * (time.perf_counter() - start)
            found.append((took, losses, [each.grad for each in pipeline.parameters()]))
    return found


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_a_step_over_delayed_links_takes_as_long_as_predicted_and_computes_the_same(schedule):
    timetable = plan(schedule, 2, M)
    parts = timetable.num_stages // 2
    predicted = simulate(timetable, Costs(*[10 / parts] * 3, links=SLOW)).makespan
    for slow, fast in run_ranks(steps, 2, schedule):
        assert slow[0] >= predicted
        for mine, expected in zip([*slow[1], *slow[2]], [*fast[1], *fast[2]], strict=True):
            assert torch.equal(mine, expected)
