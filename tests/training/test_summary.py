"""The summary at the end: what a run cost."""

import pytest
import torch

from helpers.trainers import small_trainer
from zbpp import Costs, Links, plan, simulate
from zbpp.job.world import World
from zbpp.planning import slowest_link
from zbpp.training.measured_steps import (
    Title,
    link_waited_for,
    measured_steps,
    sentences_of_time,
    summarise,
)


def summary_of(trainer, num_steps, rank=0, size=1, **options):
    history = list(trainer.run(num_steps))
    here = World(rank, size, torch.device("cpu"))
    return summarise(Title("1f1b"), trainer, history, here, torch.float32, seconds=2.0, **options)


def test_a_run_that_was_left_before_a_step_was_measured_has_a_summary_without_a_timeline():
    trainer = small_trainer(num_recorded=0)
    summary = summary_of(trainer, 2)
    assert summary.measured is None
    assert summary.sentences == ["The run took 2.0 s for 2 steps and 16 rows (8 rows per second in all)."]
    assert (summary.figures["rows"], summary.figures["seconds"], summary.figures["left"]) == (16, 2.0, None)


def test_a_run_without_a_step_has_a_summary():
    """One that was resumed behind its last step."""
    trainer = small_trainer()
    trainer.next_step = 3
    figures = summary_of(trainer, 3).figures
    assert (figures["steps"], figures["rows"]) == (3, 0)


def test_the_prediction_of_a_step_in_slices_is_as_long_as_the_step():
    timetable = plan("zb_h1", 4, 8, num_slices=2)
    found = measured_steps({0: simulate(timetable, Costs(f=3, b=4, w=2, comm=0.5))}, [])
    assert found.predicted.makespan == pytest.approx(found.measured.makespan)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_step_over_known_links_is_predicted_with_them(name):
    """Messages wait for each other on a link; the times of those that ranks waited for don't say so."""
    links = Links(latency=0.1, pairs={(1, 2): (6.0, 4.0), (2, 1): (1.0, 4.0)})
    step = simulate(plan(name, 4, 8), Costs(f=3, b=4, w=2, links=links))
    known, unknown = (measured_steps({0: step}, [], links=each) for each in (links, None))
    assert known.predicted.makespan == pytest.approx(step.makespan)
    assert known.costs.links == links
    said = [sentences_of_time(each, 0.0)[0] for each in (known, unknown)]
    assert ["and the known links" in each for each in said] == [True, False]
    assert abs(unknown.predicted.makespan / step.makespan - 1) > 0.03


def test_the_summary_names_the_link_that_the_step_waited_for():
    """Two slow steps and a fast one: the link's median delay is that of the slow ones."""
    timetable = plan("1f1b", 4, 8)
    links = [Links(latency=0.1, pairs={(1, 2): (delay, 0.0)}) for delay in (6.0, 6.0, 0.0)]
    timelines = {step: simulate(timetable, Costs(links=each)) for step, each in enumerate(links)}
    found = measured_steps(timelines, [])
    link = link_waited_for(found, timelines.values())
    assert link[:2] == (1, 2)
    assert link[2:] == pytest.approx(slowest_link(timetable, Costs(links=links[0]))[2:])
    assert f"{link} Both are simulated." in sentences_of_time(found, 0.0, link=link)
    assert len(sentences_of_time(found, 0.0)) == 1
