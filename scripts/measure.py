"""Measure what the stages of a model and the messages between them cost on this machine.

    python scripts/measure.py model=gpt_tiny data=stdlib num_ranks=2 run_dir=runs/costs
    python scripts/plan.py zb_auto --ranks 2 --microbatches 8 --costs runs/costs/costs.json

Writes costs.json: f, b, w, bw, comm in ms, saved and deferred in bytes, one number per stage; and under
"about" where they were measured and how fast each link is. Starts its own ranks (no torchrun). The
schedule chooses the cut.
"""

from typing import Any

from omegaconf import DictConfig

from zbpp import command_line
from zbpp import config as configs


def main(config: DictConfig) -> None:
    from zbpp.launch import on_ranks
    from zbpp.planning import plan
    from zbpp.training.run_folder import check_free

    typed = configs.typed(config)  # what is wrong shows here, before any rank starts
    check_free(typed.run_dir, overwrite=typed.overwrite)
    schedule = typed.schedule
    plan(schedule.name, typed.num_ranks, typed.num_microbatches, **schedule.options, time_limit=0)
    show(on_ranks(typed.num_ranks, run, typed))
    print(f"written to {typed.run_dir}/costs.json")


def run(config: configs.MeasureConfig) -> dict[str, Any]:
    """What each rank does; importable, since it is pickled."""
    from zbpp.benchmark import jobs

    return jobs.measure(config)


def show(found: dict[str, Any]) -> None:
    columns = [name for name, numbers in found.items() if isinstance(numbers, list)]
    print("\nstage" + "".join(f"{name:>12}" for name in columns) + "   (ms; saved, deferred: bytes)")
    for stage, numbers in enumerate(zip(*(found[name] for name in columns), strict=True)):
        print(f"{stage:>5}" + "".join(f"{number:>12.4g}" for number in numbers))
    for link in found["about"]["links"]:
        print("ranks {} and {}: {:.3f} ms, {:.2f} GB/s".format(*link["ranks"], *list(link.values())[1:]))


if __name__ == "__main__":
    command_line.run(main, "measure", __doc__)
