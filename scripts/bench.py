"""Compare schedules and runtimes on one model in one job: predicted beside measured, zbpp beside torch.

    python scripts/bench.py                                   # 4 emulated ranks: any laptop
    python scripts/bench.py model=gpt_tiny data=stdlib num_ranks=2 schedules=[1f1b,zb_h1]
    python scripts/bench.py compare=none                      # without torch's runtime

Starts its own ranks (no torchrun). Choices are files in configs/; `--help` lists them.
"""

import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from zbpp import config as configs

configs.register()


@hydra.main(config_path=str(configs.config_folder()), config_name="bench", version_base="1.3")
def main(config: DictConfig) -> None:
    from zbpp.benchmark.launch import Refusal, on_ranks
    from zbpp.benchmark.report import in_words, table, verdicts
    from zbpp.runtime import DeviceError
    from zbpp.schedule import PlanError, plan

    try:
        typed = configs.typed(config)
        for name in typed.schedules:  # a bad plan shows here, before any rank starts
            plan(name, typed.num_ranks, typed.num_microbatches, time_limit=0)
        rows, about = on_ranks(typed.num_ranks, run, typed, (configs.ConfigError, DeviceError, PlanError))
    except (configs.ConfigError, PlanError, Refusal) as error:
        sys.exit(f"error: {error}")
    print("", in_words(about), table(rows), "", *verdicts(rows), sep="\n")
    print(f"written to {typed.run_dir}: bench.json, bench.png, trace.json")


def run(config: configs.BenchConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each rank does; importable, since it is pickled."""
    from zbpp.benchmark import door

    return door.bench(config)


if __name__ == "__main__":
    main()
