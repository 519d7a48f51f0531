"""Figures of post-validation: time per step without a wait for the norm, and what taking back costs.

The times are those of EMULATED stages, which sleep (zbpp/models/emulated.py), on four ranks: consecutive
steps beside m(F+B+W), the work of one rank in a step, and beside steps that wait. The work and the simulated
steps have the nominal sleeps. A real sleep is longer, by 0.1 ms on a quiet machine and by 1 ms where eight
processes want two cores, and so is every message; the sleeps are long so that this counts little.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.launch import on_ranks
from zbpp.models.emulated import Emulated
from zbpp.planning import plan
from zbpp.runtime import Pipeline, clip_grad_norm_
from zbpp.runtime.world import world
from zbpp.schedule import Costs, simulate
from zbpp.training.inverse import InverseRollback
from zbpp.training.post_validation import PostValidation
from zbpp.training.rollback import ExactRollback, Rollback

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS, NUM_LAYERS = 4, 12, 20, 8  # microbatches: the paper's 3 per rank
MILLISECONDS = 60.0  # of F, of B and of W of a layer
SCHEDULES = ("zb_h2", "zb_v")
_NUM_COMPARED = 8  # steps of the run that waits
_NUM_WITH_REDONE, _REDONE = 12, (2, 7)  # steps, and those of them whose update has to be done again
_CLIP_NORM = 1e6
_NUM_INVERTED, _NUM_ELEMENTS = 100, 100_000


class _Times(NamedTuple):
    """ms: per step with a wait for the norm, per step without it, and of an update that is done again."""

    waiting: float
    validated: float
    rollback: float


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line of the report; takes about six minutes."""
    found = []
    for schedule in SCHEDULES:
        found += _rows_of(schedule, _measured(schedule))
    return [*found, *_inverse_rows(), *_copy_rows()]


def _rows_of(schedule: str, times: _Times) -> list[tuple[str, str]]:
    timetable = plan(schedule, NUM_RANKS, NUM_MICROBATCHES)
    ms = MILLISECONDS * NUM_LAYERS / timetable.num_stages
    costs = Costs(f=ms, b=ms, w=ms)
    work = NUM_MICROBATCHES * NUM_LAYERS / NUM_RANKS * 3 * MILLISECONDS
    predicted = simulate(timetable, costs, num_steps=NUM_STEPS).makespan / NUM_STEPS
    title = f"post-validation, {schedule}, EMULATED p={NUM_RANKS}"
    return [
        (f"{title}: m(F+B+W)", f"{work:.0f} ms"),
        (f"{title}: time per step of {NUM_STEPS}", _beside(times.validated, work)),
        (f"{title}: the same, simulated", _beside(predicted, work)),
        (f"{title}: steps that wait for the norm", _beside(times.waiting, work)),
        (f"{title}: steps that wait, simulated", _beside(simulate(timetable, costs).makespan, work)),
        (f"{title}: cost of a rollback", f"{times.rollback:.0f} ms, {times.rollback / work:.0%} of a step"),
    ]


def _beside(time: float, work: float) -> str:
    return f"{time:.0f} ms, {time / work:.3f} of m(F+B+W)"


def _measured(schedule: str) -> _Times:
    """The times of a job of NUM_RANKS processes, as its first rank measured them."""
    return _Times(*on_ranks(NUM_RANKS, _rank, schedule))


def _rank(schedule: str) -> list[float]:
    with world(device="cpu", timeout=120.0):
        waiting = _ends(schedule, _NUM_COMPARED, is_validated=False)
        validated = _ends(schedule, NUM_STEPS)
        with_redone = _ends(schedule, _NUM_WITH_REDONE, redone=_REDONE)
        return [waiting[-1] / _NUM_COMPARED, validated[-1] / NUM_STEPS, _cost_of_rollback(with_redone)]


def _cost_of_rollback(ends: list[float]) -> float:
    """The time (ms) that one redone update costs: the two steps after it, less two usual steps."""
    lengths = dict(enumerate((end - begin for begin, end in pairwise(ends[:-1])), start=1))
    longer = [step + later for step in _REDONE for later in (1, 2)]
    usual = statistics.median(length for step, length in lengths.items() if step not in longer)
    return sum(lengths[step] - usual for step in longer) / len(_REDONE)


def _ends(
    schedule: str, num_steps: int, *, is_validated: bool = True, redone: tuple[int, ...] = ()
) -> list[float]:
    """The times (ms) at which consecutive steps ended on this rank, and at last on all ranks.

    Time 0 is a moment when all ranks had done two steps before. redone: steps with too large gradients.
    """
    model = Emulated(num_layers=NUM_LAYERS, f=MILLISECONDS, b=MILLISECONDS, w=MILLISECONDS)
    with Pipeline(model, schedule, num_microbatches=NUM_MICROBATCHES) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-6)
        validated = PostValidation(pipeline, optimizer, clip_norm=_CLIP_NORM) if is_validated else None
        x = torch.randn(NUM_MICROBATCHES, 8)
        ends: list[float] = []
        for step in range(-2, num_steps):
            if step == 0:
                _wait_for_all(validated)
                begin = time.perf_counter()
            target = torch.full_like(x, 1e9 if step in redone else 1.0)
            if validated is None:
                _step_that_waits(pipeline, optimizer, x, target)
            else:
                validated.step(x, target=target)
            ends.append(time.perf_counter())
        _wait_for_all(validated)
        ends.append(time.perf_counter())
        if validated is not None and validated.num_redone != len(redone):
            raise RuntimeError(f"{validated.num_redone} updates were redone, not {len(redone)}")
        return [(end - begin) * 1e3 for end in ends[2:]]


def _wait_for_all(validated: PostValidation | None) -> None:
    if validated is not None:
        validated.settle()
    dist.barrier()


def _step_that_waits(pipeline: Pipeline, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    pipeline.step(x, target=target)
    clip_grad_norm_(pipeline, _CLIP_NORM)
    optimizer.step()


def _inverse_rows() -> list[tuple[str, str]]:
    """The errors that the computed rollback of AdamW leaves, in float32."""
    errors = inverse_errors()
    return [
        (
            f"rollback=inverse, AdamW, float32: {name}",
            f"{same:.0%} equal to the last bit; others off by {typical:.1e} (median) to {largest:.1e}",
        )
        for name, (same, typical, largest) in errors.items()
    ]


def inverse_errors() -> dict[str, tuple[float, float, float]]:
    """Per tensor: the share of elements that come back, median and largest error of the others.

    Errors are relative to the root mean square of the tensor.
    """
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(_NUM_ELEMENTS))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
    exact, inverse = ExactRollback(optimizer), InverseRollback(optimizer)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for step in range(_NUM_INVERTED):
        weight.grad = torch.randn(_NUM_ELEMENTS)
        if step:
            before = {name: each.clone() for name, each in _tensors(optimizer, weight).items()}
            exact.keep([])
            _step_and_undo(optimizer, inverse)
            for name, each in _tensors(optimizer, weight).items():
                found.setdefault(name, []).append(_error(before[name], each))
            exact.after_step(has_stepped=True)
            with exact.undone():  # so that errors don't add up
                pass
        optimizer.step()
    return {
        name: (
            statistics.mean(same for same, _, _ in each),
            statistics.median(typical for _, typical, _ in each),
            max(largest for _, _, largest in each),
        )
        for name, each in found.items()
    }


def _step_and_undo(optimizer: torch.optim.Optimizer, rollback: Rollback) -> None:
    rollback.keep([])
    optimizer.step()
    rollback.after_step(has_stepped=True)
    with rollback.undone():
        pass


def _tensors(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state[weight]
    return {"weights": weight.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}


def _error(before: Tensor, after: Tensor) -> tuple[float, float, float]:
    differences = (after - before).abs() / before.square().mean().sqrt()
    wrong = differences[differences > 0]
    same = 1 - len(wrong) / len(differences)
    return (same, wrong.median().item(), wrong.max().item()) if len(wrong) else (same, 0.0, 0.0)


def _copy_rows() -> list[tuple[str, str]]:
    """The memory of the exact rollback's copies."""
    weight = nn.Parameter(torch.randn(_NUM_ELEMENTS))
    optimizer = torch.optim.AdamW([weight])
    rollback = ExactRollback(optimizer)
    for _ in range(3):
        weight.grad = torch.randn(_NUM_ELEMENTS)
        rollback.keep([])
        optimizer.step()
        rollback.after_step(has_stepped=True)
    share = rollback.num_bytes / weight.nbytes
    return [("rollback=exact, AdamW, float32: memory of the copies", f"{share:.1f} times the weights'")]
