"""Measure what the stages of a model and the messages between them cost on this machine.

    zbpp measure -n 2 model=gpt_tiny data=stdlib run_dir=runs/costs
    zbpp plan zb_auto --ranks 2 --microbatches 8 --costs runs/costs/costs.json

Writes costs.json, with a number per stage: f, b, w, bw, comm, host in ms; saved, deferred, static in bytes.
"links" is there where messages between ranks take 1 % of the shortest action or more: latency in ms and
bandwidth in GB/s of each direction, x and g the bytes of a microbatch's activations and gradients. comm is 0
then, since the links say it.
Under "about" it writes where they were measured. host is the time to copy what F saves to host memory, or
back, while nothing else runs; memory.offload and `zbpp memory` need it.
With lengths=[0.25,0.5] rows are measured at a quarter and a half of their tokens, too. f, b, w and bw are
then the part that grows with the length, and "quadratic" the part that grows with its square: attention.
"shape" is the microbatch of length 1, rows and tokens of a row.
static is held all the time: weights, buffers, gradients, and two states per weight, as AdamW has them.
finetune.* keys are those of zbpp train: with adapters, or frozen weights, W is short.
Starts its own ranks, without torchrun. -n N is short for num_ranks=N. The schedule decides how many stages
the model is cut into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbpp.commands import command_line
from zbpp.config import Composed, MeasureConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp measure`; arguments None: those of this process."""
    command_line.run(_measure, "measure", __doc__, arguments)


def _measure(composed: Composed) -> None:
    from zbpp.launch import on_ranks
    from zbpp.planning import plan
    from zbpp.run.model import build_model
    from zbpp.run.plan import check_layers
    from zbpp.training.run_folder import check_free

    config: MeasureConfig = composed.tree
    schedule = config.schedule
    # Before any rank starts: a folder, a cut and a schedule that can't be used.
    check_free(config.run_dir, overwrite=config.overwrite)
    check_layers(build_model(config.model, config.seed, config.finetune), schedule, config.num_ranks)
    plan(schedule.name, config.num_ranks, config.num_microbatches, **schedule.options, time_limit=0)
    print(_table(on_ranks(config.num_ranks, measure_on_rank, config)))
    print(f"written to {config.run_dir}/costs.json")


def measure_on_rank(config: MeasureConfig) -> dict[str, Any]:
    """What each rank does; importable, since it is pickled."""
    from zbpp.benchmark import jobs

    return jobs.measure(config)


def _table(costs: dict[str, Any]) -> str:
    """A row per stage; times that grow with the square of the length have a table of their own."""
    columns = {name: numbers for name, numbers in costs.items() if isinstance(numbers, list)}
    lines = _rows(columns, "(ms; saved, deferred, static: bytes)")
    if "quadratic" in costs:
        rows, tokens = costs["shape"]
        lines += _rows(costs["quadratic"], "(ms, times the square of the length)")
        error = costs["about"]["fit_error"]
        lines += [
            "",
            f"length 1: {rows} x {tokens} tokens; f, b, w and bw of the upper table count times the length",
            f"no measured time is further from the two parts than {error:.1%} of that at length 1",
        ]
    for pair, link in costs.get("links", {}).get("pairs", {}).items():
        lines.append(f"link {pair}: latency {link['latency']:.3g} ms, {link['bandwidth']:.3g} GB/s")
    return "\n".join(lines)


def _rows(columns: dict[str, list[float]], note: str) -> list[str]:
    lines = ["", "stage" + "".join(f"{name:>12}" for name in columns) + f"   {note}"]
    for stage, numbers in enumerate(zip(*columns.values(), strict=True)):
        lines.append(f"{stage:>5}" + "".join(f"{number:>12.4g}" for number in numbers))
    return lines
