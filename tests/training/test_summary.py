"""The summary at the end: what a run cost, and advice from its own measurements.

Whether advice holds is tested without a clock: tests/planning/test_advise.py.
"""

import torch

from helpers.processes import run_ranks
from helpers.trainers import small_trainer
from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.job.world import World
from zbpp.models.emulated import Emulated
from zbpp.training.summary import Title, summarise
from zbpp.training.trainer import Trainer


def summary_of(trainer, num_steps, rank=0, size=1, **options):
    history = list(trainer.run(num_steps))
    here = World(rank, size, torch.device("cpu"))
    return summarise(Title("1f1b"), trainer, history, here, torch.float32, seconds=2.0, **options)


def unbalanced(rank):
    """Two ranks train 8 layers that sleep 2 ms in each of F, B and W."""
    layers_per_stage = [2, 6]
    model = Emulated(num_layers=8, f=2.0, b=2.0, w=2.0, layers_per_stage=layers_per_stage)
    pipeline = Pipeline({rank: model.build_stage(rank, 2)}, plan("1f1b", 2, 4), model.loss)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.01),
        data=regression_data(in_features=8, out_features=8, batch_size=4, seed=0),
        learning_rate=lambda step: 1.0,
        num_recorded=3,
    )
    return summary_of(trainer, 4, rank, 2, layers_per_stage=layers_per_stage).figures


def test_a_run_out_of_balance_is_told_so_from_its_own_measurements():
    """6 of 8 layers on one of two ranks; a third of the step could be saved."""
    figures = run_ranks(unbalanced, 2)[0]
    (advice,) = [each for each in figures["advice"] if each["kind"] == "balance"]
    assert advice["setting"] in [f"model.layers_per_stage=[{n},{8 - n}]" for n in (3, 4, 5)]
    assert advice["gain"] > 0.1
    assert any("Stages are out of balance: model.layers_per_stage=" in each for each in figures["sentences"])


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
