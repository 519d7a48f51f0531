"""The typed config tree. Hydra and OmegaConf are known here and in scripts/ only.

A YAML under configs/ is one choice. Wrong types and unknown keys fail while Hydra composes;
ranges are declared beside the fields (ranges.py); what leaves here are plain objects.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from zbpp.ranges import Checked, one_of, ranged
from zbpp.ranges import ConfigError as ConfigError  # where the rest of zbpp looks for it

NUM_MICROBATCHES = 8  # where neither the config nor a plan says how many

_LONGEST = 1e7  # s, four months: torch's timeouts overflow somewhere above
_LARGEST_SEED = 2**63 - 1
DTYPES = ("float32", "float64", "bfloat16")
COMPILE = ("none", "stage", "layer")


@dataclass(kw_only=True)
class ScheduleConfig(Checked):
    """As scripts/plan.py takes them (null: the schedule's own), and what follows the first steps."""

    prefix: ClassVar[str] = "schedule."
    name: str = MISSING
    timetable: str | None = None  # a file that plan.py wrote: the plan itself, instead of the name
    costs: str | None = None  # a file that measure.py wrote, for schedules that are planned for costs
    stages_per_rank: int | None = ranged(None, least=1)
    placement: str | None = None  # one, looped or v
    # of each rank, in activations; where the costs are in bytes, with a unit: 12GiB
    memory_limit: int | float | str | None = None
    replan: str | None = None  # a schedule to go on with, planned for what the first steps cost

    @property
    def options(self) -> dict[str, Any]:
        """What `plan` takes beside the name."""
        others = ("name", "replan", "timetable", "costs")
        return {key: value for key, value in vars(self).items() if key not in others}


@dataclass(kw_only=True)
class OptimizerConfig(Checked):
    """AdamW with linear warm-up, then a cosine down to min_ratio of the learning rate."""

    prefix: ClassVar[str] = "optimizer."
    learning_rate: float = ranged(1e-3, above=0)
    beta1: float = ranged(0.9, below=1)
    beta2: float = ranged(0.95, below=1)
    eps: float = ranged(1e-8)
    weight_decay: float = ranged(0.1)
    warmup_steps: int = ranged(10)
    min_ratio: float = ranged(0.1, most=1)
    # The largest norm that the gradients of all stages together may have; null: no clipping.
    clip_norm: float | None = ranged(1.0, above=0)


@dataclass(kw_only=True)
class ParallelConfig(Checked):
    """num_ranks: how many scripts/train.py starts; under torchrun null, or as many as torchrun starts."""

    prefix: ClassVar[str] = "parallel."
    num_ranks: int | None = ranged(None, least=1)
    device: str = one_of("auto", "cpu", "cuda")
    timeout: float = ranged(600.0, above=0, most=_LONGEST, unit="seconds")  # of every wait for another rank
    dynamic_shapes: bool = False  # whether microbatches may differ in shape; costs a latency per message


@dataclass(kw_only=True)
class MemoryConfig(Checked):
    """limit: GiB for a rank to hold between F, B and W, for schedule.replan; null: as before."""

    prefix: ClassVar[str] = "memory."
    recompute: str = one_of("none", "block", "stage")  # in B: of each block by itself, of the whole stage
    budget: float = ranged(1.0, most=1)  # of what compiled stages would keep between F and B
    limit: float | None = ranged(None, above=0, unit="GiB")


@dataclass(kw_only=True)
class LoggerConfig(Checked):
    """mode: of wandb."""

    prefix: ClassVar[str] = "logger."
    name: str = one_of("jsonl", "wandb")
    project: str = "zbpp"
    mode: str = one_of("online", "offline", "disabled")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError("logger=wandb, but the package is not installed: pip install 'zbpp[wandb]'")


@dataclass(kw_only=True)
class TrainConfig(Checked):
    """Everything scripts/train.py needs. model and data are built from their `_target_`."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    steps: int = ranged(100, least=1)
    num_microbatches: int | None = ranged(None, least=1)  # null: those of schedule.timetable, or 8
    microbatch_size: int = ranged(4, least=1)  # rows; the batch is num_microbatches times as large
    seed: int = ranged(0, most=_LARGEST_SEED)
    dtype: str = one_of(*DTYPES)
    compile: str = one_of(*COMPILE)  # F, B and W: of no stage, of each as a whole, of each layer by itself
    run_dir: str = MISSING
    overwrite: bool = False  # whether the files of an earlier run in run_dir may be replaced
    evaluate_every: int = ranged(50)  # steps; 0: never
    evaluation_batches: int = ranged(2, least=1)
    print_every: int = ranged(10, least=1)  # steps, where no progress bar can be drawn
    save_weights: bool = True  # at the end, a file per stage

    def __post_init__(self) -> None:
        super().__post_init__()
        budget, recompute = self.memory.budget, self.memory.recompute
        if self.compile == "none" and budget != 1:
            raise ConfigError(
                f"memory.budget={budget}: it is for compile=stage or layer; write memory.recompute=block"
            )
        if self.compile != "none" and recompute != "none":
            raise ConfigError(
                f"memory.recompute={recompute}: with compile={self.compile} write memory.budget=0 to 1"
            )

    @property
    def batch_size(self) -> int:
        """Rows of a whole batch."""
        return (self.num_microbatches or NUM_MICROBATCHES) * self.microbatch_size


@dataclass(kw_only=True)
class JobConfig(Checked):
    """What bench.py and measure.py share. model and data are built from their `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    num_ranks: int = ranged(4, least=1)
    num_microbatches: int = ranged(12, least=1)
    microbatch_size: int = ranged(4, least=1)
    repeats: int = ranged(5, least=1)  # measured steps
    seed: int = ranged(0, most=_LARGEST_SEED)
    dtype: str = one_of(*DTYPES)
    device: str = one_of("auto", "cpu", "cuda")
    timeout: float = ranged(120.0, above=0, most=_LONGEST, unit="seconds")
    comm: float = ranged(
        0.0, unit="milliseconds"
    )  # that each message takes at least: EMULATED links, on gloo
    run_dir: str = MISSING
    overwrite: bool = False  # whether the files of an earlier run in run_dir may be replaced


@dataclass(kw_only=True)
class BenchConfig(JobConfig):
    """Everything scripts/bench.py needs: one model under several schedules, in one job."""

    schedules: list[str] = MISSING
    compare: str = one_of("torch", "none")  # beside torch.distributed.pipelining; none: zbpp alone
    # Of zb_auto and the tuned interleaved 1F1B, in activations of a rank.
    memory_limit: float | None = ranged(None, above=0)
    time_limit: float = ranged(10.0, unit="seconds")  # of each search for a plan

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedules:
            raise ConfigError("schedules=[]: write at least one, as [1f1b,zb_h1]")


@dataclass(kw_only=True)
class MeasureConfig(JobConfig):
    """Everything scripts/measure.py needs. schedule: whose cut of the model is measured."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(kw_only=True)
class ExplainConfig(Checked):
    """Everything scripts/explain.py needs. model and data are built from their `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    stage: int = ranged(0)
    num_stages: int = ranged(4, least=1)
    microbatch_size: int = ranged(4, least=1)
    seed: int = ranged(0, most=_LARGEST_SEED)
    dtype: str = one_of(*DTYPES)
    compile: str = one_of(*COMPILE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage >= self.num_stages:
            raise ConfigError(
                f"stage={self.stage} does not exist with num_stages={self.num_stages}: "
                f"write 0 to {self.num_stages - 1}"
            )


def register() -> None:
    """Tell Hydra the types of our configs: configs/train.yaml and its like build on them."""
    store = ConfigStore.instance()
    store.store(name="train_types", node=TrainConfig)
    store.store(name="bench_types", node=BenchConfig)
    store.store(name="measure_types", node=MeasureConfig)
    store.store(name="explain_types", node=ExplainConfig)
    OmegaConf.register_new_resolver("sweep_number", _sweep_number, replace=True)


def _sweep_number() -> str:
    """`-0`, `-1`, ... for the jobs of a sweep (-m), which share the time of their start; else nothing."""
    job = HydraConfig.get() if HydraConfig.initialized() else None
    return f"-{job.job.num}" if job is not None and job.mode is RunMode.MULTIRUN else ""


def entry(main: Callable[[DictConfig], None], name: str) -> Callable[[], None]:
    """`main` as Hydra calls it: with what the command line makes of configs/NAME.yaml."""
    register()
    called: Callable[[], None] = hydra.main(str(config_folder()), name, version_base="1.3")(main)
    return called


def typed(config: DictConfig) -> Any:
    """The composed config as the dataclass that it was composed from. Raises ConfigError."""
    try:
        _check_keys(config)
        return OmegaConf.to_object(config)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf wraps what __post_init__ raises in types of its own
        key, text = getattr(error, "full_key", None), str(error).partition("\n")[0]
        if isinstance(error, InterpolationKeyError):
            text += f": write it, or choose another {str(key).partition('.')[0]}="
        raise ConfigError(f"{key}: {text}" if key else text) from error


def _check_keys(config: DictConfig, prefix: str = "") -> None:
    """Refuse keys that no field is called: Hydra's `+step=2` adds one, and nobody would read it."""
    kind: Any = OmegaConf.get_type(config)
    if not is_dataclass(kind):
        return  # a model's or data's node: its class takes what it takes
    for name in map(str, config):
        if name not in (each.name for each in fields(kind)):
            raise ConfigError(f"{prefix}{name}: there is no such key{_nearest(name, kind)}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            _check_keys(config[name], f"{prefix}{name}.")


def _nearest(name: str, kind: Any) -> str:
    close = difflib.get_close_matches(name, [each.name for each in fields(kind)], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def composition_error(error: object) -> ConfigError | None:
    """What Hydra or OmegaConf says of a config, as an error of ours in one line; None for other errors."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    told = str(error).partition("Config search path")[0]
    if error.__cause__ is not None and str(error.__cause__) not in told:
        told += f"\n{error.__cause__}"
    unknown, hint = re.search(r"Key '(\w+)' not in '(\w+)'", told), ""
    if unknown and is_dataclass(kind := globals().get(unknown[2])):
        # Hydra would have it added by a +, where nobody would read it.
        told, hint = re.sub(r"To append to your config use \S+", "", told), _nearest(unknown[1], kind)
    lines = [line.strip() for line in told.splitlines()]
    # full_key and object_type: OmegaConf's own types, of no use to a user.
    said = [each for each in lines if each and not each.startswith(("full_key", "object_type"))]
    return ConfigError(" ".join(said) + hint)


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
        told = " ".join(str(cause).split())
        raise ConfigError(f"{what} ({node['_target_']}): {told}") from cause


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
