"""What `zbpp bench` and `zbpp measure` call on every rank: from a config to files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from zbpp.benchmark import bench as benches
from zbpp.benchmark import measurement, report
from zbpp.benchmark.length_costs import fit_lengths
from zbpp.benchmark.workload import Workload
from zbpp.config import BenchConfig, ConfigError, FinetuneConfig, JobConfig, MeasureConfig, naming
from zbpp.job.world import world
from zbpp.planning import plan, written_links
from zbpp.run.data import build_data
from zbpp.run.model import build_model, check_data_fit, layers_per_stage
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.schedule import Costs, Timetable
from zbpp.schedule.costs import TIMES
from zbpp.training.measured_steps import machine
from zbpp.training.optim.precision import PRECISIONS, Precision, give_dtypes
from zbpp.training.run_folder import RunFolder, claimed

Summary = dict[str, Any]


def bench(config: BenchConfig) -> tuple[list[Summary], Summary]:
    """Time one model under several schedules and runtimes in one job.

    Returns (a row per schedule and runtime, facts about the model and the machine); rank 0 writes both and
    the pictures to run_dir. Raises ConfigError or PlanError.
    """
    options = benches.Options(config.repeats, config.compare, config.memory_limit, config.time_limit)
    with _job(config) as (workload, folder), naming("model"):
        _check_fit(workload, plan("zb_h1", config.num_ranks, config.num_microbatches))
        timed = benches.bench(workload, config.schedules, options)
        rows = report.rows_of(timed, workload.data.filled_items, workload.data.unit)
        about = {**_about(config, workload), "repeats": config.repeats}
        if folder is not None:
            folder.begin()
            report.write(folder.path, about, timed, rows)
        return rows, about


def measure(config: MeasureConfig) -> Summary:
    """Measure the costs of a model's stages and messages here, in the form that `zbpp plan --costs` reads.

    Rank 0 writes them to run_dir as costs.json. Raises ConfigError or PlanError.
    """
    sizes = config.num_ranks, config.num_microbatches
    timetable = plan(config.schedule.name, *sizes, **config.schedule.options)
    with _job(config, config.finetune) as (workload, folder), naming("model"):
        _check_fit(workload, timetable)
        if config.lengths and workload.data.unit != "tokens":
            raise ConfigError(
                f"lengths={config.lengths} cuts rows of tokens, and these data are no tokens: choose "
                "data=stdlib, text, tokens or chat, or leave lengths out"
            )
        costs = measurement.measure(workload, timetable, config.repeats).costs
        cut = layers_per_stage(workload.model, timetable.num_stages)
        about = {
            **_about(config, workload),
            **({} if cut is None else {"layers_per_stage": cut}),
            "steps": config.repeats,
        }
        summary: Summary = {**costs.numbers, "memory_unit": costs.memory_unit, "about": about}
        if config.lengths:
            summary |= _in_two_parts(workload, timetable, config, costs, about)
        if costs.links is not None:
            summary["links"] = written_links(costs.links)
        if folder is not None:
            folder.begin()
            (folder.path / "costs.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def _in_two_parts(
    workload: Workload, timetable: Timetable, config: MeasureConfig, whole: Costs, about: Summary
) -> Summary:
    """What replaces the costs of whole rows where other lengths are measured, too. Collective."""
    costs, error = fit_lengths(workload, timetable, config.lengths, config.repeats, whole)
    squared = {name: getattr(costs.quadratic, name) for name in TIMES}
    return {
        **costs.numbers,
        "quadratic": squared,
        "shape": costs.shape,
        "about": {**about, "lengths": [*config.lengths, 1.0], "fit_error": error},
    }


@contextmanager
def _job(
    config: JobConfig, finetune: FinetuneConfig | None = None
) -> Iterator[tuple[Workload, RunFolder | None]]:
    """The workload, and on rank 0 the folder for the results."""
    model = build_model(config.model, config.seed, finetune)
    data = build_data(config.data, config.num_microbatches * config.microbatch_size, config.seed)
    rank_0 = os.environ["RANK"] == "0"
    with (
        claimed(config.run_dir, overwrite=config.overwrite) if rank_0 else nullcontext() as folder,
        world(device=config.device, timeout=config.timeout) as here,
    ):
        workload = Workload(
            model=model,
            data=data,
            here=here,
            num_microbatches=config.num_microbatches,
            prepare=partial(_prepared, device=here.device, precision=PRECISIONS[config.precision]),
            seed=config.seed,
            timeout=config.timeout,
        )
        yield workload, folder


def _prepared(stage: nn.Module, *, device: torch.device, precision: Precision) -> nn.Module:
    give_dtypes(stage, precision)
    return stage.to(device)


def _check_fit(workload: Workload, timetable: Timetable) -> None:
    """Refuse data that the first stage can't take. timetable: one whose stages are built anyway."""
    args, _ = workload.batch(timetable, 0)
    first = [into_microbatches("the input", each, workload.num_microbatches)[0] for each in args]
    check_data_fit(workload.stages(timetable), first)


def _about(config: JobConfig, workload: Workload) -> Summary:
    return {
        "num_ranks": config.num_ranks,
        "num_microbatches": config.num_microbatches,
        "microbatch_size": config.microbatch_size,
        "model": config.model["_target_"].rpartition(".")[2],
        "emulated": workload.is_emulated,
        "load_average": os.getloadavg()[0],
        **machine(workload.here.device),
    }
