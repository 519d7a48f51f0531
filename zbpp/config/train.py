"""The keys of `zbpp train`: each with its type, its range and its line of help; and which go together.

A node of type Any passes its keys on: to the class that `_target_` names, or to peft's LoraConfig.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from zbpp.config.batching import BatchingConfig, batching_of
from zbpp.config.commands import (
    COMPILE,
    DEVICES,
    LONGEST,
    PRECISIONS,
    FinetuneConfig,
    RunConfig,
    ScheduleConfig,
    open_node,
)
from zbpp.ranges import Checked, ConfigError, described, filled, one_of, ranged

NUM_MICROBATCHES = 8  # where neither the config nor a plan's file says how many
_MIXED = ("mixed_bfloat16", "mixed_float16")


@dataclass(kw_only=True)
class OptimizerConfig(Checked):
    """An optimizer, whose learning rate rises linearly in the warm-up, then follows lr_schedule."""

    prefix: ClassVar[str] = "optimizer."
    name: str = one_of(
        "adamw", "muon", "custom", help="set by optimizer=CHOICE; custom: the one that build names"
    )
    build: Any = field(
        default_factory=open_node,
        metadata={"help": "of optimizer=custom: _target_, a class, and its own arguments"},
    )
    per_parameter: bool = described(False, "build updates each parameter from its own gradient alone")
    groups: list[dict[str, Any]] = field(
        default_factory=list, metadata={"help": "other options for parameters by name, see docs/optimizer.md"}
    )
    learning_rate: float = ranged(1e-3, above=0, help="after the warm-up")
    beta1: float = ranged(0.9, below=1)
    beta2: float = ranged(0.95, below=1)
    eps: float = ranged(1e-8)
    weight_decay: float = ranged(0.1)
    lr_schedule: str = one_of(
        "cosine", "linear", "constant", "wsd", help="wsd falls in the last fifth of the steps"
    )
    lr_scheduler: Any = field(
        default_factory=open_node, metadata={"help": "instead: _target_ and arguments of one of torch's"}
    )
    warmup_steps: int = ranged(10)
    min_ratio: float = ranged(0.1, most=1, help="of the learning rate, at the end")
    clip_norm: float | None = ranged(1.0, above=0, help="of the gradients of all stages; null: no clipping")
    validation: str = one_of(
        "before",
        "after",
        help="after: steps don't wait for the norm, and updates are redone if need be",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("build", "lr_scheduler"):
            node = getattr(self, name)
            if node and not (isinstance(node, Mapping) and isinstance(node.get("_target_"), str)):
                raise ConfigError(f"optimizer.{name} needs a class: write optimizer.{name}._target_=...")
        target = (self.build or {}).get("_target_")
        if (self.name == "custom") != bool(target):
            raise ConfigError(
                "optimizer=custom and optimizer.build go together: write optimizer=custom "
                "optimizer.build._target_=torch.optim.SGD optimizer.build.lr=0.1"
            )
        for each in fields(self):
            is_ours = each.name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
            if self.name == "custom" and is_ours and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"optimizer.{each.name} is not passed on to {target}: write its own argument, as "
                    "optimizer.build.lr=0.1"
                )
        if str(target).startswith("optimi.") and importlib.util.find_spec("optimi") is None:
            raise ConfigError(
                f"optimizer.build._target_={target}, but the package is not installed: pip install "
                "'zbpp[optimi]'"
            )
        if self.lr_scheduler and self.lr_schedule != "cosine":
            raise ConfigError(
                f"optimizer.lr_schedule={self.lr_schedule} and optimizer.lr_scheduler are both given: leave "
                "one out"
            )


@dataclass(kw_only=True)
class ParallelConfig(Checked):
    """The pipeline gets num_processes / (replicate x shard x context x tensor) ranks."""

    prefix: ClassVar[str] = "parallel."
    num_processes: int | None = ranged(
        None, least=1, help="-n 4 sets it; null: one, or as many as torchrun starts"
    )
    speeds: Any = field(
        default=None,
        metadata={
            "help": "of a pipeline's ranks, as [1,1,2,2], for model.layers_per_stage=auto; null: measured"
        },
    )
    replicate: int = ranged(1, least=1, help="copies of each stage, which see different data")
    shard: int = ranged(1, least=1, help="copies with other data and a part of the weights each (FSDP2)")
    context: int = ranged(1, least=1, help="processes that share a sequence; attention exchanges rows")
    tensor: int = ranged(1, least=1, help="parts of each layer")
    expert: int = ranged(1, least=1, help="processes that share a layer's experts; divides replicate x shard")
    overlap_exchange: bool = described(False, "pending W's run while experts exchange rows")
    reshard: str = one_of("step", "microbatch", help="when shards free gathered weights: after each")
    device: str = one_of(*DEVICES, help="auto: the accelerator if there is one, else cpu")
    timeout: float = ranged(600.0, above=0, most=LONGEST, unit="seconds", help="of a wait for a rank")
    dynamic_shapes: bool = described(False, "microbatches may differ in shape; messages take longer")
    messages_ahead: int | None = ranged(
        None, least=0, help="more under way on each link than planned; null: by the links in schedule.costs"
    )
    messages: str = one_of(
        "exact", "bfloat16", "8bit", help="between stages; all but exact are approximations, for slow links"
    )
    message_boundaries: list[int] | None = field(
        default=None, metadata={"help": "[1]: of them only those between stages 1 and 2; null: all"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.messages == "exact" and self.message_boundaries is not None:
            raise ConfigError(
                f"parallel.message_boundaries={self.message_boundaries} with parallel.messages=exact: write "
                "parallel.messages=8bit, or leave the boundaries out"
            )
        if self.speeds is not None and (numbers := _positive_numbers(self.speeds)) is None:
            raise ConfigError(
                f"parallel.speeds={self.speeds}: write a number above 0 for each rank of a pipeline, such as "
                "[1,1,2,2], or null"
            )
        self.speeds = None if self.speeds is None else numbers

    @property
    def num_shards(self) -> int:
        """Over how many processes FSDP2 splits a weight: those that share sequences have other parts, too."""
        return self.shard * self.context if self.shard > 1 else 1


@dataclass(kw_only=True)
class MemoryConfig(Checked):
    """How much a rank holds between F, B and W."""

    prefix: ClassVar[str] = "memory."
    recompute: str = one_of(
        "none",
        "block",
        "stage",
        "auto",
        help="what B runs forward again; auto: as memory.limit asks",
    )
    budget: float = ranged(1.0, most=1, help="with compile: the share of its activations that F keeps for B")
    limit: Any = field(
        default=None,
        metadata={"help": "GiB of each rank's device, or [12,24]: for what is auto, and `zbpp memory`"},
    )
    offload: int | float | str = described(
        "none",
        "activations to host memory, by schedule.costs: auto (where it is free), or GiB",
    )
    offload_weights: bool = described(False, "weights, gradients and optimizer states live in host memory")
    head_at_once: bool = described(False, "W of a language model's head runs at the end of its B")
    gradient_release: str = one_of(
        "off",
        "step",
        "accumulate",
        help="update each stage behind its last W; or use each microbatch's gradients",
    )

    def __post_init__(self) -> None:
        if self.gradient_release == "False":  # YAML reads an off without quotes as false
            self.gradient_release = "off"
        super().__post_init__()
        numbers = None if self.limit is None else _positive_numbers(self.limit, may_be_one=True)
        if self.limit is not None and numbers is None:
            raise ConfigError(
                f"memory.limit={self.limit}: write the GiB of each rank's device, above 0, such as 24; or a "
                "number for each rank of a pipeline, such as [12,24]; or null"
            )
        if self.recompute == "auto" and self.limit is None:
            raise ConfigError(
                "memory.recompute=auto stays within memory.limit, and there is none: write memory.limit=16 "
                "(GiB of each rank's device), or memory.recompute=block"
            )
        is_number = isinstance(self.offload, int | float) and not isinstance(self.offload, bool)
        if self.offload not in ("none", "auto") and not (is_number and float(self.offload) > 0):
            raise ConfigError(
                f"memory.offload={self.offload}: write none, auto, or how many GiB of each rank may be away, "
                "above 0"
            )

    def limits(self, num_ranks: int) -> list[float] | None:
        """The bytes of each rank of a pipeline; None: no limit. Raises ConfigError for a wrong length."""
        if self.limit is None:
            return None
        given = list(self.limit) if isinstance(self.limit, Sequence) else [self.limit] * num_ranks
        if len(given) != num_ranks:
            raise ConfigError(
                f"memory.limit={self.limit} has {len(given)} numbers for {num_ranks} ranks of a pipeline: "
                "write one for each, or one number for all"
            )
        return [each * 2.0**30 for each in given]


def _positive_numbers(given: Any, *, may_be_one: bool = False) -> list[float] | None:
    """A list of numbers above 0, as a list; None for anything else. may_be_one: a number will do, too."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    numbers = [*given] if is_list else [given] * may_be_one
    are_numbers = all(isinstance(each, int | float) and type(each) is not bool for each in numbers)
    are_positive = are_numbers and all(0 < each < math.inf for each in numbers)
    return numbers if numbers and are_positive else None


@dataclass(kw_only=True)
class LoggerConfig(Checked):
    """Where metrics go beside metrics.jsonl, which every run has."""

    prefix: ClassVar[str] = "logger."
    wandb: bool = described(False, "WANDB_PROJECT, WANDB_MODE and wandb's other variables hold")
    tensorboard: bool = described(False, "tensorboard --logdir runs")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wandb", "tensorboard"):
            if getattr(self, name) and importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"logger={name}, but the package is not installed: pip install 'zbpp[{name}]'"
                )


@dataclass(kw_only=True)
class CheckpointConfig(Checked):
    """When a run is saved into run_dir/checkpoints. A run that is left early is saved in any case."""

    prefix: ClassVar[str] = "checkpoint."
    every: int = ranged(1000, help="steps, and at the end; 0: only if the run is left early")
    keep: int = ranged(2, least=1, help="the newest ones")
    background: bool = described(True, "training goes on while a copy of its state is written")


@dataclass(kw_only=True)
class TrainConfig(RunConfig):
    """`zbpp train`. The batch has num_microbatches * microbatch_size rows."""

    steps: int = ranged(100, least=1)
    num_microbatches: int | None = ranged(None, least=1, help="null: as many as schedule.timetable has, or 8")
    precision: str = one_of("float32", *_MIXED, *PRECISIONS[1:], help="mixed: with float32 master weights")
    compile: str = one_of(*COMPILE, help="the F, B and W of each stage, or of each layer, as compiled graphs")
    cuda_graphs: bool = described(False, "on GPUs: each F, B and W is captured once and replayed")
    evaluate_every: int = ranged(50, help="steps; 0: never")
    evaluation_batches: int = ranged(2, least=1)
    print_every: int = ranged(10, least=1, help="steps, where no progress bar can be drawn")
    measure_every: int = ranged(100, help="steps, one of which is measured by action; 0: the last ones")
    non_finite: str = one_of(
        "skip", "stop", "continue", help="what happens to a step whose loss or gradients are NaN or infinite"
    )
    save_weights: bool = described(True, "at the end, a file per stage")
    resume: str = filled(
        "auto",
        "write auto, none, or a folder with checkpoints",
        help="auto: from the newest whole checkpoint of run_dir; none; or a folder with checkpoints",
    )
    resume_optimizer: bool = described(True, "false: fresh optimizer states, say for another optimizer")
    stop_after: int | None = ranged(None, least=1, help="leave after so many steps, as a signal would")
    profile: str | None = described(None, "3:5: torch.profiler on steps 3 and 4, in profile/rank-N.json")
    callbacks: list[Any] = field(
        default_factory=list, metadata={"help": "yours: '[{_target_: my_file.MyCallback, every: 5}]'"}
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batching  # noqa: B018  # refuses values out of range
        if self.profile is not None:
            self.profiled_steps  # noqa: B018  # refuses what is no START:STOP

    @property
    def asks_for_cut(self) -> bool:
        """Whether the cut is still to be chosen."""
        return bool(self.model.get("layers_per_stage") == "auto")

    @property
    def batching(self) -> BatchingConfig:
        """How sequences become batches. Raises ConfigError."""
        return batching_of(self.data)

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`, counted from 1 as in metrics.jsonl. Raises ConfigError."""
        start, colon, stop = (self.profile or "").partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal() and 1 <= int(start) < int(stop)):
            raise ConfigError(f"profile={self.profile}: write START:STOP, such as 3:5 for the steps 3 and 4")
        if int(start) > self.steps:
            raise ConfigError(
                f"profile={self.profile} begins after the last step: write steps={start} or more"
            )
        return range(int(start), int(stop))

    @property
    def counts_without_offload(self) -> str:
        """A note on what `memory.recompute=auto` leaves out of its choice; "" if it leaves nothing out."""
        is_left_out = self.memory.recompute == "auto" and self.memory.offload != "none"
        return "chosen as if memory.offload saved nothing" if is_left_out else ""

    @property
    def not_predicted(self) -> list[str]:
        """The switches that are on and whose change of memory `zbpp memory` does not know, as `key=value`."""
        compiled = [] if self.compile == "none" else [f"compile={self.compile}"]
        return compiled + ["cuda_graphs=true"] * self.cuda_graphs

    @property
    def batch_size(self) -> int:
        """Rows of a whole batch."""
        return (self.num_microbatches or NUM_MICROBATCHES) * self.microbatch_size
