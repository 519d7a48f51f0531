"""The configs of the smaller groups: schedule, parallel, checkpoint, logger, early_stop and sample."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from zbpp.ranges import Checked, ConfigError, filled, one_of, ranged

LONGEST = 1e7  # s, four months: torch's timeouts overflow somewhere above


@dataclass(kw_only=True)
class ScheduleConfig(Checked):
    """Which plan a run executes. The schedule decides on stages_per_rank and placement that are null."""

    prefix: ClassVar[str] = "schedule."
    name: str = MISSING
    timetable: str | None = None  # a file that `zbpp plan` wrote: the plan itself, instead of the name
    costs: str | None = None  # a file that `zbpp measure` wrote, for schedules that are planned for costs
    stages_per_rank: int | None = ranged(None, least=1)
    placement: str | None = None  # one, looped or v
    # What each rank may hold, in activations; where the costs are in bytes, with a unit: 12GiB
    memory_limit: int | float | str | None = None
    # The schedule to continue with after the first steps, planned for the costs that they had.
    replan: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `plan` that stand in the config, apart from the name and the costs."""
        names = ("stages_per_rank", "placement", "memory_limit")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class ParallelConfig(Checked):
    """num_processes: how many `zbpp train` starts; under torchrun null, or as many as torchrun starts.

    replicate, shard, tensor: the degrees of the mesh beside the pipeline, whose number of ranks is
    num_processes / (replicate x shard x tensor).
    """

    prefix: ClassVar[str] = "parallel."
    num_processes: int | None = ranged(None, least=1)
    replicate: int = ranged(1, least=1)  # copies of each stage, on different data
    shard: int = ranged(1, least=1)  # copies on different data that hold a part of the weights each (FSDP2)
    tensor: int = ranged(1, least=1)  # parts of each layer, on the same data
    # When shards free the gathered weights: after each step, after each microbatch's F and B, or never.
    reshard: str = one_of("step", "microbatch")
    device: str = one_of("auto", "cpu", "cuda")
    # The longest time that a rank waits for another one.
    timeout: float = ranged(600.0, above=0, most=LONGEST, unit="seconds")
    # Whether a job that is started again may have another number of ranks: degrees and microbatches adapt.
    elastic: bool = False
    dynamic_shapes: bool = False  # true: microbatches may differ in shape; every message has more latency


@dataclass(kw_only=True)
class CheckpointConfig(Checked):
    """When a run is saved into run_dir/checkpoints. A run that is left early is saved in any case.

    background: training goes on while a checkpoint is written; its state is copied to host memory first.
    """

    prefix: ClassVar[str] = "checkpoint."
    every: int = ranged(1000)  # steps; 0: only if the run is left early
    keep: int = ranged(2, least=1)  # the newest ones
    background: bool = True


@dataclass(kw_only=True)
class LoggerConfig(Checked):
    """Where metrics go beside metrics.jsonl, which every run has. project and mode are wandb's."""

    prefix: ClassVar[str] = "logger."
    wandb: bool = False
    tensorboard: bool = False
    project: str = "zbpp"
    mode: str = one_of("online", "offline", "disabled")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wandb", "tensorboard"):
            if getattr(self, name) and importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"logger={name}, but the package is not installed: pip install 'zbpp[{name}]'"
                )


@dataclass(kw_only=True)
class EarlyStopConfig(Checked):
    """When a run ends because it improves no more. metric: such as evaluation_loss; null: never.

    patience: how many evaluations in a row without a better value. min_delta: how much better it must be.
    """

    prefix: ClassVar[str] = "early_stop."
    metric: str | None = None
    patience: int = ranged(3, least=1)
    min_delta: float = ranged(0.0)
    mode: str = one_of("min", "max")


@dataclass(kw_only=True)
class SampleConfig(Checked):
    """Text from the model every so many steps; every=0: none. temperature=0: always the likeliest token.

    tokenizer: a tokenizer.json; null: the data's, else bytes.
    """

    prefix: ClassVar[str] = "sample."
    every: int = ranged(0)
    prompt: str = filled("The ", "write a text, such as sample.prompt='The '")
    max_tokens: int = ranged(64, least=1)
    temperature: float = ranged(0.0)
    tokenizer: str | None = None
