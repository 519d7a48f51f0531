"""The composition root of a training run: builds its parts and runs them.

No algorithm is in this file, and nothing here asks what a schedule is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zbpp.builders.callbacks import (
    build_callbacks,
    build_early_stop,
    build_loggers,
    build_own_callbacks,
    build_saving,
)
from zbpp.builders.data import limit_evaluation
from zbpp.builders.model import build_model, layers_per_stage, metrics_of
from zbpp.builders.optimizer import build_scheduler, learning_rate_factor, optimizer_of
from zbpp.builders.plan import check_layers, check_plan, title_of
from zbpp.builders.stages import build_mesh, pipeline_ranks
from zbpp.builders.trainer import build_masters, build_pipeline, build_replan, build_validation
from zbpp.config import TrainConfig, naming
from zbpp.job.agreement import broadcast
from zbpp.job.errors import CommunicationError
from zbpp.job.joining import of_first_start, rank_and_size
from zbpp.job.world import World, world
from zbpp.run.elastic import adapted
from zbpp.run.job import Job, agreed_job, place_in_job, planned_job, prepare_stages, processes_started
from zbpp.run.results import write_results
from zbpp.runtime import CudaGraphs, Extra, FlightRecorder, HeadAtOnce, Pipeline
from zbpp.runtime.parallel.mesh import Place
from zbpp.training.fine_tuned import check_fine_tuned
from zbpp.training.leaving import LeaveOnSignal
from zbpp.training.loggers import Loggers, progress
from zbpp.training.measured_steps import Summary, Title, summarise
from zbpp.training.memory_report import MemoryReport, out_of_memory_explained
from zbpp.training.non_finite import NonFinitePolicy
from zbpp.training.optim.precision import PRECISIONS, LossScale, Precision
from zbpp.training.optim.update import Metrics
from zbpp.training.run_folder import RunFolder, check_free, claimed
from zbpp.training.trainer import Trainer

_GRACE = 2.0  # s in which a launcher that has seen a rank fail ends the others


def train(config: TrainConfig, settings: dict[str, Any], resolved_yaml: str) -> dict[str, Any]:
    """Train as `config` says; called by every rank of a job. Returns the figures of summary.json.

    settings: the config as values by dotted key; all but run_dir must be the same on all ranks. Raises
    ConfigError, PlanError, FolderError or AgreementError before any work starts.
    """
    begin, home = time.monotonic(), Path.cwd()  # code of the user may call os.chdir
    config, resolved_yaml = _in_first_folder(config, resolved_yaml)
    config, settings, change = adapted(config, settings, processes_started())
    rank, num_processes = place_in_job(config.parallel.num_processes)
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    with out_of_memory_explained(rank):
        job, measured = planned_job(config, num_ranks) if rank == 0 else (None, None)
    with (
        _run_folder(config, home, rank) as folder,
        world(device=config.parallel.device, timeout=config.parallel.timeout) as here,
        LeaveOnSignal(is_shown=rank == 0) as signals,
        out_of_memory_explained(rank, here.device),
        _heard_of_last(signals),
    ):
        mesh = build_mesh(config.parallel, here.device.type)
        job = agreed_job(config, settings, job, Place(mesh))
        path = home / broadcast(config.run_dir)
        recorder = FlightRecorder(path / "failure", ends_process=True)
        trainer = _trainer_of(config, job, mesh, here, [recorder])
        saving = build_saving(config, settings, path, trainer, folder)
        if folder is not None:
            folder.begin(trainer.next_step)
            folder.write("config.yaml", resolved_yaml)
            _print_facts(config, job, change)
        made = build_loggers(config.logger, path, settings, trainer.next_step) if here.rank == 0 else []
        with Loggers(made) as loggers, _recorded(recorder):
            watching = build_callbacks(config, job.data, here, path, loggers, begin=begin)
            trainer.callbacks = [signals, *watching, *trainer.callbacks, *saving]
            title, summary = _run(config, job, trainer, loggers, here)
            write_results(config, path, trainer, measured, title, summary, loggers, is_rank_0=rank == 0)
        return summary.figures


@contextmanager
def _recorded(recorder: FlightRecorder) -> Iterator[None]:
    """Leave this rank's record if an error ends the run, also between the pipeline's calls."""
    try:
        yield
    except Exception as error:
        recorder.fail(error)
        raise


@contextmanager
def _heard_of_last(signals: LeaveOnSignal) -> Iterator[None]:
    """A rank that waited in vain ends a moment later: the launcher is to hear first of the rank to blame."""
    try:
        yield
    except CommunicationError:
        signals.wait(_GRACE)
        raise


def check_before_start(config: TrainConfig, settings: dict[str, Any], num_processes: int) -> None:
    """Raise the errors about folder, degrees, model or plan that rank 0 would raise, before ranks start.

    A schedule that is planned for costs is not planned here, see `check_plan`.
    """
    check_free(config.run_dir, overwrite=config.overwrite, resume=config.resume)
    config, _, _ = adapted(config, settings, num_processes)
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    check_layers(build_model(config.model, config.seed, config.finetune), config.schedule, num_ranks)
    check_plan(config.schedule, num_ranks, config.num_microbatches)


def _in_first_folder(config: TrainConfig, resolved_yaml: str) -> tuple[TrainConfig, str]:
    """The config with the run_dir that the first start of this job had; its default has the time in it."""
    if rank_and_size()[0] != 0:
        return config, resolved_yaml
    first = of_first_start("run_dir", config.run_dir, config.parallel.timeout)
    return replace(config, run_dir=first), resolved_yaml.replace(config.run_dir, first)


@contextmanager
def _run_folder(config: TrainConfig, home: Path, rank: int) -> Iterator[RunFolder | None]:
    """The run's folder, claimed, on rank 0, which raises FolderError if it can't; None on other ranks."""
    options: Any = {"overwrite": config.overwrite, "resume": config.resume}
    with claimed(home / config.run_dir, **options) if rank == 0 else nullcontext() as folder:
        yield folder


def _trainer_of(
    config: TrainConfig, job: Job, mesh: DeviceMesh | None, here: World, extras: Sequence[Extra]
) -> Trainer:
    """Prepare the job's stages, and build the trainer over them. Collective. extras: of the pipeline."""
    precision = PRECISIONS[config.precision]
    prepare_stages(config, job, here.device, precision, mesh)
    loss_fn = precision.widened(job.model.loss)
    with naming("model"):
        pipeline = _build_pipeline(config, job, loss_fn, precision, mesh, extras)
        return _build_trainer(config, job, loss_fn, precision, pipeline)


def _build_pipeline(
    config: TrainConfig,
    job: Job,
    loss_fn: Callable[..., Any],
    precision: Precision,
    mesh: DeviceMesh | None,
    extras: Sequence[Extra],
) -> Pipeline:
    pipeline = build_pipeline(
        job.stages,
        job.timetable,
        loss_fn,
        config.seed,
        config.parallel,
        precision,
        mesh,
        job.offload,
        [*_extras_of(config), *extras],
    )
    with naming("finetune"):
        check_fine_tuned(pipeline, job.model)
    return pipeline


def _extras_of(config: TrainConfig) -> Iterator[Extra]:
    if config.memory.head_at_once:
        yield HeadAtOnce()
    if config.cuda_graphs:
        yield CudaGraphs()


def _build_trainer(
    config: TrainConfig, job: Job, loss_fn: Callable[..., Any], precision: Precision, pipeline: Pipeline
) -> Trainer:
    # After the pipeline, which gives all copies of a parameter the same float32 values.
    masters = build_masters(pipeline, precision)
    optimizer = optimizer_of(pipeline, config.optimizer, masters, config.memory.gradient_release)
    own = build_own_callbacks(config)
    with naming("optimizer"):  # what an update does not go with
        return Trainer(
            pipeline=pipeline,
            optimizer=optimizer,
            data=limit_evaluation(
                job.data, config.evaluate_every, config.evaluation_batches, pipeline.place.num_data_parts
            ),
            learning_rate=learning_rate_factor(config.optimizer, config.steps),
            scheduler=build_scheduler(optimizer, config.optimizer),
            clip_norm=config.optimizer.clip_norm,
            evaluate_every=config.evaluate_every,
            read_ahead=config.read_ahead,
            record_every=config.measure_every,
            callbacks=[*build_early_stop(config), *own],
            metrics=metrics_of(job.model, precision),
            replan=build_replan(
                config.schedule.replan, config.memory.limit, job.timetable, loss_fn, job.stages
            ),
            masters=masters,
            loss_scale=LossScale() if precision.is_scaled else None,
            gradient_release=config.memory.gradient_release,
            per_parameter=config.optimizer.per_parameter,
            post_validation=build_validation(config.optimizer),
            non_finite=NonFinitePolicy(config.non_finite, config.max_skipped),
            memory_report=MemoryReport(config.steps - 1) if config.memory.report else None,
        )


def _print_facts(config: TrainConfig, job: Job, change: str) -> None:
    """Print what was chosen for this run. change: what an elastic start has changed."""
    cut = layers_per_stage(job.model, job.timetable.num_stages)
    if cut is not None:
        print("layers per stage:", *cut, flush=True)
    if config.memory.recompute == "auto":
        stages = ", ".join(map(str, sorted(job.recomputed))) or "none"
        note = f" ({config.counts_without_offload})" if config.counts_without_offload else ""
        print(f"stages that recompute: {stages}{note}", flush=True)
    if change:
        print(change, flush=True)


def _run(
    config: TrainConfig, job: Job, trainer: Trainer, loggers: Loggers, here: World
) -> tuple[Title, Summary]:
    """Train to the end, and sum up. Collective."""
    begin = time.monotonic()
    history = _trained(config, trainer, loggers, is_shown=here.rank == 0)
    title = title_of(config.schedule, is_replanned=trainer.is_replanned)
    cut = layers_per_stage(job.model, job.timetable.num_stages)
    summary = summarise(
        title,
        trainer,
        history,
        here,
        PRECISIONS[config.precision].compute,
        seconds=time.monotonic() - begin,
    )
    if cut is not None:
        summary.figures["layers_per_stage"] = cut
    if config.memory.recompute == "auto":
        summary.figures["recomputed_stages"] = sorted(job.recomputed)
    return title, summary


def _trained(config: TrainConfig, trainer: Trainer, loggers: Loggers, *, is_shown: bool) -> list[Metrics]:
    """Train to the end; returns the metrics of each step."""
    history = []
    title = str(title_of(config.schedule))
    options: Any = {"print_every": config.print_every, "title": title, "first": trainer.next_step}
    with progress(config.steps, shown=is_shown, **options) as show:
        for metrics in trainer.run(config.steps):
            loggers.log(metrics)
            show(metrics, title=str(title_of(config.schedule, is_replanned=trainer.is_replanned)))
            history.append(metrics)
    return history
