"""Checks before a run: do all ranks run the same code, do the switches of the config go together?"""

from __future__ import annotations

import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path

import torch.distributed as dist

from zbpp.config import ConfigError, TrainConfig
from zbpp.job.agreement import check_agreement, gather
from zbpp.runtime import ActivationOffload, CudaGraphs, GradientRelease
from zbpp.runtime.memory.weight_offload import OffloadedWeights
from zbpp.runtime.parallel.experts import ExpertParallel
from zbpp.runtime.update.validation import Validation

# Ranks with different source files train wrongly, and nothing shows it.

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
        (ExpertParallel, "parallel.expert", str(config.parallel.expert), config.parallel.expert > 1),
        (GradientRelease, "memory.gradient_release", release, release != "off"),
        (OffloadedWeights, "memory.offload_weights", "true", memory.offload_weights),
        (Validation, "optimizer.validation", validation, validation == "after"),
    )
    on = {extra.name: f"{key}={value}" for extra, key, value, is_on in switches if is_on}
    for extra, *_ in switches:
        for other, instead in extra.excludes.items():
            if extra.name in on and other in on:
                raise ConfigError(f"{on[extra.name]} doesn't go with {on[other]}: {instead}")
