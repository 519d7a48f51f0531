"""The training loop: batch, pipeline step, norm over all stages, optimizer step, metrics.

It knows no schedule and no config. All ranks run it in lockstep; one gather per step exchanges squared norms
and losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime import Pipeline
from zbpp.runtime.named_losses import summed
from zbpp.runtime.norm import global_norm, gradients_of, scale_gradients, squared_norms
from zbpp.runtime.world import gather
from zbpp.schedule import Timeline
from zbpp.training.batch import Source, batch_for
from zbpp.training.data import Data
from zbpp.training.named_losses import with_evaluation_losses, with_named_losses
from zbpp.training.replan import Replan

Metrics = dict[str, Any]


@dataclass(kw_only=True)
class Trainer:
    """Trains the stages of one rank together with the other ranks.

    learning_rate(step): the factor on the optimizer's rate. clip_norm: the largest norm of the gradients of
    all stages together. metrics(output, target): further numbers of a held-out microbatch, beside its loss.
    num_recorded: how many of the last steps are measured action by action. replan: may replace the pipeline
    after the first steps. Raises ValueError for parameters with a main_grad.
    """

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    data: Data
    learning_rate: Callable[[int], float]
    clip_norm: float | None = None
    evaluate_every: int = 0
    metrics: Callable[[Any, Any], Mapping[str, float | Tensor]] | None = None
    num_recorded: int = 5
    replan: Replan | None = None

    def __post_init__(self) -> None:
        _check_gradients_are_in_grad(self.pipeline.stages)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.timelines: list[Timeline] = []

    def run(self, num_steps: int) -> Iterator[Metrics]:
        """Train; yields each step's metrics when it is done. All but the times are equal on all ranks."""
        for step in range(num_steps):
            recorded = step >= num_steps - self.num_recorded or self._is_measured(step)
            with self.pipeline.recording() if recorded else nullcontext():
                metrics = self._step(step)
            if self.evaluate_every and ((step + 1) % self.evaluate_every == 0 or step + 1 == num_steps):
                metrics |= self.evaluate()
            if recorded:
                self.timelines.append(self.pipeline.timeline())
            if step + 1 < num_steps:
                metrics |= self._replan(step)
            yield metrics

    @property
    def is_replanned(self) -> bool:
        """Whether the plan that was made for the first steps' costs is running."""
        return self.replan is not None and self.replan.is_done

    def evaluate(self) -> Metrics:
        """`evaluation_loss`, and one for each of `metrics`: means over the held-out batches, on every rank.

        {} without held-out batches.
        """
        mine = [self._evaluated(number) for number in range(self.data.num_evaluation_batches)]
        # Only the last stage's owner has numbers.
        batches: list[dict[str, float]] = next(filter(any, gather(mine, self.pipeline.group)), [])
        names = batches[0] if batches else ()
        return {
            f"evaluation_{name}": math.fsum(batch[name] for batch in batches) / len(batches) for name in names
        }

    def _evaluated(self, number: int) -> dict[str, float]:
        """The loss and metrics of a held-out batch on the last stage's owner; {} on other ranks."""
        args, target = self._batch(self.data.evaluation, number)
        found: Mapping[str, float] = {}
        if self.metrics is None:
            losses = self.pipeline.evaluate(*args, target=target)
        else:
            losses, found = self.pipeline.evaluate(*args, target=target, metrics=self.metrics)
            if "loss" in found:
                raise ValueError("a metric is called 'loss', as the held-out loss is: give it another name")
        found = with_evaluation_losses(found, self.pipeline.evaluation_losses)
        return {"loss": math.fsum(map(float, losses)) / len(losses), **found} if losses else {}

    def _step(self, step: int) -> Metrics:
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        args, target = self._batch(self.data.train, step)
        losses = self.pipeline.step(*args, target=target)
        loss, norm, named = self._loss_and_norm(losses)
        rate = self.learning_rate(step)
        # All ranks have the same norm: if it isn't finite, all of them skip the update.
        if math.isfinite(norm):
            self._update(norm, rate)
        if self.pipeline.device.type == "cuda":
            torch.cuda.synchronize(self.pipeline.device)
        seconds = time.perf_counter() - begin
        metrics = {
            "step": step + 1,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate * self._base_rates[0],
            f"{self.data.unit}_per_second": self.data.items_per_batch / seconds,
            "step_seconds": seconds,
            "skipped": not math.isfinite(norm),
        }
        return with_named_losses(metrics, named)

    def _update(self, norm: float, rate: float) -> None:
        if self.clip_norm is not None and norm > self.clip_norm:
            scale_gradients(gradients_of(self.pipeline.parameters()), self.clip_norm / norm)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * rate
        self.optimizer.step()

    def _batch(self, source: Source, number: int) -> tuple[tuple[Any, ...], Any]:
        pipeline = self.pipeline
        return batch_for(pipeline.stages, pipeline.timetable.num_stages, source, number, pipeline.device)

    def _loss_and_norm(self, losses: list[Tensor]) -> tuple[float, float, dict[str, float]]:
        """The step's mean loss, the norm of its gradients and its named losses, equal on all ranks."""
        mean = torch.stack(losses).double().mean().item() if losses else None
        squares = squared_norms(gradients_of(self.pipeline.parameters()))
        mine = mean, squares, self.pipeline.step_losses.means()
        means, all_squares, named = zip(*gather(mine, self.pipeline.group), strict=True)
        (loss,) = (each for each in means if each is not None)  # from the last stage's owner
        return loss, global_norm(all_squares), summed(named)

    def _is_measured(self, step: int) -> bool:
        return self.replan is not None and self.replan.is_measured(step)

    def _replan(self, step: int) -> Metrics:
        """Let the replanner, if there is one, replace the pipeline; returns its metrics."""
        if self.replan is None:
            return {}
        _, target = self._batch(self.data.train, step)
        following, metrics = self.replan.after(step, self.pipeline, self.timelines, target)
        if following is not self.pipeline:
            self.pipeline = following
            self.timelines.clear()
        return metrics


def _check_gradients_are_in_grad(stages: Mapping[int, nn.Module]) -> None:
    for index, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                raise ValueError(
                    f"{name} of stage {index} has a main_grad, where W adds its gradient, but the trainer's "
                    "norm, clipping and optimizer read .grad: leave main_grad out, or step the Pipeline in a "
                    "loop of yours with an optimizer that reads it"
                )
