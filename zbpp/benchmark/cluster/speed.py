"""Timed steps of a larger model: measured beside simulated with measured costs, torch's runtime beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.benchmark.bench import Options, bench
from zbpp.benchmark.cluster.rows import FAILED, OK
from zbpp.benchmark.cluster.settings import Settings
from zbpp.benchmark.report import rows_of
from zbpp.benchmark.workload import Workload
from zbpp.data import Data
from zbpp.job.world import World
from zbpp.models.gpt import Gpt

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step

_VOCAB = 1024  # small, so that the head does not make the last stage heavier than the others
_HEAD_SIZE = 64


def steps(settings: Settings, here: World) -> Iterator[Step]:
    """A row for all schedules together, then one for each schedule and runtime. Collective."""
    rows: list[dict[str, Any]] = []

    def time_all() -> Found:
        work = workload(settings, here)
        rows.extend(rows_of(bench(work, settings.timed, Options(settings.steps)), work.data.items_per_batch))
        text = (
            f"GPT, hidden {settings.hidden}, {settings.layers} layers per rank, {work.num_microbatches} "
            f"microbatches of {settings.rows} x {settings.sequence} tokens; medians of {settings.steps} steps"
        )
        return OK, text, {}

    yield "timed steps", time_all
    for row in rows:
        name = f"{row['schedule']} ({row['stages_per_rank']} stages per rank), {row['runtime']}"
        yield name, lambda row=row: figures(row)  # type: ignore[misc]


def workload(settings: Settings, here: World) -> Workload:
    """The model in bfloat16 on GPUs, float32 on CPUs; random tokens."""
    num_microbatches = max(4, settings.microbatches * here.size)
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    source = _RandomTokens(num_microbatches * settings.rows, settings.sequence)
    return Workload(
        model=Gpt(
            vocab_size=_VOCAB,
            num_layers=settings.layers * here.size,
            hidden_size=settings.hidden,
            num_heads=max(1, settings.hidden // _HEAD_SIZE),
            sequence_length=settings.sequence,
        ),
        data=Data(
            train=source,
            evaluation=source,
            num_evaluation_batches=0,
            items_per_batch=source.rows * source.length,
            fingerprint="random tokens",
        ),
        here=here,
        num_microbatches=num_microbatches,
        prepare=lambda stage: stage.to(here.device, dtype),
        timeout=settings.timeout,
    )


class _RandomTokens:
    """Batches of random tokens by number."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(_VOCAB, (self.rows, self.length + 1), generator=generator)
        return drawn[:, :-1], drawn[:, 1:]


def figures(row: dict[str, Any]) -> Found:
    """A row of the benchmark as a row of the table."""
    if row["failure"]:
        return FAILED, str(row["failure"]), row
    simulated = row["predicted_makespan_ms"]
    beside = "no simulation of this order" if simulated is None else f"simulated {simulated:.1f} ms"
    text = (
        f"step {row['makespan_ms']:.1f} ms, {beside}, bubble {100 * row['measured_bubble_rate']:.0f} %, "
        f"{row['tokens_per_second']:.0f} tokens/s, peak {max(row['peak_memory_bytes']) / 2**30:.2f} GiB"
    )
    return OK, text, row
