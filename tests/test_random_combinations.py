"""Random models, schedules, switches and optimizers train as plain autograd trains them.

The suite draws a few cases. More of them, other ones in each run:

    ZBPP_CASES=500 python -m pytest -n 0 --free-seeds tests/test_random_combinations.py

Hypothesis makes a case that fails smaller, and prints it as Python. A combination counts as refused if zbpp
raises ValueError before the first step.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, reject, settings
from torch import Tensor, nn

from helpers.drawn_cases import Case, cases
from helpers.drawn_models import Model, recompute_marked
from helpers.processes import outcomes
from helpers.split import float64
from zbpp import (
    ActivationOffload,
    Costs,
    GradientRelease,
    MasterWeights,
    Pipeline,
    PostValidation,
    Timetable,
    auxiliary_losses,
    clip_grad_norm_,
    make_mesh,
)
from zbpp.autograd import recompute
from zbpp.autograd.compiled import compile_stage
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.seeding import seed_of

STEPS = 3
CLIP = 0.05  # gradients are larger: all updates are clipped
EVERYTHING = ActivationOffload(Costs(host=1e-6), least_bytes=1)
# eps is large: it keeps an update from dividing a gradient of zero (a key's bias) by its own rounding error.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, eps=1e-2, momentum=0.5),
}


class Training:
    """Some steps of a model. What they give: losses by (part of the data, step), tensors by their names."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, *, is_plain: bool) -> None:
        self.case, self.model = case, Model(case, is_plain=is_plain)
        self.losses: dict[tuple[int, int], list[float]] = {}
        self.tensors: dict[str, Tensor] = {}

    def run(self) -> Run:
        case = self.case
        for number in range(STEPS):
            if "freeze" in case.switches:
                self.model.freeze(number == 1)
            if number % 2 == 0 or case.update != "accumulate":
                self.zero()
            self.step(number)
            if not case.updates_in_step:
                self._note(f"step {number}: gradient", self.gradient)
            if number % 2 == 1 or case.update != "accumulate":
                self.update()
            if "evaluate" in case.switches:
                self.step(number, is_trained=False)
        self.end()
        self._note("in the end: weight", self.weight)
        return Run(self.losses, self.tensors)

    def _note(self, what: str, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        for (place, name), parameter in self.model.named().items():
            tensor = tensor_of(parameter)
            if tensor is not None:
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                self.tensors[f"{what} of {place}.{name}"] = tensor.detach().to(torch.float64, copy=True)

    def step(self, number: int, *, is_trained: bool = True) -> None:
        raise NotImplementedError

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none="zero" not in self.case.switches or self.case.updates_in_step)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def update(self) -> None:
        self.optimizer.step()

    def end(self) -> None:
        """Wait for what is not done yet."""


class Run(NamedTuple):
    """What a Training gives; of a pipeline, what one rank has of it."""

    losses: dict[tuple[int, int], list[float]]
    tensors: dict[str, Tensor]


class Plain(Training):
    """One process, the whole model, microbatches one after another, loss.backward()."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, is_plain=True)
        self.parameters = self.model.parameters()
        self.has_sums = [each for each in self.parameters if each.requires_grad and case.has_main_grads]
        self.optimizer = OPTIMIZERS[case.optimizer](self.parameters)

    def step(self, number: int, *, is_trained: bool = True) -> None:
        for part in range(self.case.num_parts):
            losses = [*self._microbatches(number, part, is_trained)]
            self.losses[part, number if is_trained else STEPS + number] = losses
        for each in self.has_sums:  # a main_grad is never None
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad

    def _microbatches(self, number: int, part: int, is_trained: bool) -> Iterator[float]:
        model, case = self.model, self.case
        x, target, keywords = model.batch(number, part)
        x = model.front(x)
        inputs = x.detach().requires_grad_(x.requires_grad)
        seeds = [seed_of(0, number, stage, *([part] if part else [])) for stage in model.stages]
        for microbatch, rows in enumerate(torch.arange(len(x)).chunk(case.num_microbatches)):
            output: Any = (inputs[rows],)
            with torch.set_grad_enabled(is_trained), auxiliary_losses() as auxiliary:
                for seed, stage in zip(seeds, model.stages.values(), strict=True):
                    torch.manual_seed(seed + microbatch)
                    stage.train(is_trained)
                    output = stage(*output, **{name: each[rows] for name, each in keywords.items()})
                    output = output if isinstance(output, tuple) else (output,)
                loss = model.loss(output[0], target[rows])
                loss = sum(loss.values()) if isinstance(loss, dict) else loss
            if is_trained:
                ((loss + sum(auxiliary.values())) / case.num_microbatches / case.num_parts).backward()
            yield loss.item()
        if inputs.grad is not None:
            x.backward(inputs.grad)

    def update(self) -> None:
        if self.case.update in ("clip", "validated"):
            gradients = [each.grad for each in self.parameters if each.grad is not None]
            norm = torch.stack([each.norm() for each in gradients]).norm()
            for each in gradients:
                each *= min(1.0, CLIP / (norm + 1e-6))
        super().update()


class Refused(Exception):
    """zbpp has refused the combination before the first step."""


class Piped(Training):
    """One rank of a Pipeline."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, is_plain=False)
        self.part, timetable = rank % case.num_parts, case.timetable()
        self.model.keep(timetable.stages_of(rank // case.num_parts))
        self.masters: MasterWeights | None = None
        self._prepare_on_all_ranks()
        try:
            self._make(timetable)
        except ValueError as error:
            raise Refused(str(error)) from error

    def _prepare_on_all_ranks(self) -> None:
        """Preparing is not collective: one rank's refusal is told to the others."""
        refusal = ""
        try:
            self._prepare()
        except ValueError as error:
            refusal = str(error)
        refusals = [refusal]
        if dist.is_initialized():
            refusals = [""] * dist.get_world_size()
            dist.all_gather_object(refusals, refusal)
        if any(refusals):
            raise Refused(max(refusals))

    def _prepare(self) -> None:
        case, stages = self.case, self.model.stages
        if case.weights == "offloaded":
            OffloadedWeights(stages, "cpu")
        recompute_marked(stages.values())
        for stage in stages.values():
            if "recompute" in case.switches:
                recompute(stage)
            if case.compiled:
                compile_stage(stage, whole=case.compiled == "stage", backend="eager")

    def _make(self, timetable: Timetable) -> None:
        case, model = self.case, self.model
        self.pipeline = Pipeline(
            model.stages,
            timetable,
            model.loss,
            mesh=make_mesh(**{case.parallel: 2}) if case.parallel else None,
            extras=[EVERYTHING] if "offload" in case.switches else [],
            dynamic_shapes="dynamic shapes" in case.switches,
            timeout=20,
        )
        self.parameters = model.parameters()
        if case.weights == "masters":
            self.masters = MasterWeights(self.parameters, torch.bfloat16)
        self.summed = [p for p in self.parameters if p.requires_grad and case.weights == "main_grad"]
        for each in self.summed:
            each.main_grad = torch.zeros_like(each)
        trained = self.masters.parameters() if self.masters else self.parameters
        self.optimizer = OPTIMIZERS[case.optimizer](trained)
        self.steps: Any = self.pipeline
        if case.update == "release":
            self.pipeline.use(GradientRelease(self.optimizer))
        if case.update == "validated":
            self.steps = PostValidation(self.pipeline, self.optimizer, clip_norm=CLIP, masters=self.masters)

    def step(self, number: int, *, is_trained: bool = True) -> None:
        x, target, keywords = self.model.batch(number, self.part)
        run = self.steps.step if is_trained else self.pipeline.evaluate
        losses = run(self.model.front(x), target=target, **keywords)
        self.losses[self.part, number if is_trained else STEPS + number] = [*map(float, losses)]

    def zero(self) -> None:
        for each in self.summed:
            each.main_grad.zero_()
        if not self.case.updates_in_step:
            super().zero() if self.masters is None else self.masters.zero_grad()

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if self.masters is not None:
            return self.masters.of(parameter).grad
        return getattr(parameter, "main_grad", parameter.grad)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter if self.masters is None else self.masters.of(parameter)

    def update(self) -> None:
        if self.case.updates_in_step:
            return
        if self.case.update == "clip":
            clip_grad_norm_(self.pipeline, CLIP)
        for each in self.summed:
            each.grad = each.main_grad
        super().update()
        for each in self.summed:
            each.grad = None
        if self.masters is not None:
            self.masters.update()

    def end(self) -> None:
        self.pipeline.finish_update()
        self.pipeline.close()


# ----------------------------------------------------------------------------------------------- comparing


def check(case: Case, found: Run, expected: Run) -> None:
    """Raise AssertionError for the first difference, relative to the largest number of the tensor.

    Where they are all small, relative to the largest of all gradients or weights: some are zero in theory.
    """
    tolerance, least = (0.2, 1e-2) if case.weights == "masters" else (1e-10, 1e-4)  # masters: bfloat16
    for key, losses in expected.losses.items():
        assert found.losses[key] == pytest.approx(losses, rel=tolerance), f"losses of {key} differ"
    for what in ("weight",) if case.updates_in_step else ("gradient", "weight"):
        names = {name for name in {*found.tensors, *expected.tensors} if f": {what} of" in name}
        known = [expected.tensors[name].abs().max().item() for name in names if name in expected.tensors]
        for name in sorted(names):
            assert name in found.tensors, f"there is no {name}"
            assert name in expected.tensors, f"there is a {name}"
            tensor = expected.tensors[name]
            scale = max(tensor.abs().max().item(), least * max(known))
            difference = (found.tensors[name] - tensor).abs().max().item()
            assert difference <= tolerance * scale, f"{name} is off by {difference / scale:.1e}"


REFUSED = "refused: "


def part_of(rank: int, case: Case) -> Run | str:
    """What a rank has of a run; a refusal or a traceback."""
    try:
        with float64():
            return Piped(case, rank).run()
    except Refused as refusal:
        return f"{REFUSED}{refusal}"
    except Exception:
        return traceback.format_exc()


def judge(case: Case, parts: Sequence[Run | str]) -> None:
    """Compare the parts of all ranks with plain autograd. What zbpp or plain autograd refuses is no case."""
    texts = [each for each in parts if isinstance(each, str)]
    is_refused = len(texts) == len(parts) and all(text.startswith(REFUSED) for text in texts)
    assume(not is_refused)
    try:
        with float64():
            expected = Plain(case).run()
    except Exception:
        reject()
    assert not texts, "\n".join(texts)
    whole = Run({}, {})
    for each in parts:
        whole.losses.update({key: losses for key, losses in each.losses.items() if losses})
        whole.tensors.update(each.tensors)
    check(case, whole, expected)


def draws(number: int) -> settings:
    """How many cases, unless the environment says it. Models and plans are slow to draw."""
    return settings(
        max_examples=int(os.environ.get("ZBPP_CASES", number)), suppress_health_check=[HealthCheck.too_slow]
    )


limit = pytest.mark.timeout(0 if "ZBPP_CASES" in os.environ else 240)


@limit
@pytest.mark.slow
@draws(50)
@given(cases(1))
def test_random_combinations_train_as_plain_autograd_does(case: Case) -> None:
    judge(case, [part_of(0, case)])


@limit
@pytest.mark.nightly
@draws(400)
@given(cases(1))
def test_many_random_combinations_train_as_plain_autograd_does(case: Case) -> None:
    judge(case, [part_of(0, case)])


@limit
@pytest.mark.nightly
@draws(8)
@given(cases(4))
def test_random_combinations_in_four_processes_train_as_plain_autograd_does(case: Case) -> None:
    judge(case, [answer for _, answer in outcomes(part_of, 4, case, timeout=100)])
