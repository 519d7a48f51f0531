"""The composition root: puts models, data, schedules and runtime together.

The only file that knows everyone, and no algorithm: nothing here asks what a schedule is called.
"""

from __future__ import annotations

import json
import os
import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbpp.autograd import Explanation, explain, recompute
from zbpp.config import BenchConfig, ConfigError, TrainConfig, build, naming
from zbpp.runtime import Pipeline, measured_costs
from zbpp.runtime.world import World, broadcast, check_agreement, gather, world
from zbpp.schedule import (
    Timeline,
    Timetable,
    chrome_trace,
    plan,
    render_picture,
    simulate,
)
from zbpp.training.data import Data
from zbpp.training.loggers import JsonLines, Logger, Loggers, Wandb, finite
from zbpp.training.metrics import peak_flops, utilisation
from zbpp.training.optimizer import adamw, warmup_cosine
from zbpp.training.progress import progress
from zbpp.training.trainer import Trainer

Summary = dict[str, Any]


def train(config: TrainConfig, settings: dict[str, Any], resolved_yaml: str) -> Summary:
    """Train as `config` says; called by every rank of a job. Returns the summary.

    settings: the flat config, compared between the ranks. Raises ConfigError, PlanError or
    AgreementError before any work starts.
    """
    # Whatever can be wrong with the arguments shows before this process joins the others.
    rank, num_ranks = int(os.environ.get("RANK", "0")), _num_ranks(config)
    timetable = plan(num_ranks=num_ranks, num_microbatches=config.num_microbatches, **vars(config.schedule))
    model = _model(config.model)
    stages = _stages(model, timetable, rank)
    data = _data(config.data, config.batch_size, config.seed)
    with world(device=config.parallel.device, timeout=config.parallel.timeout) as here:
        check_agreement("configs", {key: value for key, value in settings.items() if key != "run_dir"})
        check_agreement("data (by fingerprint)", data.fingerprint)
        folder = Path(broadcast(config.run_dir))
        # A search may end differently on another rank: rank 0's plan is the plan.
        timetable = Timetable.parse(broadcast(str(timetable)))
        for stage in stages.values():
            stage.to(here.device, getattr(torch, config.dtype))
            _recompute(stage, config.memory.recompute)
        trainer = _trainer(config, timetable, stages, model, data)
        if here.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(resolved_yaml)
        with Loggers(_loggers(config, settings, folder) if here.rank == 0 else []) as loggers:
            history = _run(config, trainer, loggers, shown=here.rank == 0)
            summary, measured, predicted = _summarise(config, trainer, here, history)
            if here.rank == 0:
                loggers.summary = summary
                _write(folder, summary, measured, predicted)
        return summary


def _num_ranks(config: TrainConfig) -> int:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = config.parallel.num_ranks
    if wanted is not None and wanted != started:
        raise ConfigError(
            f"parallel.num_ranks={wanted}, but {started} process(es) were started: write "
            f"torchrun --nproc-per-node {wanted} scripts/train.py ..., or parallel.num_ranks=null"
        )
    return started


def _model(node: dict[str, Any]) -> Any:
    model = build("model", node)
    if not (hasattr(model, "build_stage") and hasattr(model, "loss")):
        raise ConfigError(
            f"model: {type(model).__name__} has no build_stage(index, num_stages) and loss(output, target); "
            "see zbpp/stage_api.py"
        )
    return model


def _stages(model: Any, timetable: Timetable, rank: int) -> dict[int, nn.Module]:
    with naming("model"):
        return {index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)}


def _recompute(stage: nn.Module, what: str) -> None:
    """Checkpoint the stage, or each of its direct children: its blocks."""
    modules = {"none": [], "block": list(stage.children()), "stage": [stage]}[what]
    for module in modules:
        recompute(module)


def _data(node: dict[str, Any], batch_size: int, seed: int) -> Data:
    data = build("data", node, batch_size=batch_size, seed=seed)
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise ConfigError(f"data: {node['_target_']} gave a {kind}, not a zbpp.training.data.Data")
    return data


def _trainer(
    config: TrainConfig, timetable: Timetable, stages: dict[int, nn.Module], model: Any, data: Data
) -> Trainer:
    options = config.optimizer
    num_batches = min(config.evaluation_batches, data.num_evaluation_batches)
    if config.evaluate_every and not num_batches:
        raise ConfigError(
            "no data is held out, but evaluate_every > 0: write evaluate_every=0 or data.held_out=0.05"
        )
    return Trainer(
        pipeline=Pipeline(stages, timetable, model.loss, seed=config.seed, timeout=config.parallel.timeout),
        optimizer=adamw(
            stages,
            learning_rate=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        ),
        data=data._replace(num_evaluation_batches=num_batches),
        learning_rate=partial(
            warmup_cosine,
            num_steps=config.steps,
            warmup_steps=options.warmup_steps,
            min_ratio=options.min_ratio,
        ),
        clip_norm=options.clip_norm,
        evaluate_every=config.evaluate_every,
    )


def _loggers(config: TrainConfig, settings: dict[str, Any], folder: Path) -> list[Logger]:
    loggers: list[Logger] = [JsonLines(folder / "metrics.jsonl")]
    if config.logger.name == "wandb":
        loggers.append(Wandb(folder, project=config.logger.project, mode=config.logger.mode, config=settings))
    return loggers


def _run(config: TrainConfig, trainer: Trainer, loggers: Loggers, *, shown: bool) -> list[dict[str, Any]]:
    history = []
    with progress(
        config.steps, shown=shown, print_every=config.print_every, title=config.schedule.name
    ) as show:
        for metrics in trainer.run(config.steps):
            loggers.log(metrics)
            show(metrics)
            history.append(metrics)
    return history


def _summarise(
    config: TrainConfig, trainer: Trainer, here: World, history: list[dict[str, Any]]
) -> tuple[Summary, Timeline, Timeline]:
    measured = _typical(trainer.timelines)
    predicted = simulate(trainer.pipeline.timetable, measured_costs(measured))
    speed = trainer.data.tokens_per_batch / _median([metrics["step_seconds"] for metrics in history])
    num_parameters = sum(
        gather(sum(p.numel() for s in trainer.pipeline.stages.values() for p in s.parameters()))
    )
    peak = peak_flops(here.device, getattr(torch, config.dtype))
    losses: Summary = {key: history[-1][key] for key in ("loss", "evaluation_loss") if key in history[-1]}
    summary: Summary = {
        "schedule": config.schedule.name,
        "num_ranks": here.size,
        "num_stages": trainer.pipeline.timetable.num_stages,
        "num_microbatches": config.num_microbatches,
        "num_parameters": num_parameters,
        "steps": config.steps,
        **losses,
        "unigram_entropy": trainer.data.unigram_entropy,
        **_bubbles(predicted, measured),
        "tokens_per_second": speed,
        "model_flops_utilisation": utilisation(num_parameters, speed, here.size, peak),
        "peak_memory_bytes": [int(peak) for peak in measured.peak_memory],
        **_machine(here.device),
    }
    return summary, measured, predicted


def _bubbles(predicted: Timeline, measured: Timeline) -> Summary:
    return {
        "predicted_bubble_rate": predicted.bubble_rate,
        "measured_bubble_rate": measured.bubble_rate,
        "predicted_makespan_ms": predicted.makespan,
        "measured_makespan_ms": measured.makespan,
    }


def _machine(device: torch.device) -> Summary:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def explain_stage(
    model: dict[str, Any],
    data: dict[str, Any],
    *,
    stage: int,
    num_stages: int,
    microbatch_size: int,
    seed: int = 0,
    dtype: str = "float32",
) -> Explanation:
    """Run one microbatch of F through one stage and explain what its B will do; no process group.

    model, data: config nodes with a `_target_`. The stages before it run first, without a graph, for
    an input of the right shape; the last stage's F ends with the loss. Raises ConfigError.
    """
    built = _model(model)
    source = _data(data, microbatch_size, seed)

    def stage_of(index: int) -> nn.Module:
        made: nn.Module = built.build_stage(index, num_stages)
        return made.to(getattr(torch, dtype))

    with naming("model"):
        module = stage_of(stage)  # first: a stage that does not exist is refused before any runs
        x, target = source.train.batch(0)
        x = x.to(getattr(torch, dtype)) if x.is_floating_point() else x
        with torch.no_grad():
            for index in range(stage):
                x = stage_of(index)(x)
        if stage:
            x.requires_grad_()
        output = module(x)
        return explain(
            built.loss(output, target) if stage == num_stages - 1 else output, [x], module.named_parameters()
        )


def _typical(timelines: list[Timeline]) -> Timeline:
    """The one with the median makespan."""
    return sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _write(folder: Path, summary: Summary, measured: Timeline, predicted: Timeline) -> None:
    (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
    panels = {"predicted from measured costs": predicted, "measured": measured}
    render_picture(panels, folder / "timeline.png")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(panels)))


def bench(config: BenchConfig) -> tuple[list[Summary], str]:
    """The same model under several schedules in one job; called by every rank.

    Returns (a row per schedule, predicted beside measured; what was measured, in words); rank 0
    writes both and the pictures to run_dir.
    """
    timetables = {name: plan(name, config.num_ranks, config.num_microbatches) for name in config.schedules}
    model = _model(config.model)
    data = _data(config.data, config.num_microbatches * config.microbatch_size, config.seed)
    with world(device=config.device, timeout=config.timeout) as here:
        trainers = {
            name: _bench_trainer(model, timetable, here, data, config.seed, config.timeout)
            for name, timetable in timetables.items()
        }
        timelines = _interleaved(trainers, config.repeats)
        rows = [_row(name, timeline) for name, timeline in timelines.items()]
        title = _bench_title(config, model, here)
        if here.rank == 0:
            _write_bench(Path(config.run_dir), title, rows, timelines)
        return rows, title


def _bench_trainer(
    model: Any, timetable: Timetable, here: World, data: Data, seed: int, timeout: float
) -> Trainer:
    stages = {index: stage.to(here.device) for index, stage in _stages(model, timetable, here.rank).items()}
    return Trainer(
        pipeline=Pipeline(stages, timetable, model.loss, seed=seed, timeout=timeout),
        optimizer=torch.optim.SGD([p for s in stages.values() for p in s.parameters()], lr=0.0),
        data=data,
        learning_rate=lambda step: 1.0,
        num_recorded=1,
    )


def _interleaved(trainers: dict[str, Trainer], repeats: int) -> dict[str, Timeline]:
    """Each schedule's typical timeline; one step of each in turn, so that a slow moment hits all."""
    for _ in range(repeats + 1):
        for trainer in trainers.values():
            next(trainer.run(1))
    # The first step agrees on shapes and warms up.
    return {name: _typical(trainer.timelines[1:]) for name, trainer in trainers.items()}


def _row(name: str, measured: Timeline) -> Summary:
    predicted = simulate(measured.timetable, measured_costs(measured))
    return {
        "schedule": name,
        "num_stages": measured.timetable.num_stages,
        **_bubbles(predicted, measured),
        "ratio": measured.makespan / predicted.makespan,
    }


def _bench_title(config: BenchConfig, model: Any, here: World) -> str:
    kind = (
        "EMULATED: stages sleep instead of computing" if getattr(model, "emulated", False) else "real compute"
    )
    machine = _machine(here.device)
    return (
        f"{config.num_ranks} ranks, {config.num_microbatches} microbatches, {type(model).__name__} ({kind}); "
        f"{machine['device']}, torch {machine['torch']}; median of {config.repeats} interleaved steps"
    )


def _write_bench(folder: Path, title: str, rows: list[Summary], timelines: dict[str, Timeline]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps({"what": title, "rows": rows}, indent=2) + "\n")
    render_picture({f"{name}, measured": line for name, line in timelines.items()}, folder / "bench.png")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(timelines)))
