"""2 and 4 ranks on one GPU, by links through host memory: do they compute what one process computes?

Every case in float64 is compared with one rank to the last bit (losses, gradients), and with plain autograd
to rounding. Delays sleep at random, on the host and on the device, before each F and in each B.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpu_check.local_ranks import on_ranks
from gpu_check.measuring import digest, gradients, unlike
from gpu_check.page import Here, Page
from zbpp.autograd import recompute
from zbpp.autograd.compiled import compile_stage
from zbpp.features.activation_offload.activation_offload import ActivationOffload
from zbpp.features.graphs import CudaGraphs
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.parity_check import parity
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.mesh import planned_by_rank_0
from zbpp.schedule import Costs, Timetable

ROWS, TIME, VOCAB = 16, 16, 61
NUM_STEPS = 5  # CUDA graphs are captured in the third
TOLERANCE = 1e-9
ALONE = "one rank"
_MOST_LOST = 3  # cases in a row: then something is wrong with all of them
SIZES: dict[str, int] = {"vocab_size": VOCAB, "num_layers": 8, "sequence_length": TIME}
UNEVEN = Costs(f=1.0, b=1.3, w=0.7, comm=0.2)


class Case(NamedTuple):
    """model: a key of MODELS. variant: what is done beside training. same_as: whose bits it must have."""

    name: str
    model: str = "gpt"
    schedule: str = "zb_h1"
    variant: str = ""
    same_as: str = ALONE


class Run(NamedTuple):
    """What one rank has of a run. error: the largest difference from plain autograd, relative."""

    losses: list[float]
    bits: dict[str, str]
    error: float


def model_of(name: str, here: Here) -> Any:
    hidden = here.choose(64, 16)
    if name == "tie":
        return Llama(**SIZES, hidden_size=hidden, num_heads=4, num_kv_heads=2, tie_embeddings=True)
    dropout = 0.1 if name == "dropout" else 0.0
    return Gpt(**SIZES, hidden_size=hidden, num_heads=4, dropout=dropout)


def cases(num_ranks: int, here: Here) -> Iterator[Case]:
    """The cases of a job."""
    if num_ranks == 1:
        yield Case(ALONE, schedule="gpipe", same_as="")
        yield Case(f"{ALONE}, a tie", "tie", "gpipe", same_as="")
        return
    if here.is_small and num_ranks == 4:
        yield Case("zb_v, random delays", schedule="zb_v", variant="delays")
        return
    for schedule in ("zb_h1", "zb_v", "interleaved_1f1b", "searched"):
        yield Case(schedule, schedule=schedule)
        if not here.is_small:
            yield Case(f"{schedule}, random delays", schedule=schedule, variant="delays")
        if here.is_cuda:
            yield Case(f"{schedule}, CUDA graphs", schedule=schedule, variant="graphs")
    # One rank adds the gradients of both places in another order than two ranks.
    yield Case("a tie of the first and the last stage", "tie", same_as="")
    yield Case("dropout, 1f1b", "dropout", "1f1b", same_as="")
    yield Case("dropout, zb_h1", "dropout", "zb_h1", same_as="dropout, 1f1b")
    yield Case("recompute", variant="recompute")
    yield Case("offload", variant="offload")
    if num_ranks == 2:
        yield Case("compiled", variant="compiled", same_as="")


def run(page: Page) -> None:
    known: Known = {}
    for num_ranks in (1, 2, 4):
        page.say(f"{num_ranks} rank(s); unlike: losses and gradients with other bits than one rank's")
        _job(page, num_ranks, known)


Known = dict[str, tuple[list[float], dict[str, str]]]


def _job(page: Page, num_ranks: int, known: Known) -> None:
    """All cases with so many ranks. A case that fails costs its ranks: new ones go on with the next case."""
    results, num_lost = iter(()), 0
    for place, case in enumerate(cases(num_ranks, page.here)):
        if place == 0 or num_lost:
            results = on_ranks(num_ranks, on_rank, page.here, num_ranks, place)
        num_lost = 0 if _row(page, case, known, results) else num_lost + 1
        if num_lost == _MOST_LOST:
            page.say(f"{_MOST_LOST} cases failed one after the other: the others are left out")
            return


def _row(page: Page, case: Case, known: Known, results: Iterator[list[Run]]) -> bool:
    """Write the next result of a job; whether there was one."""
    found: list[Run] = []

    def error() -> float:
        found.extend(next(results))
        return max(each.error for each in found)

    page.figure(f"{case.name}: difference from plain autograd", "", error, most=TOLERANCE)
    if not found:
        return False
    losses = [loss for each in found for loss in each.losses]
    bits = {name: value for each in found for name, value in each.bits.items()}
    known[case.name] = losses, bits

    def num_unlike() -> int:
        expected, expected_bits = known[case.same_as]
        return sum(a != b for a, b in zip(losses, expected, strict=True)) + unlike(bits, expected_bits)

    if case.same_as:
        page.check(f"{case.name}: unlike", num_unlike)
    return True


def on_rank(rank: int, here: Here, num_ranks: int, first: int) -> Iterator[Run]:
    """The cases from the first one of this number on, on one rank."""
    for case in islice(cases(num_ranks, here), first, None):
        print(f"rank {rank}: {case.name}", file=sys.stderr, flush=True)
        yield trained(case, rank, num_ranks, here)


class Prepared:
    """A model whose stages are in float64 on the device, and changed by a case's variant."""

    def __init__(self, model: Any, change: Callable[[nn.Module], None], here: Here) -> None:
        self.model, self.loss, self.tied = model, model.loss, model.tied
        self._change, self._here = change, here

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        stage: nn.Module = self.model.build_stage(index, num_stages).to(self._here.device, torch.float64)
        self._change(stage)
        return stage


def trained(case: Case, rank: int, num_ranks: int, here: Here) -> Run:
    """The losses and gradients of the last of some equal steps."""
    model, timetable = model_of(case.model, here), timetable_of(case.schedule, num_ranks, here)
    change, extras = VARIANTS[case.variant]
    x, target = (each.to(here.device) for each in batch())
    args = (x,) if timetable.rank_of[0] == rank else ()
    given: dict[str, Any] = {"target": target} if timetable.rank_of[-1] == rank else {}
    prepared = Prepared(model, change, here)
    with Pipeline(prepared, timetable, extras=extras(), device=here.device) as pipeline:

        def zero_grad() -> None:
            for stage in pipeline.stages.values():
                stage.zero_grad(set_to_none=False)

        def step(_: object) -> list[Tensor]:
            return pipeline.step(*args, **given)

        for _ in range(NUM_STEPS if case.variant == "graphs" else 2):
            zero_grad()
            pipeline.num_steps = 0  # the same dropout in each step
            losses = [loss.item() for loss in step(None)]
        bits = digest(gradients(pipeline.stages))
        whole = partial(model.build_stage, 0, 1)
        how: dict[str, Any] = {"loss_fn": model.loss, "zero_grad": zero_grad}
        report = parity(step, pipeline, whole=whole, batch=(x, target), **how)
    return Run(losses, bits, max(report.checks.values()))


def timetable_of(schedule: str, num_ranks: int, here: Here) -> Timetable:
    if schedule == "searched":  # for so many seconds: two ranks may find two plans
        limit = here.choose(1.0, 0.1)
        return planned_by_rank_0(
            lambda: plan("zb_auto", num_ranks, microbatches(here), costs=UNEVEN, time_limit=limit)
        )
    return plan(schedule, num_ranks, microbatches(here))


def microbatches(here: Here) -> int:
    number: int = here.choose(8, 4)
    return number


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ---- What is done beside training


def _delayed(stage: nn.Module) -> None:
    stage.register_forward_pre_hook(lambda module, args: tuple(map(_Delay.apply, args)))


def _recomputed(stage: nn.Module) -> None:
    for name, layer in stage.named_children():
        if name.startswith("layer"):
            recompute(layer)


def _compiled(stage: nn.Module) -> None:
    here = Here(next(stage.parameters()).device, is_small=False)
    compile_stage(stage, whole=False, backend=here.compiler)


def _offload() -> list[Any]:
    return [ActivationOffload(costs=Costs(f=2, b=2, w=2, host=0.1), least_bytes=1)]


# {name: (changes a stage, makes the extras)}
VARIANTS: dict[str, tuple[Callable[[nn.Module], None], Callable[[], list[Any]]]] = {
    "": (lambda stage: None, list),
    "delays": (_delayed, list),
    "graphs": (lambda stage: None, lambda: [CudaGraphs()]),
    "recompute": (_recomputed, list),
    "offload": (lambda stage: None, _offload),
    "compiled": (_compiled, list),
}


class _Delay(torch.autograd.Function):
    """x as it is; sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _sleep(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        _sleep(dy)
        return dy


def _sleep(tensor: Tensor) -> None:
    own = random.Random(time.perf_counter_ns())  # the model's generators stay as they are
    time.sleep(own.random() * 2e-3)
    if tensor.is_cuda:
        torch.cuda._sleep(int(own.random() * 2e6))  # about 1 ms
