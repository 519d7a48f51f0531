"""Compare schedules and runtimes on one model in one job: predicted beside measured, zbpp beside torch.

    python scripts/bench.py                                   # 4 emulated ranks: any laptop
    python scripts/bench.py model=gpt_tiny data=stdlib num_ranks=2 schedules=[1f1b,zb_h1]
    python scripts/bench.py compare=none                      # without torch's runtime

Starts its own ranks (no torchrun).
"""

from typing import Any

from omegaconf import DictConfig

from zbpp import command_line
from zbpp import config as configs


def main(config: DictConfig) -> None:
    from zbpp.benchmark.report import in_words, table, verdicts
    from zbpp.launch import on_ranks
    from zbpp.planning import plan
    from zbpp.training.run_folder import check_free

    typed = configs.typed(config)  # what is wrong shows here, before any rank starts
    check_free(typed.run_dir, overwrite=typed.overwrite)
    for name in typed.schedules:
        plan(name, typed.num_ranks, typed.num_microbatches, time_limit=0)
    rows, about = on_ranks(typed.num_ranks, run, typed)
    print("", in_words(about), table(rows), "", *verdicts(rows), sep="\n")
    print(f"written to {typed.run_dir}: bench.json, bench.png, trace.json")


def run(config: configs.BenchConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each rank does; importable, since it is pickled."""
    from zbpp.benchmark import jobs

    return jobs.bench(config)


if __name__ == "__main__":
    command_line.run(main, "bench", __doc__)
