"""The answer of a search as text, and as JSON."""

from __future__ import annotations

import json
from typing import Any

from zbpp.cluster.search import Answer
from zbpp.cluster.step import Step

_COLUMNS = (
    "pipeline x replicate x shard x tensor",
    "schedule",
    "microbatches",
    "GiB",
    "ms",
    "tokens/s",
    "MFU",
    "limited by",
)


def as_text(answer: Answer) -> str:
    """A head, a table of the best steps, and a note on what the figures leave out."""
    question, hardware = answer.question, answer.question.hardware
    sizes, gpu = question.sizes, hardware.gpu
    nodes = "1 node" if hardware.nodes == 1 else f"{hardware.nodes:,} nodes"
    head = (
        f"{sizes.parameters / 1e9:,.2f} B parameters, {question.batch:,} sequences of {sizes.sequence:,} "
        f"tokens a step, {question.precision}\n"
        f"{hardware.num_gpus:,} GPUs: {nodes} of {hardware.gpus_per_node}, {gpu.memory:g} GiB"
        f", {gpu.peak_tflops:g} TFLOP/s of which kernels reach {gpu.achieved:.0%}"
    )
    counts = f"{answer.tried:,} ways, {answer.simulated:,} simulated"
    if answer.unknown:
        counts += (
            f"; {answer.unknown:,} more were too many to simulate: none is faster than {answer.bound:,.0f} "
            "ms (--degrees or names of schedules narrow the search)"
        )
    if not answer.steps:
        return f"{head}\n\n{answer.why}\n{counts}"
    return "\n".join([head, "", *_table([_cells(each) for each in answer.steps]), "", counts, _NOTE])


_NOTE = (
    "Not counted: hosts that are slower than their GPUs, congestion, stragglers, failures, reading data. "
    "Reductions overlap with the pipeline's end only; all-reduces inside layers overlap with nothing."
)


def as_json(answer: Answer) -> str:
    """The same figures as JSON."""
    question = answer.question
    return json.dumps(
        {
            "gpus": question.hardware.num_gpus,
            "parameters": question.sizes.parameters,
            "batch": question.batch,
            "tried": answer.tried,
            "simulated": answer.simulated,
            "not_simulated": answer.unknown,
            "bound_of_those_ms": answer.bound,
            "why": answer.why,
            "steps": [_values(each) for each in answer.steps],
        },
        indent=1,
    )


def _values(step: Step) -> dict[str, Any]:
    return {
        **step.mesh._asdict(),
        "schedule": step.schedule,
        "num_microbatches": step.num_microbatches,
        "microbatch_size": step.run.sequences,
        "recompute": step.run.recompute,
        "memory_gib": step.memory / 2**30,
        "step_ms": step.time,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "losses_ms": step.losses,
        "limit": step.limit,
    }


def _cells(step: Step) -> tuple[str, ...]:
    again = " recompute" if step.run.recompute else ""
    return (
        str(step.mesh),
        step.schedule + again,
        f"{step.num_microbatches} of {step.run.sequences}",
        f"{step.memory / 2**30:.1f}",
        f"{step.time:,.0f}",
        f"{step.tokens_per_second:,.0f}",
        f"{step.mfu:.1%}",
        step.limit,
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in [_COLUMNS, *rows]) for at in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in [_COLUMNS, *rows]
    ]
    return [line.rstrip() for line in lines]
