"""The configs of `zbpp bench`, `zbpp measure` and `zbpp explain`, and what they share with TrainConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from zbpp.config.tree.groups import LONGEST, ScheduleConfig
from zbpp.ranges import Checked, ConfigError, filled, one_of, ranged

PRECISIONS = ("float32", "bfloat16", "float64")
COMPILE = ("none", "stage", "layer")
_LARGEST_SEED = 2**63 - 1


@dataclass(kw_only=True)
class WorkConfig(Checked):
    """What every command computes with. model and data are config nodes with a `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    microbatch_size: int = ranged(4, least=1)  # rows
    seed: int = ranged(0, most=_LARGEST_SEED)
    precision: str = one_of(*PRECISIONS)


@dataclass(kw_only=True)
class RunConfig(WorkConfig):
    """The commands that write into a folder."""

    run_dir: str = filled(MISSING, "write a folder, such as runs/first")
    overwrite: bool = False  # true: the files of an earlier run in run_dir are replaced


@dataclass(kw_only=True)
class JobConfig(RunConfig):
    """What `zbpp bench` and `zbpp measure` share. repeats: measured steps."""

    num_ranks: int = ranged(4, least=1)
    num_microbatches: int = ranged(12, least=1)
    repeats: int = ranged(5, least=1)
    device: str = one_of("auto", "cpu", "cuda")
    timeout: float = ranged(120.0, above=0, most=LONGEST, unit="seconds")
    # The least time that each message takes: EMULATED links, on gloo only.
    comm: float = ranged(0.0, unit="milliseconds")


@dataclass(kw_only=True)
class BenchConfig(JobConfig):
    """`zbpp bench`: one model under several schedules and both runtimes, in one job."""

    schedules: list[str] = MISSING
    compare: str = one_of("torch", "none")  # torch.distributed.pipelining beside zbpp; none: zbpp alone
    # The memory limit of schedules that are planned for costs and of the tuned interleaved 1F1B, in
    # activations of a rank's share of the model; null: the most that any other schedule of the list holds.
    memory_limit: float | None = ranged(None, above=0)
    time_limit: float = ranged(10.0, unit="seconds")  # of each search for a plan

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedules:
            raise ConfigError("schedules=[]: write at least one, as [1f1b,zb_h1]")


@dataclass(kw_only=True)
class MeasureConfig(JobConfig):
    """`zbpp measure`. schedule: the one whose stages are measured."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(kw_only=True)
class ExplainConfig(WorkConfig):
    """`zbpp explain`. compile: as in TrainConfig."""

    stage: int = ranged(0)
    num_stages: int = ranged(4, least=1)
    compile: str = one_of(*COMPILE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage >= self.num_stages:
            raise ConfigError(
                f"stage={self.stage} does not exist with num_stages={self.num_stages}: "
                f"write 0 to {self.num_stages - 1}"
            )
