"""The composition root of a training run: builds its parts and runs them.

No algorithm is in this file, and nothing here asks what a schedule is called.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.builders.callbacks import build_callbacks, build_early_stop
from zbpp.builders.checkpoints import build_saving
from zbpp.builders.data import build_data, limit_evaluation
from zbpp.builders.loggers import build_loggers
from zbpp.builders.model import build_model, build_stages, check_data_fit, layers_per_stage, metrics_of
from zbpp.builders.optimizer import build_scheduler, learning_rate_factor, optimizer_of
from zbpp.builders.parallel import build_mesh, pipeline_ranks, split_stages
from zbpp.builders.plan import build_timetable, check_layers, check_plan, title_of
from zbpp.builders.stages import (
    check_offload_folder,
    compile_stages,
    move_stages,
    offload_weights,
    recompute_stages,
)
from zbpp.builders.trainer import (
    build_masters,
    build_pipeline,
    build_replan,
    build_validation,
)
from zbpp.config import ConfigError, TrainConfig, naming
from zbpp.data import Data
from zbpp.planning.memory_budget import RankMemory
from zbpp.render import chrome_trace, render_memory_picture, render_picture, render_report
from zbpp.runtime.mesh import Place
from zbpp.runtime.microbatch import into_microbatches
from zbpp.runtime.model_ties import declare_ties
from zbpp.runtime.world import World, broadcast, check_agreement, check_equal, gather, world
from zbpp.schedule import Timetable
from zbpp.training.batch import batch_for
from zbpp.training.fine_tuned import check_fine_tuned
from zbpp.training.leaving.signals import LeaveOnSignal
from zbpp.training.loggers import Loggers, finite
from zbpp.training.lora import save_adapter
from zbpp.training.loss_scale import LossScale
from zbpp.training.memory_report import MemoryReport, RankReport, figures
from zbpp.training.precision import PRECISIONS, Precision
from zbpp.training.progress import progress
from zbpp.training.run_folder import RunFolder, check_free, claimed
from zbpp.training.source_files import check_source_files
from zbpp.training.summary import Summary, Title, summarise
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics
from zbpp.training.weights import save_weights

if TYPE_CHECKING:
    from zbpp.prediction.measured_stages import MeasuredStages


class _Job(NamedTuple):
    """What one rank trains: its own `stages` of the model, under a timetable, on the data."""

    timetable: Timetable
    model: Any
    stages: dict[int, nn.Module]
    data: Data
    recomputed: frozenset[int] = frozenset()  # stages, with memory.recompute=auto


def train(config: TrainConfig, settings: dict[str, Any], resolved_yaml: str) -> dict[str, Any]:
    """Train as `config` says; called by every rank of a job. Returns the figures of summary.json.

    settings: the config as values by dotted key; all but run_dir must be the same on all ranks. Raises
    ConfigError, PlanError, FolderError or AgreementError before any work starts.
    """
    begin = time.monotonic()
    # Rank 0 alone plans, before it joins the other ranks, which wait for its plan. So the ranks can't
    # disagree, and a mistake in the config is reported once.
    rank, num_processes = _place_in_job(config.parallel.num_processes)
    check_offload_folder(config.memory)
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    job = _plan_job(config, num_ranks) if rank == 0 else None
    # Before the process group exists: parts of layers are measured in a group that does not.
    measured = None
    if job and (config.memory.report or config.memory.recompute == "auto"):
        measured, job = _measured_stages(config, job)
    with (
        _run_folder(config, rank) as folder,
        world(device=config.parallel.device, timeout=config.parallel.timeout) as here,
        LeaveOnSignal(is_shown=rank == 0) as signals,
    ):
        mesh = build_mesh(config.parallel, here.device.type)
        job = _agreed_job(config, settings, job, here, Place(mesh))
        precision = PRECISIONS[config.precision]
        _prepare_stages(config, job, here.device, precision, mesh)
        with naming("model"):
            trainer = _build_trainer(config, job, precision, mesh)
        path, cut = Path(broadcast(config.run_dir)), layers_per_stage(job.model, job.timetable.num_stages)
        trainer.callbacks = [*trainer.callbacks, *build_saving(config, settings, path, trainer, folder)]
        if folder is not None:
            folder.begin(trainer.next_step)
            (path / "config.yaml").write_text(resolved_yaml)
            if cut is not None:
                print("layers per stage:", *cut, flush=True)
            if config.memory.recompute == "auto":
                print("stages that recompute:", *(sorted(job.recomputed) or ["none"]), flush=True)
        made = build_loggers(config.logger, path, settings, trainer.next_step) if here.rank == 0 else []
        with Loggers(made) as loggers:
            trainer.callbacks = [
                signals,
                *build_callbacks(config, job.data, here, path, loggers, begin=begin),
                *trainer.callbacks,
            ]
            begin_of_steps = time.monotonic()
            history = _run(config, trainer, loggers, is_shown=here.rank == 0)
            title = title_of(config.schedule, is_replanned=trainer.is_replanned)
            summary = summarise(
                title,
                trainer,
                history,
                here,
                precision.compute,
                seconds=time.monotonic() - begin_of_steps,
                layers_per_stage=cut,
            )
            if cut is not None:
                summary.figures["layers_per_stage"] = cut
            if config.memory.recompute == "auto":
                summary.figures["recomputed_stages"] = sorted(job.recomputed)
            if trainer.memory_report is not None and trainer.next_step > trainer.memory_report.step:
                reports = trainer.memory_report.gathered(trainer)
                if measured is not None:
                    predicted = _predicted(
                        measured, trainer, is_validated_later=reports[0].is_validated_later
                    )
                    _write_memory(path, predicted, reports, config.not_predicted)
            if config.save_weights:
                _save_weights(config, path, trainer)
            if here.rank == 0:
                loggers.summary = summary.figures
                _write(path, title, summary)
                if summary.measured is not None:
                    loggers.picture("timeline", path / "timeline.png", trainer.next_step)
                print(*summary.sentences, f"written to {path}", sep="\n", flush=True)
                if trainer.leaving is not None:
                    print(
                        f"left after step {trainer.next_step}: {trainer.leaving}; resume with resume=auto",
                        flush=True,
                    )
        return summary.figures


def _predicted(measured: MeasuredStages, trainer: Trainer, *, is_validated_later: bool) -> list[RankMemory]:
    """Each rank's step, with the plan of offload that the run has come to."""
    pipeline = trainer.pipeline
    return measured.predicted(
        pipeline.timetable, pipeline.offload_plan, is_validated_later=is_validated_later
    )


def _measured_stages(config: TrainConfig, job: _Job) -> tuple[MeasuredStages, _Job]:
    """The bytes of the stages, and the job with the stages that recompute."""
    from zbpp.prediction.predictor import Predictor  # imports torch's fake tensors: seconds

    measured, recomputed = Predictor().measure(config, job.timetable)
    return measured, job._replace(recomputed=recomputed)


def check_before_start(config: TrainConfig, num_processes: int) -> None:
    """Raise rank 0's errors about folder, degrees, model or plan before any rank is started.

    A schedule that is planned for costs is not tried, see `check_plan`.
    """
    check_free(config.run_dir, overwrite=config.overwrite, resume=config.resume)
    check_offload_folder(config.memory)
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    check_layers(build_model(config.model, config.seed, config.finetune), config.schedule, num_ranks)
    check_plan(config.schedule, num_ranks, config.num_microbatches)


def _place_in_job(wanted: int | None) -> tuple[int, int]:
    """(this process's number, number of processes). wanted: the number that the config asks for, or None."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted not in (None, started):
        raise ConfigError(
            f"parallel.num_processes={wanted}, but torchrun started {started}: write "
            f"torchrun --nproc-per-node {wanted} -m zbpp.train ..., or parallel.num_processes=null"
        )
    return int(os.environ.get("RANK", "0")), started


@contextmanager
def _run_folder(config: TrainConfig, rank: int) -> Iterator[RunFolder | None]:
    """The claimed folder on rank 0, where a folder that can't be used is refused; None on other ranks."""
    options: Any = {"overwrite": config.overwrite, "resume": config.resume}
    with claimed(config.run_dir, **options) if rank == 0 else nullcontext() as folder:
        yield folder


def _plan_job(config: TrainConfig, num_ranks: int) -> _Job:
    """Rank 0's job, with the timetable that it planned or read."""
    model = build_model(config.model, config.seed, config.finetune)
    check_layers(model, config.schedule, num_ranks)
    return _build_job(config, model, build_timetable(config.schedule, num_ranks, config.num_microbatches), 0)


def _build_job(config: TrainConfig, model: Any, timetable: Timetable, rank: int) -> _Job:
    stages = build_stages(model, timetable, rank)
    batch_size = timetable.num_microbatches * config.microbatch_size
    is_read = bool(stages.keys() & {0, timetable.num_stages - 1})
    data = build_data(config.data, batch_size, config.seed, config.read_ahead, is_read=is_read)
    return _Job(timetable, model, stages, data)


def _agreed_job(
    config: TrainConfig, settings: dict[str, Any], job: _Job | None, here: World, place: Place
) -> _Job:
    """This rank's job under rank 0's timetable, once config, code and data are the same on all ranks."""
    check_agreement("configs", {key: value for key, value in settings.items() if key != "run_dir"})
    text, recomputed = broadcast((str(job.timetable), job.recomputed) if job else ("", frozenset()))
    timetable = Timetable.parse(text)
    job = job or _build_job(
        config, build_model(config.model, config.seed, config.finetune), timetable, place.rank
    )
    job = job._replace(recomputed=recomputed)
    check_source_files()
    return job._replace(data=_agreed_data(job.data))


def _agreed_data(data: Data) -> Data:
    """The data with rank 0's fingerprint, which all ranks have that read them."""
    found = {rank: each for rank, each in enumerate(gather(data.fingerprint)) if each is not None}
    check_equal("data (by fingerprint)", list(found.values()), list(found))
    return data._replace(fingerprint=found[0])


def _prepare_stages(
    config: TrainConfig, job: _Job, device: torch.device, precision: Precision, mesh: DeviceMesh | None
) -> None:
    """Move, split and tie the stages, try the data on them, then have them recompute or compile."""
    move_stages(job.stages, device, precision, stay_on_host=config.memory.offload_weights)
    split_stages(job.model, job.stages, mesh)
    place = Place(mesh)
    with naming("model"):
        num_stages = job.timetable.num_stages
        declare_ties(job.model, job.stages, num_stages, is_rank_0=place.rank == 0, group=place.pipeline)
    if config.memory.offload_weights:
        offload_weights(job.stages, device, config.memory)
    with naming("data"):
        args, _ = batch_for(job.stages, job.timetable.num_stages, job.data.train, 0, device)
        num_microbatches = job.timetable.num_microbatches
        first = [into_microbatches("the input", arg, num_microbatches)[0] for arg in args]
        check_data_fit(job.stages, first)
    recompute_stages(job.stages, config.memory.recompute, job.recomputed)
    compile_stages(job.stages, config.compile, config.memory.budget)


def _build_trainer(config: TrainConfig, job: _Job, precision: Precision, mesh: DeviceMesh | None) -> Trainer:
    timetable, model, stages, data, _ = job
    loss_fn = precision.widened(model.loss)
    pipeline = build_pipeline(
        stages, timetable, loss_fn, config.seed, config.parallel, precision, mesh, config.memory
    )
    with naming("finetune"):
        check_fine_tuned(pipeline, model)
    # After the pipeline, which gives all copies of a parameter the same float32 values.
    masters = build_masters(pipeline, precision)
    optimizer = optimizer_of(pipeline, config.optimizer, masters, config.memory.gradient_release)
    return Trainer(
        pipeline=pipeline,
        optimizer=optimizer,
        data=limit_evaluation(
            data, config.evaluate_every, config.evaluation_batches, pipeline.place.num_data_parts
        ),
        learning_rate=learning_rate_factor(config.optimizer, config.steps),
        scheduler=build_scheduler(optimizer, config.optimizer),
        clip_norm=config.optimizer.clip_norm,
        evaluate_every=config.evaluate_every,
        read_ahead=config.read_ahead,
        record_every=config.measure_every,
        callbacks=build_early_stop(config),
        metrics=metrics_of(model, precision),
        replan=build_replan(config.schedule.replan, config.memory.limit, timetable, loss_fn, stages),
        masters=masters,
        loss_scale=LossScale() if precision.is_scaled else None,
        gradient_release=config.memory.gradient_release,
        post_validation=build_validation(config.optimizer),
        memory_report=MemoryReport(config.steps - 1) if config.memory.report else None,
    )


def _save_weights(config: TrainConfig, path: Path, trainer: Trainer) -> None:
    """Write the weights that were trained: all, or the adapters alone."""
    lora = config.finetune.lora.options
    if lora is None:
        save_weights(path, trainer.pipeline, trainer.masters)
        return
    base = config.model.get("path")
    save_adapter(path / "adapter", trainer.pipeline, lora, masters=trainer.masters, base=base)


def _run(config: TrainConfig, trainer: Trainer, loggers: Loggers, *, is_shown: bool) -> list[Metrics]:
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


def _write(folder: Path, title: Title, summary: Summary) -> None:
    """summary.json; timeline.png and trace.json if a step was measured."""
    (folder / "summary.json").write_text(
        json.dumps(finite(summary.figures), indent=2, allow_nan=False) + "\n"
    )
    if summary.predicted is None or summary.measured is None:
        return
    panels = {
        f"{title}: predicted from measured costs": summary.predicted,
        f"{title}: measured": summary.measured,
    }
    render_picture(panels, folder / "timeline.png")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(panels)))


def _write_memory(
    folder: Path, predicted: list[RankMemory], reports: list[RankReport], not_predicted: list[str]
) -> None:
    """memory.json and memory.png; prints both peaks, and what outlives the step."""
    found = {**figures(predicted, reports), "not_predicted": not_predicted}
    (folder / "memory.json").write_text(json.dumps(found, indent=2) + "\n")
    render_memory_picture(found, folder / "memory.png")
    print(render_report(found), flush=True)
