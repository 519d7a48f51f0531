"""Planted spikes are flagged; curves without spikes are not."""

import math

import numpy as np
import pytest

from zbpp.training.loss_spikes import LEAST, LossSpikes

CURVES = {
    "falling like GPT's": lambda step: 2.5 + 8 / (1 + step / 30) ** 0.7,
    "falling in a straight line": lambda step: 10 - step / 120,
    "flat": lambda step: 3.0,
    "falling in a step": lambda step: 10.0 if step < 400 else 4.0,
    "rising slowly": lambda step: 2 + step / 1000,
}


def noisy(curve, noise, seed):
    generator = np.random.default_rng(seed)
    return [curve(step) * (1 + noise * generator.standard_normal()) for step in range(1000)]


def flagged(losses, factor=8.0):
    spikes = LossSpikes(factor)
    return [step for step, loss in enumerate(losses) if spikes.deviations(loss) is not None]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.03, 0.1])
def test_curves_of_normal_noise_have_no_spikes_and_planted_ones_are_found(name, noise):
    for seed in range(3):
        losses = noisy(CURVES[name], noise, seed)
        assert flagged(losses) == []
        for step in (150, 600, 999):
            # 20 deviations of the noise, and of what the curve moves by itself in 100 steps
            losses[step] = CURVES[name](step) * (1.2 + 20 * noise) + 10 * abs(
                CURVES[name](step) - CURVES[name](step - 100)
            )
        assert flagged(losses) == [150, 600, 999]


def test_the_deviation_is_that_of_numpys_median():
    losses = noisy(CURVES["flat"], 0.1, 7)[:60]
    spikes = LossSpikes(8.0)
    for loss in losses:
        spikes.deviations(loss)
    middle = np.median(losses)
    expected = (9.0 - middle) / (1.4826 * np.median(np.abs(np.array(losses) - middle)))
    assert spikes.deviations(9.0) == pytest.approx(expected)


def test_nothing_is_flagged_too_early_and_values_that_are_not_finite_are_no_spikes():
    spikes = LossSpikes(8.0)
    assert [spikes.deviations(1e6 if step == LEAST - 1 else 1.0) for step in range(LEAST)] == [None] * LEAST
    assert spikes.deviations(math.nan) is spikes.deviations(math.inf) is None
    assert spikes.deviations(2.0) is not None
    assert LossSpikes(8.0).deviations(1.0) is None
    other = LossSpikes(8.0)
    other.load(spikes.state())
    assert other.deviations(5.0) == pytest.approx(spikes.deviations(5.0))


def test_a_loss_that_stays_high_ends_to_be_a_spike():
    found = flagged([1.0] * 200 + [3.0] * 200)
    assert found == list(range(200, 250)) or len(found) in (50, 51)
    assert flagged([0.0] * 50 + [1.0]) == []  # no deviation to compare with


@pytest.mark.parametrize("factor", [0, -1.0, math.nan])
def test_a_wrong_factor_is_refused(factor):
    with pytest.raises(ValueError, match="write a number of deviations above 0"):
        LossSpikes(factor)
