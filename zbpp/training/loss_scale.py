"""Dynamic loss scaling: float16 holds nothing below 6e-8, so gradients are computed times a large factor."""

from __future__ import annotations

from typing import Any

_KEYS = ("value", "num_good_steps")


class LossScaleError(RuntimeError):
    """Gradients overflow even with the smallest loss scale: training can't go on."""


class LossScale:
    """The factor on the loss of the next step, `value`: halved at an overflow, doubled after good steps.

    start: the first factor; choose a power of two, so that scaling and dividing it out are exact.
    growth_interval: after so many good steps in a row the factor is doubled. Raises ValueError if one of the
    two is below 1.

        used = pipeline.loss_scale = scale.value
        pipeline.step(x, target=y)
        norm = clip_grad_norm_(pipeline, max_norm * used)  # the same on every rank
        if norm.isfinite():
            for master in masters.parameters():
                master.grad /= used
            optimizer.step()
            masters.update()
        scale.update(is_finite=bool(norm.isfinite()))
    """

    def __init__(self, start: float = 65536.0, growth_interval: int = 2000) -> None:
        if not start >= 1 or growth_interval < 1:
            raise ValueError(
                f"LossScale(start={start}, growth_interval={growth_interval}): write numbers from 1 upwards"
            )
        self.value, self.growth_interval, self.num_good_steps = float(start), growth_interval, 0

    def update(self, *, is_finite: bool) -> None:
        """Choose the next step's factor. is_finite: whether the norm of the last step's gradients is finite.

        All ranks have the same norm, so they choose the same factor. Raises LossScaleError where the factor
        would fall below 1.
        """
        if not is_finite:
            self._halve()
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = 2 * self.value, 0

    def _halve(self) -> None:
        if self.value / 2 < 1:
            raise LossScaleError(
                f"the gradients are infinite or NaN with loss_scale={self.value:g}, and were at every larger "
                "scale before: the loss is not finite, or float16 is too narrow for this model; look at the "
                "losses and the data, or write precision=mixed_bfloat16"
            )
        self.value, self.num_good_steps = self.value / 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return {key: getattr(self, key) for key in _KEYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises KeyError if it lacks a key."""
        self.value, self.num_good_steps = (state[key] for key in _KEYS)
