"""Training with a pipeline is training without one: every schedule, in real processes.

Losses, gradients and weights of a run are equal to the last bit under every schedule and number of ranks.
They differ from those of a plain loop by at most 1e-12 in float64, since a GEMM that accumulates rounds in
another order than a GEMM and an add. That is relative to the parameter's largest gradient, or to 1e-6 of the
model's largest if that is more: a key's bias has gradient zero in theory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.host_links import through_host_memory
from helpers.processes import run_ranks
from helpers.split import assert_close, float64
from zbpp import Pipeline, plan
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.planning import SCHEDULES

M, BATCH, TIME, VOCAB = 8, 16, 12, 31
NUM_STEPS = 4
# The step whose gradients are compared: later, training has amplified a difference of 1e-16. AdamW's eps
# keeps the first update from dividing a gradient of zero (a key's bias) by its own rounding error.
COMPARED = 2
BOUNDS = {"two": (0, 6, 12), "four": (0, 3, 6, 9, 12), "unequal": (0, 5, 8, 11, 12)}
"""Where the slices of a sequence begin."""
SLICED = [name for name, made in SCHEDULES.items() if "num_slices" in inspect.signature(made).parameters]
MODELS = {
    "gpt": lambda: Gpt(vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=2, sequence_length=TIME),
    "half a gpt": lambda: Gpt(
        vocab_size=VOCAB, num_layers=4, hidden_size=16, num_heads=2, sequence_length=TIME
    ),
    "llama": lambda: Llama(
        vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=4, num_kv_heads=2, sequence_length=TIME
    ),
}


class Run(NamedTuple):
    """Microbatch losses of all steps; by parameter, gradients of one early step and weights at the end."""

    losses: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


Piped = Callable[[str, str, int, int], Run]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A batch in which each token is 0 to 2 above the one before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, (BATCH, TIME + 1), generator=generator).cumsum(1) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def parameters_of(stages: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {name: p for stage in stages.values() for name, p in stage.named_parameters()}


def train(
    rank: int, model_name: str, schedule: str, num_ranks: int, num_steps: int, bounds: tuple[int, ...] = ()
) -> Run:
    """What this rank has of a run. bounds: of the slices that its sequences come in; (): they come whole."""
    torch.set_default_dtype(torch.float64)
    model = MODELS[model_name]()
    timetable = plan(schedule, num_ranks, M, num_slices=max(1, len(bounds) - 1))
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, loss_fn=model.loss, slice_bounds=bounds)
    parameters = parameters_of(stages)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-4)
    losses, grads = [], {}
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs, target = batch(step)
        has_first, has_last = 0 in stages, timetable.num_stages - 1 in stages
        found = pipeline.step(*((inputs,) if has_first else ()), target=target if has_last else None)
        losses += [loss.item() for loss in found]
        if step + 1 == min(COMPARED, num_steps):
            grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
    return Run(losses, grads, {name: p.detach() for name, p in parameters.items()})


def train_all(rank: int, model_name: str, schedules: list[str], num_ranks: int, num_steps: int) -> list[Run]:
    """One run after the other in the same processes."""
    return [train(rank, model_name, schedule, num_ranks, num_steps) for schedule in schedules]


def train_sliced(
    rank: int, model: str, schedules: list[str], names: list[str], num_ranks: int, num_steps: int
) -> list[Run]:
    """One run after the other whose sequences come in slices. names: of BOUNDS."""
    return [
        train(rank, model, schedule, num_ranks, num_steps, BOUNDS[name])
        for schedule in schedules
        for name in names
    ]


@float64()
def plain(model_name: str, num_steps: int) -> Run:
    """One process, the whole model, microbatches one after another, loss.backward()."""
    model = MODELS[model_name]()
    module = model.build_stage(0, 1)
    parameters = parameters_of({0: module})
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-4)
    losses, grads = [], {}
    for step in range(num_steps):
        optimizer.zero_grad()
        for inputs, target in zip(*(each.chunk(M) for each in batch(step)), strict=True):
            loss = model.loss(module(inputs), target)
            (loss / M).backward()
            losses.append(loss.item())
        if step + 1 == min(COMPARED, num_steps):
            grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
    return Run(losses, grads, {name: p.detach() for name, p in parameters.items()})


def merged(runs: list[Run]) -> Run:
    return Run(
        [loss for run in runs for loss in run.losses],
        {name: grad for run in runs for name, grad in run.grads.items()},
        {name: weight for run in runs for name, weight in run.weights.items()},
    )


@pytest.fixture(scope="module")
def piped() -> Piped:
    """piped(model, schedule, num_ranks, num_steps): the merged run of all ranks.

    Runs are kept, as starting processes takes long: all schedules of one model and rank count share a start.
    """
    found: dict[tuple[str, int, int], dict[str, Run]] = {}

    def run(model: str, schedule: str, num_ranks: int, num_steps: int) -> Run:
        key = (model, num_ranks, num_steps)
        if key not in found:
            names = list(SCHEDULES) if num_steps == NUM_STEPS else [schedule]
            results = run_ranks(train_all, num_ranks, model, names, num_ranks, num_steps, timeout=220)
            found[key] = {name: merged([rank[i] for rank in results]) for i, name in enumerate(names)}
        return found[key][schedule]

    return run


@pytest.mark.slow  # one of each rank count starts the processes for all schedules
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_4_steps_is_equal_to_the_last_bit(piped: Piped, schedule: str, num_ranks: int) -> None:
    found, expected = piped("gpt", schedule, num_ranks, NUM_STEPS), piped("gpt", "gpipe", 1, NUM_STEPS)
    assert len(expected.losses) == NUM_STEPS * M
    assert found.losses == expected.losses
    for mine, theirs in ((found.grads, expected.grads), (found.weights, expected.weights)):
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_links_through_host_memory_change_nothing(piped: Piped, num_ranks: int) -> None:
    """GPUs in a job on gloo have these links: no message is lost, late, or freed too early."""
    names = ["zb_h1", "interleaved_1f1b", "zb_v"]
    runs = run_ranks(through_host_memory, num_ranks, train_all, "gpt", names, num_ranks, COMPARED)
    expected = piped("gpt", "gpipe", 1, COMPARED)
    for place, _ in enumerate(names):
        found = merged([rank[place] for rank in runs])
        assert found.losses == expected.losses
        assert found.grads.keys() == expected.grads.keys()
        assert [
            name for name, grad in expected.grads.items() if not torch.equal(found.grads[name], grad)
        ] == []


def test_the_losses_of_4_steps_are_those_of_a_plain_loop(piped: Piped) -> None:
    found, expected = piped("gpt", "zb_h1", 2, NUM_STEPS), plain("gpt", NUM_STEPS)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
    assert sum(expected.losses[-M:]) < 0.95 * sum(expected.losses[:M])  # it learns


@pytest.mark.nightly
def test_a_longer_run_learns_as_a_plain_loop_does(piped: Piped) -> None:
    found, expected = piped("gpt", "zb_h1", 2, 6), plain("gpt", 6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
    assert sum(expected.losses[-M:]) < 0.9 * sum(expected.losses[:M])


@pytest.mark.parametrize(("model", "schedule", "num_ranks"), [("gpt", "zb_h1", 2), ("llama", "zb_v", 2)])
def test_gradients_are_those_of_plain_autograd(
    piped: Piped, model: str, schedule: str, num_ranks: int
) -> None:
    found, expected = piped(model, schedule, num_ranks, COMPARED), plain(model, COMPARED)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
    assert_close(found.grads, expected.grads)


@pytest.mark.parametrize(
    ("num_ranks", "schedules", "names", "num_steps"),
    [
        (1, ["zb_v"], ["two", "unequal"], COMPARED),
        (2, ["zb_v"], ["four", "unequal"], COMPARED),
        pytest.param(2, SLICED, ["unequal"], 1, marks=pytest.mark.slow),
        (4, ["zb_h1", "zb_v"], ["unequal"], 1),
        pytest.param(1, ["1f1b", "zb_v"], [*BOUNDS], COMPARED, marks=pytest.mark.nightly),
        pytest.param(2, ["zb_v"], [*BOUNDS], COMPARED, marks=pytest.mark.nightly),
        pytest.param(2, SLICED, ["unequal"], COMPARED, marks=pytest.mark.nightly),
        pytest.param(4, SLICED, [*BOUNDS], COMPARED, marks=pytest.mark.nightly),
    ],
)
def test_sequences_in_slices_have_the_gradients_of_whole_ones(
    num_ranks: int, schedules: list[str], names: list[str], num_steps: int
) -> None:
    """Those of plain autograd; and with one set of slices, equal to the last bit to those of one rank."""
    model = "gpt" if num_ranks == 4 else "half a gpt"  # a layer for each stage
    expected = plain(model, num_steps)
    alone = dict(zip(names, train_sliced(0, model, ["1f1b"], names, 1, num_steps), strict=True))
    torch.set_default_dtype(torch.float32)
    ranks = run_ranks(train_sliced, num_ranks, model, schedules, names, num_ranks, num_steps, timeout=220)
    runs = iter([merged([*parts]) for parts in zip(*ranks, strict=True)])
    for schedule in schedules:
        for name in names:
            found, same = next(runs), alone[name]
            assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0), (schedule, name)
            assert_close(found.grads, expected.grads)
            assert found.losses == same.losses, (schedule, name)
            assert all(torch.equal(found.grads[each], grad) for each, grad in same.grads.items())
