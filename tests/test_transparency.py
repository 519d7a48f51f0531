"""A pipeline changes nothing: every schedule, real processes, against a plain loop.

Between schedules and numbers of ranks, losses and gradients are equal to the last bit; against
plain autograd to 1e-12 in float64 (a GEMM that accumulates rounds in another order than a GEMM
and an add), relative to max(the parameter's largest gradient, 1e-6 of the model's largest: a
key's bias has gradient zero in theory).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.schedule import SCHEDULES

M, BATCH, TIME, VOCAB = 8, 16, 12, 31
MODELS = {
    "gpt": lambda: Gpt(vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=2, sequence_length=TIME),
    "llama": lambda: Llama(
        vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=4, num_kv_heads=2, sequence_length=TIME
    ),
}
Result = tuple[list[float], dict[str, Tensor]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(rank: int, model_name: str, schedule: str, num_ranks: int, num_steps: int) -> Result:
    """Losses, and the gradients of the last step, of this rank."""
    torch.set_default_dtype(torch.float64)
    model = MODELS[model_name]()
    timetable = plan(schedule, num_ranks, M)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, loss_fn=model.loss)
    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    losses: list[float] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs, target = batch(step)
        has_first, has_last = 0 in stages, timetable.num_stages - 1 in stages
        found = pipeline.step(*((inputs,) if has_first else ()), target=target if has_last else None)
        losses += [loss.item() for loss in found]
        optimizer.step()
    return losses, {name: p.grad for name, p in parameters.items() if p.grad is not None}


def plain(model_name: str, num_steps: int) -> Result:
    """One process, the whole model, microbatches one after another, loss.backward()."""
    torch.set_default_dtype(torch.float64)
    try:
        model = MODELS[model_name]()
        module = model.build_stage(0, 1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = []
        for step in range(num_steps):
            optimizer.zero_grad()
            for inputs, target in zip(*(each.chunk(M) for each in batch(step)), strict=True):
                loss = model.loss(module(inputs), target)
                (loss / M).backward()
                losses.append(loss.item())
            optimizer.step()
        return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    finally:
        torch.set_default_dtype(torch.float32)


def merged(results: list[Any]) -> Result:
    losses = [loss for found, _ in results for loss in found]
    return losses, {name: grad for _, grads in results for name, grad in grads.items()}


_FOUND: dict[tuple[str, str, int], Result] = {}


def piped(model: str, schedule: str, num_ranks: int) -> Result:
    """Cached: each run is compared with several others."""
    key = (model, schedule, num_ranks)
    if key not in _FOUND:
        _FOUND[key] = merged(run_ranks(train, num_ranks, model, schedule, num_ranks, 2))
    return _FOUND[key]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_equal_to_the_last_bit(schedule: str, num_ranks: int) -> None:
    losses, grads = piped("gpt", schedule, num_ranks)
    expected_losses, expected = piped("gpt", "gpipe", 1)
    assert losses == expected_losses
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("model", "schedule", "num_ranks"), [("gpt", "zb_h1", 2), ("llama", "zb_v", 2)])
def test_gradients_are_those_of_plain_autograd(model: str, schedule: str, num_ranks: int) -> None:
    losses, grads = piped(model, schedule, num_ranks)
    expected_losses, expected = plain(model, 2)
    assert losses == pytest.approx(expected_losses, rel=1e-12, abs=0)
    assert grads.keys() == expected.keys()
    floor = 1e-6 * max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        scale = max(grad.abs().max().item(), floor)
        assert (grads[name] - grad).abs().max().item() <= 1e-12 * scale, name
