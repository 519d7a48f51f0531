"""The typed config tree. Hydra and OmegaConf are known here and in scripts/ only.

A YAML under configs/ is one choice. Wrong types and unknown keys fail while Hydra composes;
ranges are checked in `__post_init__`; what leaves here are plain objects.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

NUM_MICROBATCHES = 8  # where neither the config nor a plan says how many


class ConfigError(ValueError):
    """A config that can't be run; the message says what to write instead."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """As scripts/plan.py takes them (null: the schedule's own), and what follows the first steps."""

    name: str = MISSING
    timetable: str | None = None  # a file that plan.py wrote: the plan itself, instead of the name
    costs: str | None = None  # a file that measure.py wrote, for schedules that are planned for costs
    stages_per_rank: int | None = None
    placement: str | None = None  # one, looped or v
    memory_limit: int | float | str | None = None  # of each rank: activations, or 12GiB with costs in bytes
    replan: str | None = None  # a schedule to go on with, planned for what the first steps cost

    @property
    def options(self) -> dict[str, Any]:
        """What `plan` takes beside the name."""
        others = ("name", "replan", "timetable", "costs")
        return {key: value for key, value in vars(self).items() if key not in others}


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then a cosine down to min_ratio of the learning rate."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 10
    min_ratio: float = 0.1
    clip_norm: float | None = 1.0  # of the gradients of ALL stages together; null: no clipping

    def __post_init__(self) -> None:
        _check(
            self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "write a number above 0"
        )
        _check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "write 0 or more")
        _check(0 <= self.min_ratio <= 1, "optimizer.min_ratio", self.min_ratio, "write 0 to 1")
        _check(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "write 0 or more, below 1")
        _check(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "write 0 or more, below 1")
        if self.clip_norm is not None:
            _check(
                self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "write a number above 0, or null"
            )


@dataclass(kw_only=True)
class ParallelConfig:
    num_ranks: int | None = None  # null: as many as torchrun starts
    device: str = "auto"
    timeout: float = 600.0  # s, of every wait for another rank
    dynamic_shapes: bool = False  # whether microbatches may differ in shape; costs a latency per message

    def __post_init__(self) -> None:
        _check(
            self.device in ("auto", "cpu", "cuda"), "parallel.device", self.device, "write auto, cpu or cuda"
        )
        _check(self.timeout > 0, "parallel.timeout", self.timeout, "write seconds, above 0")


@dataclass(kw_only=True)
class MemoryConfig:
    recompute: str = "none"  # activations, in B: of no block, of each block by itself, of the whole stage
    budget: float = 1.0  # of what compiled stages would keep between F and B; the rest is computed again
    limit: float | None = (
        None  # GiB for a rank to hold between F, B and W, for schedule.replan; null: as before
    )

    def __post_init__(self) -> None:
        _check(
            self.limit is None or self.limit > 0, "memory.limit", self.limit, "write GiB, above 0, or null"
        )
        known = ("none", "block", "stage")
        _check(self.recompute in known, "memory.recompute", self.recompute, "write none, block or stage")
        _check(0 <= self.budget <= 1, "memory.budget", self.budget, "write 0 to 1")


@dataclass(kw_only=True)
class LoggerConfig:
    name: str = "jsonl"
    project: str = "zbpp"
    mode: str = "online"  # of wandb: online, offline or disabled

    def __post_init__(self) -> None:
        _check(self.name in ("jsonl", "wandb"), "logger.name", self.name, "write jsonl or wandb")
        _check(
            self.mode in ("online", "offline", "disabled"), "logger.mode", self.mode, "see logger/wandb.yaml"
        )
        if self.name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError("logger=wandb, but the package is not installed: pip install 'zbpp[wandb]'")


@dataclass(kw_only=True)
class TrainConfig:
    """Everything scripts/train.py needs. model and data are built from their `_target_`."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    steps: int = 100
    num_microbatches: int | None = None  # null: as many as schedule.timetable has, or 8
    microbatch_size: int = 4  # rows; the batch is num_microbatches times as large
    seed: int = 0
    dtype: str = "float32"
    compile: str = "none"  # F, B and W: of no stage, of each as a whole, of each layer by itself
    run_dir: str = MISSING
    evaluate_every: int = 50  # steps; 0: never
    evaluation_batches: int = 2
    print_every: int = 10  # steps, where no progress bar can be drawn
    save_weights: bool = True  # at the end, a file per stage

    def __post_init__(self) -> None:
        if self.num_microbatches is not None:
            advice = "write a whole number, 1 or more, or null"
            _check(self.num_microbatches >= 1, "num_microbatches", self.num_microbatches, advice)
        for name in ("steps", "microbatch_size", "evaluation_batches", "print_every"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "write a whole number, 1 or more")
        _check(self.evaluate_every >= 0, "evaluate_every", self.evaluate_every, "write 0 (never) or more")
        _check_dtype(self.dtype)
        _check_compile(self.compile)
        if self.compile == "none":
            advice = "it is for compile=stage or layer; write memory.recompute=block"
            _check(self.memory.budget == 1, "memory.budget", self.memory.budget, advice)
        else:
            advice = f"with compile={self.compile} write memory.budget=0 to 1 instead"
            _check(self.memory.recompute == "none", "memory.recompute", self.memory.recompute, advice)

    @property
    def batch_size(self) -> int:
        """Rows of a whole batch."""
        return (self.num_microbatches or NUM_MICROBATCHES) * self.microbatch_size


@dataclass(kw_only=True)
class JobConfig:
    """What scripts that start their own ranks share. model and data are built from their `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    num_ranks: int = 4
    num_microbatches: int = 12
    microbatch_size: int = 4
    repeats: int = 5  # measured steps
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    timeout: float = 120.0
    comm: float = 0.0  # ms that each message takes at least: EMULATED links, on gloo
    run_dir: str = MISSING

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "microbatch_size", "repeats"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "write a whole number, 1 or more")
        _check(self.comm >= 0, "comm", self.comm, "write milliseconds, 0 or more")
        _check_dtype(self.dtype)


@dataclass(kw_only=True)
class BenchConfig(JobConfig):
    """Everything scripts/bench.py needs: one model under several schedules, in one job."""

    schedules: list[str] = MISSING
    compare: str = "torch"  # beside torch.distributed.pipelining; none: zbpp alone
    memory_limit: float | None = None  # of zb_auto and the tuned interleaved 1F1B, in activations of a rank
    time_limit: float = 10.0  # s, of each search for a plan

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(len(self.schedules) > 0, "schedules", self.schedules, "write at least one, as [1f1b,zb_h1]")
        _check(self.compare in ("torch", "none"), "compare", self.compare, "write torch or none")
        if self.memory_limit is not None:
            _check(
                self.memory_limit > 0, "memory_limit", self.memory_limit, "write a number above 0, or null"
            )


@dataclass(kw_only=True)
class MeasureConfig(JobConfig):
    """Everything scripts/measure.py needs. schedule: whose cut of the model is measured."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


def register() -> None:
    """Tell Hydra the types of our configs: configs/train.yaml, bench.yaml and measure.yaml build on them."""
    store = ConfigStore.instance()
    store.store(name="train_types", node=TrainConfig)
    store.store(name="bench_types", node=BenchConfig)
    store.store(name="measure_types", node=MeasureConfig)


def typed(config: DictConfig) -> Any:
    """The composed config as the dataclass that it was composed from. Raises ConfigError."""
    try:
        return OmegaConf.to_object(config)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf wraps what __post_init__ raises in types of its own
        key, text = getattr(error, "full_key", None), str(error).partition("\n")[0]
        raise ConfigError(f"{key}: {text}" if key else text) from error


def flat(config: DictConfig) -> dict[str, Any]:
    """Resolved values by dotted key: what the ranks of one job must agree on."""
    return dict(_leaves("", OmegaConf.to_container(config, resolve=True)))


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, node


def as_yaml(config: DictConfig) -> str:
    """The resolved config."""
    return OmegaConf.to_yaml(config, resolve=True)


def build(what: str, node: dict[str, Any], **extra: Any) -> Any:
    """The object that a node's `_target_` names; `extra` is for targets that take it.

    Raises ConfigError, saying which part of the config.
    """
    if "_target_" not in node:
        raise ConfigError(f"{what} names no _target_: write the class, such as _target_: my_package.MyModel")
    try:
        return instantiate(node, **_taken(node, extra), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, ValueError | OSError | TypeError | ImportError | HydraException):
            raise  # a mistake in the class's own code: its traceback says where
        raise ConfigError(f"{what} ({node['_target_']}): {cause}") from cause


def _taken(node: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of `extra` that the node's target takes; a Dataset, for one, knows nothing of batches."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(node["_target_"])).parameters
    except Exception:  # no such target, a file that can't be imported: instantiate says so
        return extra
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in extra.items() if takes_any or name in parameters}


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn a ValueError or OSError of a leaf into a ConfigError that names the part of the config."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{what}: {error}") from error


def config_folder() -> Path:
    """configs/ of the repository if there is one, else the copy inside the installed package."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "configs"
    return beside if (beside / "train.yaml").is_file() else package / "configs"


def quiet_other_ranks(arguments: list[str]) -> list[str]:
    """Hydra's arguments for this process: of a job's ranks only rank 0 writes a run folder and logs.

    Raises ConfigError for a sweep (-m) inside torchrun, whose ranks would sweep each by itself.
    """
    if "RANK" not in os.environ:
        return arguments
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("-m sweeps inside one torchrun job can't work: call torchrun once per setting")
    if os.environ["RANK"] == "0":
        return arguments
    silent = ["hydra.run.dir=.", "hydra.output_subdir=null"]
    return [*arguments, *silent, "hydra/job_logging=none", "hydra/hydra_logging=none"]


def _check_compile(compile: str) -> None:
    _check(compile in ("none", "stage", "layer"), "compile", compile, "write none, stage or layer")


def _check_dtype(dtype: str) -> None:
    known = ("float32", "float64", "bfloat16")
    _check(dtype in known, "dtype", dtype, "write float32, float64 or bfloat16")


def _check(holds: bool, name: str, value: object, advice: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value}: {advice}")
