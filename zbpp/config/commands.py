"""The keys of `zbpp bench`, `measure` and `explain`, and those that they share with `zbpp train`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING, DictConfig

from zbpp.config.batching import refuse_tokens
from zbpp.ranges import Checked, ConfigError, described, filled, one_of, ranged
from zbpp.signatures import check_arguments

PRECISIONS = ("float32", "bfloat16", "float64")
DEVICES = ("auto", "cpu", "cuda", "xpu", "npu")  # npu: Ascend
COMPILE = ("none", "stage", "layer")
LONGEST = 1e7  # s, four months: torch's timeouts overflow somewhere above
_LARGEST_SEED = 2**63 - 1
_RUNS = "runs/${now:%Y-%m-%d}/${now:%H-%M-%S}${sweep_number:}"


def open_node() -> DictConfig:
    """A node that takes any key from the command line, without a + before it."""
    return DictConfig({}, flags={"struct": False})


@dataclass(kw_only=True)
class ScheduleConfig(Checked):
    """Which plan a run executes. The schedule decides on stages_per_rank and placement that are null."""

    prefix: ClassVar[str] = "schedule."
    name: str = MISSING
    timetable: str | None = described(None, "a file that `zbpp plan` wrote, instead of a name")
    costs: str | None = described(None, "a file that `zbpp measure` wrote: the times to plan for")
    stages_per_rank: int | None = ranged(None, least=1)
    placement: str | None = described(None, "one, looped or v")
    memory_limit: int | float | str | None = described(
        None, "of each rank, in activations; where the costs are in bytes, with a unit: 12GiB"
    )
    replan: str | None = described(None, "the schedule to go on with, planned for the first steps' times")
    slices: Any = field(
        default=None,
        metadata={"help": "cut sequences along time: into 8 slices of equal time, or at [0,4096,8192]"},
    )

    def __post_init__(self) -> None:
        given = self.slices
        if given is None or (type(given) is int and given >= 1):
            super().__post_init__()
            return
        bounds = [*given] if isinstance(given, Sequence) and not isinstance(given, str) else []
        if len(bounds) < 2 or any(type(each) is not int for each in bounds):
            raise ConfigError(
                f"schedule.slices={given}: write how many, as 8; or the tokens at which slices begin, from 0 "
                "on, and the length of a sequence, as [0,4096,7168,8192]"
            )
        if len(bounds) == 2 and bounds[0] == 0 < bounds[1]:
            raise ConfigError(f"schedule.slices={given} is one slice, which cuts nothing: leave it out")
        super().__post_init__()
        self.slices = bounds  # zbpp/run/plan.py checks that they ascend

    @property
    def num_slices(self) -> int:
        """Into how many slices `slices` cuts a sequence; 1 where it is null."""
        return len(self.slices) - 1 if isinstance(self.slices, list) else self.slices or 1

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `plan` that stand in the config, apart from the name and the costs."""
        names = ("stages_per_rank", "placement", "memory_limit")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class FinetuneConfig(Checked):
    """Which parameters are trained, by patterns of their names in the whole model; or LoRA."""

    prefix: ClassVar[str] = "finetune."
    freeze: list[str] = field(
        default_factory=list, metadata={"help": "parameters that are not trained, as [model.embed*]"}
    )
    train: list[str] = field(default_factory=list, metadata={"help": "the parameters that alone are trained"})
    lora: Any = field(
        default_factory=open_node,
        metadata={"help": "peft's LoraConfig, by its own keys: finetune.lora.r=8 ..."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapters is None:
            return
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("finetune.lora, but the package is not installed: pip install 'zbpp[peft]'")
        lora_config = importlib.import_module("peft").LoraConfig
        check_arguments("finetune.lora", lora_config, self.adapters, {"rank": "r"})
        if self.adapters.get("r") is None:
            raise ConfigError(
                "finetune.lora.r is not set: write the adapters' rank, such as finetune.lora.r=8"
            )
        if not self.adapters.get("target_modules"):
            raise ConfigError(
                "finetune.lora.target_modules is not set: write the names of the modules that get adapters, "
                "such as [q_proj,v_proj]"
            )
        if self.freeze or self.train:
            raise ConfigError(
                "finetune.lora trains its adapters alone, and freezes all else: leave finetune.freeze and "
                "finetune.train out"
            )

    @property
    def is_on(self) -> bool:
        """Whether a part of the model is frozen."""
        return bool(self.freeze or self.train or self.lora)

    @property
    def adapters(self) -> dict[str, Any] | None:
        """The arguments of peft's LoraConfig; None: no LoRA."""
        return dict(self.lora) if self.lora else None


@dataclass(kw_only=True)
class WorkConfig(Checked):
    """What every command computes with. model and data are config nodes with a `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    microbatch_size: int = ranged(4, least=1, help="rows")
    seed: int = ranged(0, most=_LARGEST_SEED)
    precision: str = one_of(*PRECISIONS)


@dataclass(kw_only=True)
class RunConfig(WorkConfig):
    """The commands that write into a folder."""

    run_dir: str = filled(_RUNS, "write a folder, such as runs/first", help="for all that is written")
    overwrite: bool = described(False, "replace the files of an earlier run in run_dir")


@dataclass(kw_only=True)
class JobConfig(RunConfig):
    """What `zbpp bench` and `zbpp measure` share."""

    num_ranks: int = ranged(4, least=1, help="-n 4 sets it")
    num_microbatches: int = ranged(12, least=1)
    repeats: int = ranged(5, least=1, help="measured steps")
    device: str = one_of(*DEVICES)
    timeout: float = ranged(120.0, above=0, most=LONGEST, unit="seconds", help="of a wait for a rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_tokens(self.data, "zbpp bench and zbpp measure")


@dataclass(kw_only=True)
class BenchConfig(JobConfig):
    """`zbpp bench`: one model under several schedules and both runtimes, in one job."""

    schedules: list[str] = field(
        default_factory=lambda: ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "zb_auto"]
    )
    compare: str = one_of("torch", "none", help="torch.distributed.pipelining beside zbpp; none: zbpp alone")
    memory_limit: float | None = ranged(
        None, above=0, help="of schedules planned for costs, in activations; null: as the others' most"
    )
    time_limit: float = ranged(10.0, unit="seconds", help="of each search for a plan")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedules:
            raise ConfigError("schedules=[]: write at least one, as [1f1b,zb_h1]")


@dataclass(kw_only=True)
class MeasureConfig(JobConfig):
    """`zbpp measure`. schedule: the one whose stages are measured."""

    num_microbatches: int = ranged(8, least=1)
    lengths: list[float] = field(
        default_factory=list,
        metadata={"help": "shares of a row, as [0.25,0.5]: costs then grow with a microbatch's length"},
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < each < 1 for each in self.lengths):
            raise ConfigError(
                f"lengths={self.lengths}: write shares of a row above 0 and below 1, as [0.25,0.5]; whole "
                "rows are measured anyway"
            )
        if self.schedule.slices is not None:
            raise ConfigError(
                f"schedule.slices={self.schedule.slices}: costs are those of whole sequences, from which "
                "zbpp train and zbpp plan compute those of slices; leave it out"
            )


@dataclass(kw_only=True)
class ExplainConfig(WorkConfig):
    """`zbpp explain`. compile: as in TrainConfig."""

    stage: int = ranged(0)
    num_stages: int = ranged(4, least=1)
    compile: str = one_of(*COMPILE, help="as in zbpp train: shows what is compiled, and why the rest is not")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_tokens(self.data, "zbpp explain")
        if self.stage >= self.num_stages:
            raise ConfigError(
                f"stage={self.stage} does not exist with num_stages={self.num_stages}: "
                f"write 0 to {self.num_stages - 1}"
            )
