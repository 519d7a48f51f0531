"""The composition root: puts models, data, schedules and runtime together.

The only file that knows everyone, and no algorithm: nothing here asks what a schedule is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbpp.autograd import Explanation, explain, recompute
from zbpp.build import build_data, build_model, cut_of, machine
from zbpp.config import ConfigError, TrainConfig, naming
from zbpp.runtime import Pipeline, measured_costs
from zbpp.runtime.world import World, broadcast, check_agreement, gather, world
from zbpp.schedule import (
    Costs,
    Timeline,
    Timetable,
    chrome_trace,
    placement_of,
    plan,
    render_picture,
    simulate,
)
from zbpp.training.data import Data
from zbpp.training.loggers import JsonLines, Logger, Loggers, Wandb, finite
from zbpp.training.metrics import peak_flops, utilisation
from zbpp.training.optimizer import adamw, warmup_cosine
from zbpp.training.progress import progress
from zbpp.training.replan import Replan
from zbpp.training.trainer import Trainer

Summary = dict[str, Any]


def train(config: TrainConfig, settings: dict[str, Any], resolved_yaml: str) -> Summary:
    """Train as `config` says; called by every rank of a job. Returns the summary.

    settings: the flat config, compared between the ranks. Raises ConfigError, PlanError or
    AgreementError before any work starts.
    """
    # Whatever can be wrong with the arguments shows before this process joins the others.
    rank, num_ranks = int(os.environ.get("RANK", "0")), _num_ranks(config)
    timetable = plan(config.schedule.name, num_ranks, config.num_microbatches, **config.schedule.options)
    model = build_model(config.model)
    stages, cut = _stages(model, timetable, rank), cut_of(model, timetable.num_stages)
    data = build_data(config.data, config.batch_size, config.seed)
    with world(device=config.parallel.device, timeout=config.parallel.timeout) as here:
        check_agreement("configs", {key: value for key, value in settings.items() if key != "run_dir"})
        check_agreement("data (by fingerprint)", data.fingerprint)
        folder = Path(broadcast(config.run_dir))
        # A search may end differently on another rank: rank 0's plan is the plan.
        timetable = Timetable.parse(broadcast(str(timetable)))
        for stage in stages.values():
            stage.to(here.device, getattr(torch, config.dtype))
            _recompute(stage, config.memory.recompute)
        _compile(stages, config.compile, config.memory.budget)
        trainer = _trainer(config, timetable, stages, model, data)
        if here.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(resolved_yaml)
            if "layers_per_stage" in cut:
                print("layers per stage:", *cut["layers_per_stage"], flush=True)
        with Loggers(_loggers(config, settings, folder) if here.rank == 0 else []) as loggers:
            history = _run(config, trainer, loggers, shown=here.rank == 0)
            summary, measured, predicted = _summarise(config, trainer, here, history)
            summary |= cut
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


def _stages(model: Any, timetable: Timetable, rank: int) -> dict[int, nn.Module]:
    with naming("model"):
        return {index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)}


def _recompute(stage: nn.Module, what: str) -> None:
    """Checkpoint the stage, or each of its blocks."""
    modules = {"none": [], "block": list(_blocks(stage)), "stage": [stage]}[what]
    for module in modules:
        recompute(module)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children; of one that only holds modules, and is never called itself, its children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _blocks(child)
        else:
            yield child


def _compile(stages: dict[int, nn.Module], what: str, budget: float) -> None:
    """Have the stages, or each of their layers, compiled in their first F; those alike share it."""
    if what == "none":
        return
    from zbpp.autograd.compiled import Programs, compile_stage

    programs: Programs = {}
    for index, stage in stages.items():
        try:
            compile_stage(
                stage,
                whole=what == "stage",
                budget=budget,
                name=f"stage {index}",
                programs=programs,
                say=partial(print, flush=True),
            )
        except RuntimeError as error:
            raise ConfigError(f"compile={what}: {error}") from error


def _trainer(
    config: TrainConfig, timetable: Timetable, stages: dict[int, nn.Module], model: Any, data: Data
) -> Trainer:
    options = config.optimizer
    num_batches = min(config.evaluation_batches, data.num_evaluation_batches)
    if config.evaluate_every and not num_batches:
        raise ConfigError(
            "no data is held out, but evaluate_every > 0: write evaluate_every=0 or data.held_out=0.05"
        )

    def build(timetable: Timetable) -> Pipeline:
        return Pipeline(
            stages,
            timetable,
            model.loss,
            seed=config.seed,
            timeout=config.parallel.timeout,
            dynamic_shapes=config.parallel.dynamic_shapes,
        )

    return Trainer(
        pipeline=build(timetable),
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
        replan=_replan(config, timetable, stages, model, build),
    )


def _replan(
    config: TrainConfig,
    timetable: Timetable,
    stages: dict[int, nn.Module],
    model: Any,
    build: Callable[[Timetable], Pipeline],
) -> Replan | None:
    """What plans again for the same cut, if the config asks for it."""
    name = config.schedule.replan
    if name is None:
        return None

    def again(costs: Costs, limits: Sequence[float]) -> Timetable:
        return plan(
            name,
            timetable.num_ranks,
            config.num_microbatches,
            costs=costs,
            memory_limit=limits,
            placement=placement_of(timetable),
            stages_per_rank=timetable.num_stages // timetable.num_ranks,
        )

    limit = None if config.memory.limit is None else config.memory.limit * 2**30
    return Replan(plan=again, build=build, loss_fn=model.loss, stages=stages, memory_limit=limit)


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
    predicted = simulate(measured.timetable, measured_costs(*trainer.timelines))
    speed = trainer.data.tokens_per_batch / _median([metrics["step_seconds"] for metrics in history])
    num_parameters = sum(
        gather(sum(p.numel() for s in trainer.pipeline.stages.values() for p in s.parameters()))
    )
    peak = peak_flops(here.device, getattr(torch, config.dtype))
    losses: Summary = {key: history[-1][key] for key in ("loss", "evaluation_loss") if key in history[-1]}
    summary: Summary = {
        "schedule": config.schedule.name,
        "replanned_as": config.schedule.replan,
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
        **machine(here.device),
    }
    return summary, measured, predicted


def _bubbles(predicted: Timeline, measured: Timeline) -> Summary:
    return {
        "predicted_bubble_rate": predicted.bubble_rate,
        "measured_bubble_rate": measured.bubble_rate,
        "predicted_makespan_ms": predicted.makespan,
        "measured_makespan_ms": measured.makespan,
    }


def explain_stage(
    model: dict[str, Any],
    data: dict[str, Any],
    *,
    stage: int,
    num_stages: int,
    microbatch_size: int,
    seed: int = 0,
    dtype: str = "float32",
    compile: str = "none",
) -> Explanation:
    """Run one microbatch of F through one stage and explain what its B will do; no process group.

    model, data: config nodes with a `_target_`. compile: as in TrainConfig; what stays eager is logged, too.
    The stages before it run first, without a graph, for an input of the right shape; the last stage's F
    ends with the loss. Raises ConfigError.
    """
    built = build_model(model)
    source = build_data(data, microbatch_size, seed)

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
        _compile({stage: module}, compile, budget=1.0)
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
