"""Time schedules and runtimes on one model in one job: predicted beside measured, zbpp beside torch.

    zbpp bench                                    # 4 emulated ranks: any laptop
    zbpp bench -n 2 model=gpt_tiny data=stdlib schedules=[1f1b,zb_h1]
    zbpp bench compare=none                       # without torch's runtime

Starts its own ranks, without torchrun. -n N is short for num_ranks=N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbpp.commands import command_line
from zbpp.config import BenchConfig, Composed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp bench`; arguments None: those of this process."""
    command_line.run(_bench, "bench", __doc__, arguments)


def _bench(composed: Composed) -> None:
    from zbpp.benchmark.report import describe, speed_comparisons, table
    from zbpp.launch import on_ranks
    from zbpp.planning import plan
    from zbpp.training.run_folder import check_free

    config: BenchConfig = composed.tree
    # Before any rank starts: a folder and schedules that can't be used.
    check_free(config.run_dir, overwrite=config.overwrite)
    for name in config.schedules:
        plan(name, config.num_ranks, config.num_microbatches, time_limit=0)
    rows, about = on_ranks(config.num_ranks, bench_on_rank, config)
    print("", describe(about), table(rows), "", *speed_comparisons(rows), sep="\n")
    print(f"written to {config.run_dir}: bench.json, bench.png, trace.json")


def bench_on_rank(config: BenchConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each rank does; importable, since it is pickled."""
    from zbpp.benchmark import jobs

    return jobs.bench(config)
