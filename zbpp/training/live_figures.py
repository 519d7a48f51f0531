"""Figures beside the loss: MFU after each step, bubble and memory after a step that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zbpp.job.world import World
from zbpp.runtime.memory.activation_offload import offload_plan_of
from zbpp.training.callbacks import Callback
from zbpp.training.measured_steps import measured_steps
from zbpp.training.speed import model_flops_utilisation, peak_flops
from zbpp.training.summary import parameters_in_all
from zbpp.training.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


class LiveFigures(Callback):
    """Adds figures to the metrics of each step on the rank that shows them; the other ranks need none.

    model_flops_utilisation is added if the data are tokens and the device's peak FLOP/s in this dtype are
    known. Steps that are measured action by action (Trainer.record_every) also get the figures of the latest
    measured steps (measured_steps.py), and peak_memory_bytes (of the fullest rank).
    """

    def __init__(self, here: World, dtype: torch.dtype) -> None:
        self._is_shown, self._num_processes = here.rank == 0, here.size
        self._peak = peak_flops(here.device, dtype)
        self._num_parameters: int | None = None
        self._last: int | None = None  # the measured step whose figures were added last

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Count the parameters, once. Collective."""
        if self._num_parameters is None:
            self._num_parameters = parameters_in_all(trainer.pipeline)

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Add the figures."""
        if not self._is_shown:
            return
        for metrics in known:
            utilisation = model_flops_utilisation(
                self._num_parameters or 0,
                metrics.get("tokens_per_second"),
                self._num_processes,
                self._peak,
            )
            if utilisation is not None:
                metrics["model_flops_utilisation"] = utilisation
        newest = max(trainer.timelines, default=None)
        if known and newest is not None and newest != self._last:
            self._last = newest
            found = measured_steps(trainer.timelines, offload_plan_of(trainer.pipeline))
            known[-1] |= found.figures | {"peak_memory_bytes": max(found.measured.peak_memory)}
