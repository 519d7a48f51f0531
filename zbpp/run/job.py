"""The stages, plan and data of one rank: planned on rank 0, agreed on by all ranks, prepared on each."""

from __future__ import annotations

import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.builders.data import build_data
from zbpp.builders.model import build_model, build_stages, check_data_fit
from zbpp.builders.plan import build_offload, build_timetable, check_layers
from zbpp.builders.stages import (
    compile_stages,
    move_stages,
    offload_weights,
    recompute_stages,
    split_stages,
)
from zbpp.config import ConfigError, TrainConfig, naming
from zbpp.data import Data
from zbpp.data.source import Unread
from zbpp.job.agreement import broadcast, check_agreement, check_equal, gather
from zbpp.job.joining import rank_and_size
from zbpp.runtime import ActivationOffload, CudaGraphs, GradientRelease
from zbpp.runtime.memory.weight_offload import OffloadedWeights
from zbpp.runtime.microbatch import into_microbatches
from zbpp.runtime.parallel.mesh import Place
from zbpp.runtime.parallel.ties import agree_on_ties
from zbpp.runtime.update.validation import Validation
from zbpp.schedule import Timetable
from zbpp.training.batches import batch_for
from zbpp.training.optim.precision import Precision

if TYPE_CHECKING:
    from zbpp.prediction.measured_stages import MeasuredStages


class Job(NamedTuple):
    """One rank's `stages` of the model, the timetable, and the data.

    recomputed: with memory.recompute=auto, the numbers of the stages that recompute. offload: which
    activations leave the device.
    """

    timetable: Timetable
    model: Any
    stages: dict[int, nn.Module]
    data: Data
    recomputed: frozenset[int] = frozenset()
    offload: ActivationOffload | None = None


def place_in_job(wanted: int | None) -> tuple[int, int]:
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


def processes_started() -> int:
    """How many processes torchrun has started; one without torchrun."""
    return rank_and_size()[1]


def planned_job(config: TrainConfig, num_ranks: int) -> tuple[Job, MeasuredStages | None]:
    """(rank 0's job, with the timetable that it plans or reads; the bytes of all stages, if needed).

    The bytes are needed for memory.report and memory.recompute=auto. Rank 0 alone plans, before it joins the
    other ranks, which wait for its plan. So the ranks can't disagree, and a mistake in the config is reported
    once. Measuring parts of layers needs a fake process group, which has to be gone before the real one is
    made.
    """
    check_together(config)
    model = build_model(config.model, config.seed, config.finetune)
    check_layers(model, config.schedule, num_ranks)
    timetable = build_timetable(config.schedule, num_ranks, config.num_microbatches)
    job = _build_job(config, model, timetable, 0)
    job = job._replace(offload=build_offload(config.memory, config.schedule, timetable))
    if not config.memory.report and config.memory.recompute != "auto":
        return job, None
    from zbpp.prediction.predictor import Predictor  # imports torch's fake tensors: seconds

    measured, recomputed = Predictor().measure(config, timetable)
    return job._replace(recomputed=recomputed), measured


def _build_job(config: TrainConfig, model: Any, timetable: Timetable, rank: int) -> Job:
    stages = build_stages(model, timetable, rank)
    batch_size = timetable.num_microbatches * config.microbatch_size
    is_read = bool(stages.keys() & {0, timetable.num_stages - 1})
    data = build_data(config.data, batch_size, config.seed, config.read_ahead, is_read=is_read)
    return Job(timetable, model, stages, data)


def agreed_job(config: TrainConfig, settings: dict[str, Any], job: Job | None, place: Place) -> Job:
    """This rank's job, under rank 0's timetable. job: rank 0's own; None on other ranks. Collective.

    Raises AgreementError unless config, code and data are the same on all ranks.
    """
    check_agreement("configs", {key: value for key, value in settings.items() if key != "run_dir"})
    text, recomputed, offload = broadcast(
        (str(job.timetable), job.recomputed, job.offload) if job else ("", frozenset(), None)
    )
    timetable = Timetable.parse(text)
    job = job or _build_job(
        config, build_model(config.model, config.seed, config.finetune), timetable, place.rank
    )
    job = job._replace(recomputed=recomputed, offload=offload)
    check_source_files()
    return job._replace(data=_agreed_data(job.data))


def _agreed_data(data: Data) -> Data:
    """The data with rank 0's facts, also on ranks that read no data. Raises AgreementError. Collective."""
    found = {rank: each for rank, each in enumerate(gather(data.fingerprint)) if each is not None}
    check_equal("data (by fingerprint)", list(found.values()), list(found))
    return data.told_by(broadcast(data._replace(train=Unread(), evaluation=Unread())))


def prepare_stages(
    config: TrainConfig, job: Job, device: torch.device, precision: Precision, mesh: DeviceMesh | None
) -> None:
    """Move, split and tie the stages, try the data on them, then have them recompute or compile."""
    move_stages(job.stages, device, precision, stay_on_host=config.memory.offload_weights)
    split_stages(job.model, job.stages, mesh)
    place = Place(mesh)
    with naming("model"):
        agree_on_ties(job.stages, job.timetable.rank_of, place, job.model)
    if config.memory.offload_weights:
        offload_weights(job.stages, device)
    with naming("data"):
        args, _ = batch_for(job.stages, job.timetable.num_stages, job.data.train, 0, device)
        num_microbatches = job.timetable.num_microbatches
        first = [into_microbatches("the input", arg, num_microbatches)[0] for arg in args]
        check_data_fit(job.stages, first)
    recompute_stages(job.stages, config.memory.recompute, job.recomputed)
    compile_stages(job.stages, config.compile, config.memory.budget)


# ----------------------------------------------------------------
# Do all ranks run the same code? Ranks with different source files train wrongly, and nothing shows it.

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def check_source_files(group: dist.ProcessGroup | None = None) -> None:
    """Raise AgreementError on every rank, naming the files, if a file differs between two ranks.

    Call this after the user's model and data are built: all modules that they have imported are compared.
    Collective.
    """
    mine = source_files()
    everyone: dict[str, str] = {}
    for files in reversed(gather(mine, group)):
        everyone |= files
    # A module that this rank has not imported counts as equal: it takes the other ranks' hash.
    check_agreement("source files (by hash)", everyone | mine, group)


def source_files() -> dict[str, str]:
    """A hash of each file of zbpp, and of each imported module that is neither installed nor Python's."""
    package = Path(__file__).parents[1]
    files = {f"zbpp/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    for name, module in list(sys.modules.items()):
        file, package_file = _file_of(module), _file_of(sys.modules.get(name.partition(".")[0]))
        # A module counts as installed if its package is: torch's compiler writes modules elsewhere.
        is_installed = _is_installed(file) or _is_installed(package_file)
        if file.endswith(".py") and name.partition(".")[0] != "zbpp" and not is_installed:
            files[name] = Path(file)
    return {name: _hash(path) for name, path in sorted(files.items()) if path.is_file()}


def _file_of(module: object) -> str:
    return getattr(module, "__file__", None) or ""


def _is_installed(file: str) -> bool:
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib"))


def _hash(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=4).hexdigest()


# ----------------------------------------------------------------
# Which switches of a config don't go together: what the extras behind them say (docs/extras.md).


def check_together(config: TrainConfig) -> None:
    """Raise ConfigError for two switches that are on, and whose extras exclude each other."""
    memory, validation = config.memory, config.optimizer.validation
    release, offload = memory.gradient_release, memory.offload
    switches = (
        (ActivationOffload, "memory.offload", offload, offload != "none"),
        (CudaGraphs, "cuda_graphs", "true", config.cuda_graphs),
        (GradientRelease, "memory.gradient_release", release, release != "off"),
        (OffloadedWeights, "memory.offload_weights", "true", memory.offload_weights),
        (Validation, "optimizer.validation", validation, validation == "after"),
    )
    on = {extra.name: f"{key}={value}" for extra, key, value, is_on in switches if is_on}
    for extra, *_ in switches:
        for other, instead in extra.excludes.items():
            if extra.name in on and other in on:
                raise ConfigError(f"{on[extra.name]} doesn't go with {on[other]}: {instead}")
