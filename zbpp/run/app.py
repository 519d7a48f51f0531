"""The composition root: from a checked config to a finished training run.

`train` reads from top to bottom: plan, join, agree, build, train, write. No algorithm is in this file, and
nothing here asks what a schedule is called. The files beside it build one part each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from zbpp.config import Composed, ConfigError, TrainConfig, with_values
from zbpp.data import Data
from zbpp.data.source import Unread
from zbpp.job.agreement import broadcast, check_agreement, check_equal, gather
from zbpp.job.errors import CommunicationError, is_out_of_memory
from zbpp.job.joining import Meeting, of_first_start, rank_and_size
from zbpp.job.world import World, check_device, world
from zbpp.observers.flight_recorder import FlightRecorder
from zbpp.observers.timeline import peak_memory_bytes
from zbpp.run.callbacks import build_callbacks, build_loggers, build_saving
from zbpp.run.checks import check_config
from zbpp.run.cut import Changes, check_cut, earlier_cut, fits, uncut
from zbpp.run.data import batched_by_tokens, build_data
from zbpp.run.model import (
    build_model,
    build_stages,
    check_loss_is_counted,
    explained_as_boundary,
    keeps_documents_apart,
    layers_per_stage,
)
from zbpp.run.plan import (
    check_plan,
    costs_of,
    memory_limit_of,
    note_on_microbatches,
    planned,
    shape_of,
    slice_bounds_of,
    title_of,
)
from zbpp.run.results import write_results
from zbpp.run.speeds import measured_ranks
from zbpp.run.stages import Parts, build_mesh, pipeline_ranks, prepare_stages
from zbpp.run.trainer import Plan, build_pipeline, build_trainer
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.schedule import Timetable
from zbpp.stage_api import target_names
from zbpp.training.leaving import LeaveOnSignal
from zbpp.training.loggers import Loggers, progress
from zbpp.training.measured_steps import Summary, Title, sharing, summarise, trained_and_all
from zbpp.training.optim.precision import PRECISIONS
from zbpp.training.run_folder import check_free, claimed
from zbpp.training.trainer import Trainer

_GRACE = 2.0  # s in which a launcher that has seen a rank fail ends the others


def train(composed: Composed) -> dict[str, Any]:
    """Train as the config says; called by every rank of a job. Returns the figures of summary.json.

    All settings but run_dir must be the same on all ranks. Raises ConfigError, PlanError, FolderError or
    AgreementError before any work starts.
    """
    home = Path.cwd()  # code of the user may call os.chdir
    composed = _in_first_folder(composed)
    config: TrainConfig = composed.tree
    rank, num_processes = _place_in_job(config.parallel.num_processes)
    check_device(config.parallel.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    plan, parts, note = None, None, ""
    cut: Changes = {}
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    with out_of_memory_explained(rank):
        meeting, measured = _measured_ranks(config, num_ranks)
        if rank == 0:  # before it joins the others: ranks can't disagree, and a mistake is reported once
            cut, note = _chosen_cut(with_values(config, measured), num_ranks)
            cut, note = {**measured, **cut}, _with_speeds(note, measured)
            config = with_values(config, cut)
            plan = _make_plan(config, num_ranks)
            parts = build_parts(config, plan.timetable, rank)
    options: Any = {"overwrite": config.overwrite, "resume": config.resume}
    with (
        claimed(home / config.run_dir, **options) if rank == 0 else nullcontext() as folder,
        world(device=config.parallel.device, timeout=config.parallel.timeout) as here,
        LeaveOnSignal(is_shown=rank == 0) as signals,
        out_of_memory_explained(rank, here.device),
        _heard_of_last(signals),
    ):
        del meeting  # rank 0 may have held the store, which the job now holds
        check_agreement("configs", _without_run_dir(composed.settings))
        composed = composed.changed(broadcast(cut))
        config, settings = composed.tree, _without_run_dir(composed.settings)
        mesh = build_mesh(config.parallel, here.device.type)
        plan = _shared_plan(plan)
        parts = parts or build_parts(config, plan.timetable, MeshPosition(mesh).rank)
        parts = parts._replace(data=_agreed_data(parts.data))
        path = home / broadcast(config.run_dir)
        recorder = FlightRecorder(path / "failure")

        parts = prepare_stages(
            config, parts, plan.timetable, mesh, here.device, plan.recomputed, plan.slice_bounds
        )
        pipeline = build_pipeline(config, plan, parts.model, parts.stages, mesh, [recorder])
        trainer = build_trainer(config, parts, plan, pipeline)
        saving = build_saving(config, settings, path, trainer, folder)
        trained = "trainable {:,} of {:,} parameters".format(*trained_and_all(pipeline))
        if folder is not None:
            folder.begin(trainer.next_step)
            folder.write("config.yaml", composed.yaml)
            _print_facts(composed, parts, plan, [*filter(None, [note]), trained])
        shown = composed.settings, trainer.next_step
        loggers = Loggers(build_loggers(config.logger, path, *shown) if here.rank == 0 else [])
        with loggers, _recorded(recorder):
            watching = build_callbacks(config, here, path)
            trainer.callbacks = [signals, *watching, *trainer.callbacks, *saving]
            title, summary = _run(config, parts.model, plan, trainer, loggers, here)
            write_results(config, path, trainer, title, summary, loggers, is_rank_0=rank == 0)
            trainer.pipeline.close()
        return summary.figures


def check_before_start(config: TrainConfig, num_processes: int) -> None:
    """Raise the errors about folder, degrees, model or plan that rank 0 would raise, before ranks start.

    A plan that takes a search is not made here.
    """
    check_config(config)
    check_device(config.parallel.device, num_processes)
    check_free(config.run_dir, overwrite=config.overwrite, resume=config.resume)
    num_ranks = pipeline_ranks(config.parallel, num_processes)
    check_cut(config, num_ranks)
    check_plan(uncut(config), num_ranks)


# ---------------------------------------------------------------- before the ranks join


def _in_first_folder(composed: Composed) -> Composed:
    """The config with the run_dir that the first start of this job had; its default has the time in it."""
    config: TrainConfig = composed.tree
    if rank_and_size()[0] != 0:
        return composed
    first = of_first_start("run_dir", config.run_dir, config.parallel.timeout)
    return composed.changed({"run_dir": first})


def _place_in_job(wanted: int | None) -> tuple[int, int]:
    """(this process's number, the number of processes). wanted: how many the config asks for, or None.

    Raises ConfigError if torchrun has started another number.
    """
    number, started = rank_and_size()
    if wanted not in (None, started):
        raise ConfigError(
            f"parallel.num_processes={wanted}, but torchrun started {started}: write "
            f"torchrun --nproc-per-node {wanted} -m zbpp.train ..., or parallel.num_processes=null"
        )
    return number, started


def _without_run_dir(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "run_dir"}


def _measured_ranks(config: TrainConfig, num_ranks: int) -> tuple[Meeting | None, Changes]:
    """What model.layers_per_stage=auto needs of ranks, and the config does not say, as changes to it."""
    if not config.asks_for_cut or config.parallel.speeds is not None or num_ranks == 1:
        return None, {}
    check_config(config)
    check_cut(config, num_ranks)
    meeting = Meeting(config.parallel.timeout)
    return meeting, measured_ranks(meeting, config, num_ranks, build_parts)


def _with_speeds(note: str, measured: Changes) -> str:
    if not measured:
        return note
    found = (f"{key}=[{','.join(f'{each:g}' for each in values)}]" for key, values in measured.items())
    return f"measured on a block of the model: {' '.join(found)}\n{note}"


def _chosen_cut(config: TrainConfig, num_ranks: int) -> tuple[Changes, str]:
    """The cut of model.layers_per_stage=auto: the one that the run has had so far, or the best one.

    As changes to the config, and in words.
    """
    check_config(config)
    check_cut(config, num_ranks)
    if not config.asks_for_cut:
        return {}, ""
    earlier, replaced = earlier_cut(config), ""
    if earlier:
        if fits(earlier, config, num_ranks):
            return earlier, "the cut is that of the run's earlier start"
        replaced = (
            f"a new cut: the earlier start's, {earlier['model.layers_per_stage']}, doesn't fit this one\n"
        )
    from zbpp.prediction.chosen_cut import chosen_cut  # imports torch's fake tensors: seconds

    chosen = chosen_cut(config, num_ranks)
    return chosen.changes, f"{replaced}{chosen.text()}"


def _make_plan(config: TrainConfig, num_ranks: int) -> Plan:
    """The plan of the run, with the stages that recompute.

    Measuring parts of layers needs a fake process group, which has to be gone before the real one is made.
    """
    timetable = planned(config, num_ranks)
    bounds, shape = slice_bounds_of(config, timetable), shape_of(config.schedule)
    limit = memory_limit_of(config.schedule)
    plan = Plan(
        timetable,
        costs_of(config.schedule, timetable),
        shape=shape,
        slice_bounds=bounds,
        memory_limit=limit,
    )
    if config.memory.recompute != "auto":
        return plan
    from zbpp.prediction.predictor import Predictor  # imports torch's fake tensors: seconds

    return plan._replace(recomputed=Predictor().measure(config, timetable)[1])


def build_parts(config: TrainConfig, timetable: Timetable, rank: int) -> Parts:
    """The model, one rank's stages on the CPU, and the data. Raises ConfigError."""
    model = build_model(config.model, config.seed, config.finetune)
    stages = build_stages(model, timetable, rank)
    batch_size = timetable.num_microbatches * config.microbatch_size
    is_read = bool(stages.keys() & {0, timetable.num_stages - 1})
    data = build_data(config.data, batch_size, config.seed, is_read=is_read)
    if config.batching.is_tokens:
        if timetable.num_slices > 1:
            raise ConfigError(
                "data.batching=tokens doesn't go with a plan that cuts sequences in slices: take another plan"
            )
        check_loss_is_counted(model)
        keeps_apart = keeps_documents_apart(model, timetable.num_stages)
        options: Any = {"keeps_apart": keeps_apart, "names": target_names(stages.values())}
        data = batched_by_tokens(data, config.batching, is_shown=rank == 0, **options)
    return Parts(model, stages, data)


# ---------------------------------------------------------------- together


def _shared_plan(plan: Plan | None) -> Plan:
    """Rank 0's plan, on every rank; a timetable travels as text. Collective."""
    text, *others = broadcast(None if plan is None else (str(plan.timetable), *plan[1:]))
    return Plan(Timetable.parse(text), *others)


def _agreed_data(data: Data) -> Data:
    """The data with rank 0's facts, also on ranks that read no data. Raises AgreementError. Collective."""
    found = {rank: each for rank, each in enumerate(gather(data.fingerprint)) if each is not None}
    what = (
        "data (by fingerprint; a Dataset that draws random numbers takes torch's, or seeds them by the row)"
    )
    check_equal(what, list(found.values()), list(found))
    return data.with_facts_of(broadcast(data._replace(train=Unread(), evaluation=Unread())))


# ---------------------------------------------------------------- the run


def _print_facts(composed: Composed, parts: Parts, plan: Plan, notes: Sequence[str]) -> None:
    """Print what was chosen for this run. notes: further lines."""
    config: TrainConfig = composed.tree
    for note in parts.data.notes:
        print(note, flush=True)
    if config.schedule.timetable is not None:
        unused = [each for each in composed.given if each.startswith(("schedule=", "schedule.name="))]
        more = "".join(f": {each} is not used" for each in unused)
        print(f"the plan is that of {config.schedule.timetable}{more}", flush=True)
    if plan.slice_bounds:
        print("slices of a sequence begin at tokens:", *plan.slice_bounds, flush=True)
    cut = layers_per_stage(parts.model, plan.timetable.num_stages)
    if cut is not None:
        print("layers per stage:", *cut, flush=True)
    print(*notes, sep="\n", flush=True)
    note = note_on_microbatches(plan.timetable, plan.costs)
    if note:
        print(note, flush=True)
    if config.memory.recompute == "auto":
        stages = ", ".join(map(str, sorted(plan.recomputed))) or "none"
        note = f" ({config.counts_without_offload})" if config.counts_without_offload else ""
        print(f"stages that recompute: {stages}{note}", flush=True)


def _run(
    config: TrainConfig, model: Any, plan: Plan, trainer: Trainer, loggers: Loggers, here: World
) -> tuple[Title, Summary]:
    """Train to the end, and sum up. Collective."""
    begin, history = time.monotonic(), []
    options: Any = {
        "print_every": config.print_every,
        "title": str(title_of(config.schedule)),
        "first": trainer.next_step,
        "note": sharing(here.device),
    }
    with (
        progress(config.steps, shown=here.rank == 0, **options) as show,
        explained_as_boundary(lambda: trainer.next_step == trainer.first_step),
    ):
        for metrics in trainer.run(config.steps):
            loggers.log(metrics)
            show(metrics, title=str(title_of(config.schedule, is_replanned=trainer.is_replanned)))
            history.append(metrics)
    title = title_of(config.schedule, is_replanned=trainer.is_replanned)
    dtype, seconds = PRECISIONS[config.precision].compute, time.monotonic() - begin
    summary = summarise(title, trainer, history, here, dtype, seconds=seconds)
    summary.figures["precision"] = config.precision
    cut = layers_per_stage(model, plan.timetable.num_stages)
    if cut is not None:
        summary.figures["layers_per_stage"] = cut
    if config.memory.recompute == "auto":
        summary.figures["recomputed_stages"] = sorted(plan.recomputed)
    return title, summary


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


@contextmanager
def out_of_memory_explained(rank: int, device: torch.device | None = None) -> Iterator[None]:
    """Note the rank, its peak so far and `zbpp memory` on an out-of-memory error, which keeps its type.

    The Executor has noted the action. device: None: the CPU.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            peak = peak_memory_bytes(device or torch.device("cpu"))
            error.add_note(f"rank {rank} is out of memory; its peak so far: {peak / 2**30:.3f} GiB")
            error.add_note(
                "`zbpp memory` with the arguments of this run shows each rank's curve, and each switch with "
                "its time"
            )
        raise
