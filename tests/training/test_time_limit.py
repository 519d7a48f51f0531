"""max_hours: the run is over before the time is, whatever steps and saving take."""

import pytest

from helpers.trainers import small_trainer
from zbpp.training.callbacks import Callback
from zbpp.training.leaving import TimeLimit


class Clock(Callback):
    """A clock that a step and the end of the run move on."""

    def __init__(self, step_seconds, finish_seconds):
        self.now, self.step_seconds, self.finish_seconds = 0.0, step_seconds, finish_seconds

    def __call__(self):
        return self.now

    def seconds_to_finish(self, trainer):
        return self.finish_seconds

    def before_step(self, trainer, step):
        self.now += self.step_seconds

    def finish(self, trainer):
        self.now += self.finish_seconds


@pytest.mark.parametrize("finish_seconds", [0.0, 25.0])
def test_the_run_ends_before_its_time_is_over_and_uses_most_of_it(finish_seconds):
    clock = Clock(10.0, finish_seconds)
    trainer = small_trainer(callbacks=[TimeLimit(100.0, clock=clock), clock], num_recorded=0)
    list(trainer.run(50))
    assert trainer.leaving.startswith("the time limit of 0.02")
    assert 100 - 4 * 10 <= clock.now <= 100


def test_a_run_that_is_over_in_time_is_not_left():
    clock = Clock(1.0, 0.0)
    trainer = small_trainer(callbacks=[TimeLimit(100.0, clock=clock), clock])
    assert len(list(trainer.run(6))) == 6
    assert trainer.leaving is None
