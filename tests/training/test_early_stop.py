"""early_stop: a run ends when a held-out metric improves no more."""

import math

import pytest

from helpers.trainers import small_trainer
from zbpp.training.leaving import EarlyStop, MetricError


class Spy:
    reason = None

    def leave(self, reason, *, agreed=False):
        assert agreed  # all ranks have the same evaluations
        self.reason = reason


def steps_until_left(stop, values, name="evaluation_loss"):
    spy = Spy()
    for number, value in enumerate(values, 1):
        stop.after_step(spy, number - 1, [{"step": number, "loss": 0.0, name: value}])
        stop.after_step(spy, number - 1, [{"step": number, "loss": 0.0}])  # nothing was evaluated
        if spy.reason:
            return number, spy.reason
    return None, None


@pytest.mark.parametrize(
    "options, values, expected",
    [
        ({"patience": 2}, [3, 2, 2.5, 2.1, 1], 4),
        ({"patience": 2}, [3, 2, 2.5, 1.9, 1.8, 1.7], None),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.4], None),
        ({"patience": 2, "mode": "max"}, [0.1, 0.5, 0.4, 0.5, 0.6], 4),
        ({"patience": 2}, [3, math.nan, math.nan], 3),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_better_value(options, values, expected):
    assert steps_until_left(EarlyStop("evaluation_loss", **options), values)[0] == expected


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_there_are():
    with pytest.raises(MetricError, match="an evaluation has evaluation_loss: write one of them"):
        steps_until_left(EarlyStop("evaluation_accuracy"), [1.0])


def test_a_resumed_run_goes_on_counting():
    first = EarlyStop("evaluation_loss", patience=2)
    assert steps_until_left(first, [3, 2, 2.5])[0] is None
    second = EarlyStop("evaluation_loss", patience=2)
    assert small_trainer(callbacks=[first]).states()["callback.EarlyStop"] is first
    second.load_state_dict(first.state_dict())
    assert steps_until_left(second, [2.1])[0] == 1


def test_a_run_ends_behind_the_evaluation_that_decides():
    stop = EarlyStop("evaluation_loss", patience=2, min_delta=1e9)
    trainer = small_trainer(callbacks=[stop], evaluate_every=2)
    trainer.data = trainer.data._replace(num_evaluation_batches=1)
    list(trainer.run(20))
    assert trainer.next_step == 6  # the first evaluation is the best, the next two are no better
