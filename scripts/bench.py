"""Compare schedules on one model in one job: predicted beside measured.

    python scripts/bench.py                                   # 4 emulated ranks: any laptop
    python scripts/bench.py model=gpt_tiny data=stdlib num_ranks=2 schedules=[1f1b,zb_h1]

Starts its own ranks (no torchrun). Choices are files in configs/; `--help` lists them.
"""

import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from zbpp import config as configs

configs.register()


@hydra.main(config_path=str(configs.config_folder()), config_name="bench", version_base="1.3")
def main(config: DictConfig) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zbpp.schedule import PlanError, plan

    try:
        typed = configs.typed(config)
        for name in typed.schedules:  # a bad plan shows here, before any rank starts
            plan(name, typed.num_ranks, typed.num_microbatches)
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=typed.num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            run_id="zbpp_bench",
        )
        rows, title = elastic_launch(launch, run)(typed)[0]
    except (configs.ConfigError, PlanError) as error:
        sys.exit(f"error: {error}")
    show(rows, title)
    print(f"written to {typed.run_dir}: bench.json, bench.png, trace.json")


def run(config: configs.BenchConfig) -> tuple[list[dict[str, Any]], str]:
    """What each rank does; importable, since elastic_launch pickles it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from zbpp import app

    torch.set_num_threads(1)
    return app.bench(config)


def show(rows: list[dict[str, Any]], title: str) -> None:
    print(f"\n{title}")
    print(f"{'':<16}{'makespan (ms)':^33}{'bubble rate':^22}")
    print(f"{'schedule':<16}{'predicted':>10} | {'measured':<10}{'ratio':<8}{'predicted':>9} | measured")
    for row in rows:
        makespans = f"{row['predicted_makespan_ms']:>10.1f} | {row['measured_makespan_ms']:<10.1f}"
        rates = f"{row['predicted_bubble_rate']:>9.3f} | {row['measured_bubble_rate']:.3f}"
        print(f"{row['schedule']:<16}{makespans}{row['ratio']:<8.3f}{rates}")


if __name__ == "__main__":
    main()
