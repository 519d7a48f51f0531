"""The composition root: puts models, data, schedules and runtime together.

The only file that knows everyone, and no algorithm: nothing here asks what a schedule is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.autograd import Explanation, explain, recompute
from zbpp.build import build_data, build_model, check_fit, cut_of, fitting, machine
from zbpp.config import NUM_MICROBATCHES, ConfigError, TrainConfig, naming
from zbpp.planning import canonical_name, placement_of, plan
from zbpp.render import chrome_trace, render_picture
from zbpp.runtime import Pipeline, measured_costs
from zbpp.runtime.microbatch import split
from zbpp.runtime.world import World, broadcast, check_agreement, gather, world
from zbpp.schedule import Costs, Timeline, Timetable, simulate
from zbpp.training.batch import batch_for
from zbpp.training.data import Data
from zbpp.training.loggers import JsonLines, Logger, Loggers, Wandb, finite
from zbpp.training.metrics import peak_flops, utilisation
from zbpp.training.optimizer import adamw, parameters_of, warmup_cosine
from zbpp.training.planned import made_plan, read_plan
from zbpp.training.progress import progress
from zbpp.training.replan import Replan
from zbpp.training.run_folder import RunFolder, claimed
from zbpp.training.sources import check_sources
from zbpp.training.ties import check_ties
from zbpp.training.trainer import Trainer
from zbpp.training.weights import save_weights

Summary = dict[str, Any]


def train(config: TrainConfig, settings: dict[str, Any], resolved_yaml: str) -> Summary:
    """Train as `config` says; called by every rank of a job. Returns the summary.

    settings: the flat config, compared between the ranks. Raises ConfigError, PlanError or
    AgreementError before any work starts.
    """
    # Rank 0 alone plans, and finds what is wrong with the arguments before it joins the others: they wait for
    # its plan, so that ranks can't disagree and a mistake is said once.
    rank, num_ranks = int(os.environ.get("RANK", "0")), _num_ranks(config)
    job = _prepare(config, _planned(config, num_ranks), rank) if rank == 0 else None
    with (
        _run_folder(config, rank) as folder,
        world(device=config.parallel.device, timeout=config.parallel.timeout) as here,
    ):
        check_agreement("configs", {key: value for key, value in settings.items() if key != "run_dir"})
        timetable = Timetable.parse(broadcast(str(job.timetable) if job else ""))
        job = job or _prepare(config, timetable, rank)
        check_sources()
        check_agreement("data (by fingerprint)", job.data.fingerprint)
        path = Path(broadcast(config.run_dir))
        with naming("model"):
            check_ties(job.model.build_stage, timetable.rank_of, is_rank_0=here.rank == 0)
        for stage in job.stages.values():
            stage.to(here.device, getattr(torch, config.dtype))
        _check_fit(job, here.device)
        for stage in job.stages.values():
            _recompute(stage, config.memory.recompute)
        _compile(job.stages, config.compile, config.memory.budget)
        with naming("model"):
            trainer = _trainer(config, job)
        if folder is not None:
            folder.begin()
            (path / "config.yaml").write_text(resolved_yaml)
            if "layers_per_stage" in job.cut:
                print("layers per stage:", *job.cut["layers_per_stage"], flush=True)
        with Loggers(_loggers(config, settings, path) if here.rank == 0 else []) as loggers:
            history = _run(config, trainer, loggers, shown=here.rank == 0)
            summary, measured, predicted = _summarise(config, trainer, here, history)
            summary |= job.cut
            if config.save_weights:
                save_weights(path, trainer.pipeline)
            if here.rank == 0:
                loggers.summary = summary
                _write(path, summary, measured, predicted)
                print(f"written to {path}", flush=True)
        return summary


class _Job(NamedTuple):
    """What a rank works on."""

    timetable: Timetable
    model: Any
    stages: dict[int, nn.Module]
    cut: Summary
    data: Data


def check_plan(config: TrainConfig, num_ranks: int) -> None:
    """Raise PlanError or ConfigError for a file in schedule.timetable that can't be trained by."""
    if config.schedule.timetable is not None:
        _planned(config, num_ranks)


def _planned(config: TrainConfig, num_ranks: int) -> Timetable:
    schedule, options = config.schedule, {**config.schedule.options, "costs": config.schedule.costs}
    try:
        if schedule.timetable is not None:
            return read_plan(schedule.timetable, num_ranks, config.num_microbatches, **options)
        return made_plan(schedule.name, num_ranks, config.num_microbatches or NUM_MICROBATCHES, **options)
    except OSError as error:
        raise ConfigError(f"schedule: {error}; write a file of scripts/plan.py or measure.py") from error


def _prepare(config: TrainConfig, timetable: Timetable, rank: int) -> _Job:
    model = build_model(config.model, config.seed)
    stages = _stages(model, timetable, rank)
    data = build_data(config.data, timetable.num_microbatches * config.microbatch_size, config.seed)
    return _Job(timetable, model, stages, cut_of(model, timetable.num_stages), data)


@contextmanager
def _run_folder(config: TrainConfig, rank: int) -> Iterator[RunFolder | None]:
    """The folder on rank 0, which is refused before the ranks join and changed after that; None on others."""
    with claimed(config.run_dir, overwrite=config.overwrite) if rank == 0 else nullcontext() as folder:
        yield folder


def _num_ranks(config: TrainConfig) -> int:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = config.parallel.num_ranks
    if wanted is not None and wanted != started:
        raise ConfigError(
            f"parallel.num_ranks={wanted}, but torchrun started {started}: write "
            f"torchrun --nproc-per-node {wanted} scripts/train.py ..., or parallel.num_ranks=null"
        )
    return started


def _stages(model: Any, timetable: Timetable, rank: int) -> dict[int, nn.Module]:
    with naming("model"):
        stages = {
            index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)
        }
    for index, stage in stages.items():
        if not isinstance(stage, nn.Module):
            raise ConfigError(
                f"model: build_stage({index}, {timetable.num_stages}) returned a {type(stage).__name__}, not "
                "a torch.nn.Module: is a return missing?"
            )
    return stages


def _check_fit(job: _Job, device: torch.device) -> None:
    num_stages, num_microbatches = job.timetable.num_stages, job.timetable.num_microbatches
    with naming("data"):
        args, _ = batch_for(job.stages, num_stages, job.data.train, 0, device)
        check_fit(job.stages, [split("the input", each, num_microbatches)[0] for each in args])


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
    from zbpp.autograd.compiled import SplitCache, compile_stage

    cache: SplitCache = {}
    for index, stage in stages.items():
        try:
            compile_stage(
                stage,
                whole=what == "stage",
                budget=budget,
                name=f"stage {index}",
                cache=cache,
                say=partial(print, flush=True),
            )
        except RuntimeError as error:
            raise ConfigError(f"compile={what}: {error}") from error


def _trainer(config: TrainConfig, job: _Job) -> Trainer:
    timetable, model, stages, _, data = job
    options = config.optimizer
    num_batches = min(config.evaluation_batches, data.num_evaluation_batches)
    if config.evaluate_every and not num_batches:
        raise ConfigError(
            f"less data is held out than a batch ({job.data.items_per_batch} {job.data.unit}), but "
            "evaluate_every > 0: write evaluate_every=0, or hold out more (of text: data.held_out=0.05)"
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
        metrics=_metrics(model),
        replan=_replan(config, timetable, stages, model, build),
    )


def _metrics(model: Any) -> Callable[[Any, Any], Mapping[str, float | Tensor]] | None:
    """The model's own metrics, if it has any; see zbpp/stage_api.py."""
    found = getattr(model, "metrics", None)
    return found if callable(found) else None


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
            timetable.num_microbatches,
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
    with progress(config.steps, shown=shown, print_every=config.print_every, title=_title(config)) as show:
        for metrics in trainer.run(config.steps):
            loggers.log(metrics)
            show(metrics, title=_title(config, replanned=trainer.is_replanned))
            history.append(metrics)
    return history


def _title(config: TrainConfig, *, replanned: bool = False) -> str:
    """What runs: a schedule's name, or that of a plan's file."""
    schedule = config.schedule
    first = canonical_name(schedule.name) if schedule.timetable is None else Path(schedule.timetable).stem
    return f"{schedule.replan}, replanned from {first}" if replanned else first


def _summarise(
    config: TrainConfig, trainer: Trainer, here: World, history: list[dict[str, Any]]
) -> tuple[Summary, Timeline, Timeline]:
    measured = _typical(trainer.timelines)
    predicted = simulate(measured.timetable, measured_costs(*trainer.timelines))
    speed = trainer.data.items_per_batch / _median([metrics["step_seconds"] for metrics in history])
    num_parameters = sum(gather(sum(p.numel() for p in parameters_of(trainer.pipeline.stages))))
    peak = peak_flops(here.device, getattr(torch, config.dtype))
    tokens = speed if trainer.data.unit == "tokens" else None
    last = history[-1]
    losses: Summary = {key: last[key] for key in last if key == "loss" or key.startswith("evaluation_")}
    summary: Summary = {
        "schedule": config.schedule.replan if trainer.is_replanned else _title(config),
        "replanned_from": _title(config) if trainer.is_replanned else None,
        "num_ranks": here.size,
        "num_stages": trainer.pipeline.timetable.num_stages,
        "num_microbatches": trainer.pipeline.timetable.num_microbatches,
        "num_parameters": num_parameters,
        "steps": config.steps,
        **losses,
        "unigram_entropy": trainer.data.unigram_entropy,
        **_bubbles(predicted, measured),
        f"{trainer.data.unit}_per_second": speed,
        "model_flops_utilisation": utilisation(num_parameters, tokens, here.size, peak),
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
    built = build_model(model, seed)
    source = build_data(data, microbatch_size, seed)

    def stage_of(index: int) -> nn.Module:
        made: nn.Module = built.build_stage(index, num_stages)
        return made.to(getattr(torch, dtype))

    with naming("model"), fitting("the forward failed"):
        module = stage_of(stage)  # first: a stage that does not exist is refused before any runs
        ends = {0: module if stage == 0 else stage_of(0), num_stages - 1: module}
        args, target = batch_for(ends, num_stages, source.train, 0, torch.device("cpu"))
        with torch.no_grad():
            for index in range(stage):
                output = (ends[0] if index == 0 else stage_of(index))(*args)
                args = output if isinstance(output, tuple) else (output,)
        for each in args if stage else ():
            if isinstance(each, Tensor) and each.is_floating_point():
                each.requires_grad_()
        _compile({stage: module}, compile, budget=1.0)
        output = module(*args)
        return explain(
            built.loss(output, target) if stage == num_stages - 1 else output, args, module.named_parameters()
        )


def _typical(timelines: list[Timeline]) -> Timeline:
    """The one with the median makespan."""
    return sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _write(folder: Path, summary: Summary, measured: Timeline, predicted: Timeline) -> None:
    (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
    began = summary["replanned_from"]
    what = f"{summary['schedule']}, replanned from {began}" if began else summary["schedule"]
    panels = {f"{what}: predicted from measured costs": predicted, f"{what}: measured": measured}
    render_picture(panels, folder / "timeline.png")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(panels)))
