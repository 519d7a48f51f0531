"""The typed config tree: a class per group of configs/ and one per command, each field with its range.

Wrong types and unknown keys fail while Hydra composes; ranges (zbpp/ranges.py) stand beside the fields.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import MISSING, DictConfig

from zbpp.ranges import Checked, ConfigError, filled, one_of, ranged

NUM_MICROBATCHES = 8  # where neither the config nor a plan's file says how many

_LONGEST = 1e7  # s, four months: torch's timeouts overflow somewhere above
_LARGEST_SEED = 2**63 - 1
_PRECISIONS = ("float32", "bfloat16", "float64")
_MIXED = ("mixed_bfloat16", "mixed_float16")
_COMPILE = ("none", "stage", "layer")


# ---------------------------------------------------------------- groups


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


def _open_node() -> Any:
    """A node that takes any key from the command line, without a + before it."""
    return DictConfig({}, flags={"struct": False})


@dataclass(kw_only=True)
class OptimizerConfig(Checked):
    """An optimizer, whose learning rate rises linearly in the warm-up, then follows lr_schedule.

    stable_adamw and lion are torch-optimi's; lion takes no eps. muon is torch's, with AdamW for what is no
    matrix of a hidden layer; momentum is Muon's. custom is what build names.

    build: `_target_`, an optimizer's class, and its own arguments, in place of those of this config.
    groups: other options for parameters by name, see zbpp/training/parameter_groups.py.
    lr_schedule: after the warm-up, down to min_ratio of the rate; wsd falls in the last decay_steps (null: a
        fifth of all steps).
    lr_scheduler: `_target_`, a class of torch.optim.lr_scheduler, and its arguments, in place of lr_schedule.
    """

    prefix: ClassVar[str] = "optimizer."
    name: str = one_of("adamw", "stable_adamw", "lion", "muon", "custom")
    build: Any = field(default_factory=_open_node)
    groups: list[dict[str, Any]] = field(default_factory=list)
    learning_rate: float = ranged(1e-3, above=0)
    beta1: float = ranged(0.9, below=1)
    beta2: float = ranged(0.95, below=1)
    eps: float = ranged(1e-8)
    weight_decay: float = ranged(0.1)
    momentum: float = ranged(0.95, below=1)
    lr_schedule: str = one_of("cosine", "linear", "constant", "wsd")
    lr_scheduler: Any = field(default_factory=_open_node)
    warmup_steps: int = ranged(10)
    decay_steps: int | None = ranged(None, least=1)
    min_ratio: float = ranged(0.1, most=1)
    # The largest norm that the gradients of all stages together may have; null: no clipping.
    clip_norm: float | None = ranged(1.0, above=0)
    kahan_sum: bool = False  # true: for precision=bfloat16, what rounding takes off an update is kept
    # after: ranks update before they know the norm, and take the update back if it had to be clipped.
    validation: str = one_of("before", "after")
    # With validation=after: it begins after so many steps in a row that were not clipped. 0: always.
    validation_after: int = ranged(10)
    rollback: str = one_of("exact", "inverse")  # how an update is taken back: by a copy, or computed

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("build", "lr_scheduler"):
            _check_node(name, getattr(self, name))
        if self.kahan_sum:
            _need_optimi("optimizer.kahan_sum=true")
        if self.name in ("stable_adamw", "lion"):
            _need_optimi(f"optimizer.name={self.name}")
        self._check_custom()
        self._check_schedule()

    def _check_custom(self) -> None:
        target = (self.build or {}).get("_target_")
        if self.name != "custom":
            if self.build:
                raise ConfigError(f"optimizer.build is for optimizer=custom, but optimizer.name={self.name}")
            if self.momentum != 0.95 and self.name != "muon":
                raise ConfigError(f"optimizer.momentum={self.momentum} is Muon's: write optimizer=muon")
            return
        if not isinstance(target, str):
            raise ConfigError(
                "optimizer=custom needs a class: write optimizer.build._target_=torch.optim.SGD "
                "optimizer.build.lr=0.1"
            )
        if target.partition(".")[0] == "optimi":
            _need_optimi(f"optimizer.build._target_={target}")
        theirs = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas"}
        for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "momentum", "kahan_sum"):
            if getattr(self, name) != _default_of(OptimizerConfig, name):
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} is not passed on to {target}: write its own "
                    f"argument, as optimizer.build.{theirs.get(name, name)}=..."
                )

    def _check_schedule(self) -> None:
        if self.lr_scheduler and not isinstance(self.lr_scheduler.get("_target_"), str):
            raise ConfigError(
                "optimizer.lr_scheduler needs a class: write "
                "optimizer.lr_scheduler._target_=torch.optim.lr_scheduler.StepLR"
            )
        if self.lr_scheduler and self.lr_schedule != "cosine":
            raise ConfigError(
                f"optimizer.lr_schedule={self.lr_schedule} and optimizer.lr_scheduler are both given: leave "
                "one out"
            )
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            raise ConfigError(
                f"optimizer.decay_steps={self.decay_steps} is for optimizer.lr_schedule=wsd, but "
                f"lr_schedule={self.lr_schedule}"
            )


def _check_node(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"optimizer.{name}={value}: write optimizer.{name}._target_=..., a class")


def _default_of(kind: Any, name: str) -> Any:
    return next(each.default for each in fields(kind) if each.name == name)


def _need_optimi(setting: str) -> None:
    if importlib.util.find_spec("optimi") is None:
        raise ConfigError(f"{setting}, but the package is not installed: pip install 'zbpp[optimi]'")


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
    reshard: str = one_of("step", "microbatch", "never")
    device: str = one_of("auto", "cpu", "cuda")
    # The longest time that a rank waits for another one.
    timeout: float = ranged(600.0, above=0, most=_LONGEST, unit="seconds")
    dynamic_shapes: bool = False  # true: microbatches may differ in shape; every message has more latency


@dataclass(kw_only=True)
class MemoryConfig(Checked):
    """How much a rank holds between F, B and W.

    recompute: the forward that B runs again: "none"; "block": that of each block; "stage": that of the whole
        stage; "auto": that of the blocks of some stages, chosen so that each rank stays within `limit` and
        the step is the shortest.
    budget: the share of the activations that compiled stages keep between F and B.
    limit: GiB that each rank's device may hold, including weights, gradients and optimizer states.
        `zbpp memory` compares its prediction with it; replanning stays within it (see schedule.replan; null:
        within what the first plan needs).
    offload: which activations leave device memory between F and B, and between B and W: "none"; "auto": those
        whose copies make no action late; a number: up to so many GiB of each rank.
    offload_weights: whether weights, their gradients and the optimizer's states live in host memory.
    weights_budget: GiB of each rank's device for offloaded weights and their gradients: the more, the fewer
        copies; null: the least, three times the largest block.
    offload_to: the place of offloaded activations, or of offloaded weights and gradients: "host", or a folder
        for files.
    gradient_release: when weights are updated and their gradients dropped. "off": after the step; "step":
        behind each stage's last W; "accumulate": each microbatch's gradients go into the optimizer's states,
        and the last microbatch's also update the weights.
    """

    prefix: ClassVar[str] = "memory."
    recompute: str = one_of("none", "block", "stage", "auto")
    budget: float = ranged(1.0, most=1)
    limit: float | None = ranged(None, above=0, unit="GiB")
    report: bool = False  # true: the last step's memory, measured beside predicted, in memory.json and .png
    offload: int | float | str = "none"
    offload_to: str = filled("host", "write host, or a folder")
    offload_weights: bool = False
    weights_budget: float | None = ranged(None, above=0, unit="GiB")
    gradient_release: str = one_of("off", "step", "accumulate")

    def __post_init__(self) -> None:
        if self.gradient_release == "False":  # YAML reads an off without quotes as false
            self.gradient_release = "off"
        super().__post_init__()
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
        if self.weights_budget is not None and not self.offload_weights:
            raise ConfigError(
                f"memory.weights_budget={self.weights_budget} is for offloaded weights: write "
                "memory.offload_weights=true, too"
            )
        if self.offload != "none" and self.offload_weights:
            raise ConfigError(
                f"memory.offload={self.offload} doesn't go with memory.offload_weights=true, since both pack "
                "saved tensors: write memory.offload=none, and memory.recompute=block to hold less"
            )


@dataclass(kw_only=True)
class LoraConfig(Checked):
    """Options of peft's LoraConfig, by peft's names. r: null: no LoRA."""

    prefix: ClassVar[str] = "finetune.lora."
    r: int | None = ranged(None, least=1)
    lora_alpha: float = ranged(8, above=0)
    lora_dropout: float = ranged(0.0, below=1)
    target_modules: Any = None  # names of modules, or a regular expression for whole names
    exclude_modules: Any = None
    layers_to_transform: list[int] | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    init_lora_weights: Any = True
    task_type: str | None = None  # for the adapter's config: CAUSAL_LM, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is None:
            return
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("finetune.lora, but the package is not installed: pip install 'zbpp[peft]'")
        if not self.target_modules:
            raise ConfigError(
                "finetune.lora.target_modules is not set: write the names of the modules that get adapters, "
                "such as [q_proj,v_proj]"
            )

    @property
    def options(self) -> dict[str, Any] | None:
        """The arguments of peft's LoraConfig; None: no LoRA."""
        if self.r is None:
            return None
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


@dataclass(kw_only=True)
class FinetuneConfig(Checked):
    """Which parameters are trained, by patterns of their names in the whole model; or LoRA.

    freeze: those that match are not trained. train: only those that match are.
    """

    prefix: ClassVar[str] = "finetune."
    freeze: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.r is not None and (self.freeze or self.train):
            raise ConfigError(
                "finetune.lora trains its adapters alone, and freezes all else: leave finetune.freeze and "
                "finetune.train out"
            )


@dataclass(kw_only=True)
class CheckpointConfig(Checked):
    """When a run is saved into run_dir/checkpoints, beside the end of a run that is left early.

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


# ---------------------------------------------------------------- commands


@dataclass(kw_only=True)
class _WorkConfig(Checked):
    """What every command computes with. model and data are config nodes with a `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    microbatch_size: int = ranged(4, least=1)  # rows
    seed: int = ranged(0, most=_LARGEST_SEED)
    precision: str = one_of(*_PRECISIONS)


@dataclass(kw_only=True)
class _RunConfig(_WorkConfig):
    """The commands that write into a folder."""

    run_dir: str = filled(MISSING, "write a folder, such as runs/first")
    overwrite: bool = False  # true: the files of an earlier run in run_dir are replaced


@dataclass(kw_only=True)
class TrainConfig(_RunConfig):
    """`zbpp train`. The batch has num_microbatches * microbatch_size rows."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # auto: go on from the newest whole checkpoint of run_dir, if it has one; none; or a path.
    resume: str = filled("auto", "write auto, none, or a folder with checkpoints")
    stop_after: int | None = ranged(None, least=1)  # steps of this start; the run is saved and left then
    precision: str = one_of("float32", *_MIXED, *_PRECISIONS[1:])  # mixed: with float32 master weights
    steps: int = ranged(100, least=1)
    num_microbatches: int | None = ranged(None, least=1)  # null: as many as schedule.timetable has, or 8
    compile: str = one_of(*_COMPILE)  # F, B, W of: no stage, each stage as a whole, each layer
    evaluate_every: int = ranged(50)  # steps; 0: never
    evaluation_batches: int = ranged(2, least=1)
    print_every: int = ranged(10, least=1)  # steps, where no progress bar can be drawn
    read_ahead: int = ranged(0)  # batches that a thread reads and moves to the device early; 0: none
    save_weights: bool = True  # at the end, a file per stage
    # One step of so many is measured action by action, for the bubble shown; 0: the last steps only.
    measure_every: int = ranged(100)
    max_hours: float | None = ranged(None, above=0, unit="hours")  # the run leaves before they are over
    profile: str | None = None  # START:STOP, the steps that torch.profiler records, STOP excluded
    profile_ranks: list[int] | None = None  # null: all

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_early_stop()
        if self.profile is not None:
            self.profiled_steps  # noqa: B018  # refuses what is no START:STOP
        if self.optimizer.kahan_sum and self.precision != "bfloat16":
            raise ConfigError(
                f"optimizer.kahan_sum=true is for weights in bfloat16, but precision={self.precision}: write "
                "precision=bfloat16, or optimizer.kahan_sum=false"
            )
        if self.memory.gradient_release != "off":
            self._check_gradient_release()
        if self.optimizer.validation == "after" and self.optimizer.rollback == "inverse":
            self._check_inverse()
        least = 4 if self.memory.offload != "none" else 3
        least = 9 if self.schedule.replan is not None else least
        if self.memory.report and self.steps < least:
            raise ConfigError(
                "memory.report=true measures the last step, when optimizer states and receive buffers are "
                f"there: write steps={least} or more"
            )
        budget, recompute = self.memory.budget, self.memory.recompute
        if self.compile == "none" and budget != 1:
            raise ConfigError(
                f"memory.budget={budget} works with compile=stage or layer only: leave it at 1, or write "
                "memory.recompute=block to hold less"
            )
        if self.compile != "none" and self.parallel.shard > 1:
            raise ConfigError(
                f"parallel.shard={self.parallel.shard} doesn't go with compile={self.compile}: FSDP2's hooks "
                "would leave the stages eager; write compile=none, or parallel.replicate instead of shard"
            )
        if recompute == "stage" and self.parallel.shard > 1:
            raise ConfigError(
                "memory.recompute=stage doesn't go with parallel.shard: weights are gathered between F and "
                "the recompute; write memory.recompute=block"
            )
        if self.compile != "none" and recompute != "none":
            raise ConfigError(
                f"memory.recompute={recompute} doesn't go with compile={self.compile}: write "
                "memory.recompute=none, and a memory.budget below 1 to hold less"
            )
        if self.memory.offload_weights:
            self._check_offloaded_weights()
        if self.finetune.lora.r is not None and self.parallel.tensor > 1:
            raise ConfigError(
                f"finetune.lora doesn't go with parallel.tensor={self.parallel.tensor}, whose plan splits "
                "the modules that LoRA wraps: write parallel.tensor=1, with more pipeline ranks or shards"
            )

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

    def _check_early_stop(self) -> None:
        """Refuse a metric that no evaluation would give."""
        metric = self.early_stop.metric
        if metric is None:
            return
        if not metric.startswith("evaluation_"):
            raise ConfigError(
                f"early_stop.metric={metric}: write a metric of evaluations, such as evaluation_loss"
            )
        if not self.evaluate_every:
            raise ConfigError(
                f"early_stop.metric={metric} with evaluate_every=0: nothing is evaluated; write "
                "evaluate_every=50, or early_stop.metric=null"
            )

    def _check_offloaded_weights(self) -> None:
        """Raise ConfigError for what doesn't go with memory.offload_weights."""
        if self.compile != "none":
            given, remedy = f"compile={self.compile}", "write compile=none"
        elif self.precision in _MIXED:
            given, remedy = f"precision={self.precision}", "write precision=float32 or bfloat16"
        elif max(self.parallel.replicate, self.parallel.shard, self.parallel.tensor) > 1:
            given, remedy = "parallel.replicate, shard or tensor", "leave them at 1, with more pipeline ranks"
        elif self.optimizer.validation == "after":
            given, remedy = "optimizer.validation=after", "write validation=before"
        elif self.memory.gradient_release != "off":
            given = f"memory.gradient_release={self.memory.gradient_release}"
            remedy = "write gradient_release=off"
        else:
            return
        raise ConfigError(f"memory.offload_weights=true doesn't go with {given}: {remedy}")

    def _check_gradient_release(self) -> None:
        """Refuse what needs all gradients of a step at a time."""
        release, parallel = self.memory.gradient_release, self.parallel
        setting = f"memory.gradient_release={release}"
        if self.optimizer.clip_norm is not None:
            raise ConfigError(
                f"{setting} updates weights before the norm of all gradients is known, and clipping by "
                f"optimizer.clip_norm={self.optimizer.clip_norm:g} needs it: write optimizer.clip_norm=null, "
                "with optimizer=stable_adamw, which limits each update by itself"
            )
        if self.optimizer.validation == "after":
            raise ConfigError(
                f"{setting} drops the gradients that optimizer.validation=after may need again: leave one out"
            )
        if self.precision == "mixed_float16" or (self.precision in _MIXED and parallel.shard == 1):
            raise ConfigError(
                f"{setting} doesn't go with precision={self.precision}, whose float32 gradients stay: write "
                "precision=bfloat16 with optimizer.kahan_sum=true"
            )
        if release != "accumulate":
            return
        _need_optimi(setting)
        if parallel.replicate * parallel.shard > 1:
            raise ConfigError(
                f"{setting} with parallel.replicate={parallel.replicate}, parallel.shard={parallel.shard}: "
                "gradients would have to be reduced in each microbatch; write memory.gradient_release=step"
            )

    def _check_inverse(self) -> None:
        """What can't be computed backwards."""
        if self.precision == "mixed_float16":
            raise ConfigError(
                "optimizer.rollback=inverse needs gradients without a loss scale, which precision="
                "mixed_float16 divides out of them: write optimizer.rollback=exact"
            )
        if self.optimizer.kahan_sum:
            raise ConfigError(
                "optimizer.rollback=inverse is for torch's AdamW, and optimizer.kahan_sum=true takes another "
                "one: write optimizer.rollback=exact"
            )

    @property
    def counts_without_offload(self) -> str:
        """What `memory.recompute=auto` leaves out of its choice, or nothing."""
        is_left_out = self.memory.recompute == "auto" and self.memory.offload != "none"
        return "chosen as if memory.offload saved nothing" if is_left_out else ""

    @property
    def not_predicted(self) -> list[str]:
        """The switches that are on and whose change of memory `zbpp memory` does not know, as `key=value`."""
        return [] if self.compile == "none" else [f"compile={self.compile}"]

    @property
    def batch_size(self) -> int:
        """Rows of a whole batch."""
        return (self.num_microbatches or NUM_MICROBATCHES) * self.microbatch_size


@dataclass(kw_only=True)
class JobConfig(_RunConfig):
    """What `zbpp bench` and `zbpp measure` share. repeats: measured steps."""

    num_ranks: int = ranged(4, least=1)
    num_microbatches: int = ranged(12, least=1)
    repeats: int = ranged(5, least=1)
    device: str = one_of("auto", "cpu", "cuda")
    timeout: float = ranged(120.0, above=0, most=_LONGEST, unit="seconds")
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
class ExplainConfig(_WorkConfig):
    """`zbpp explain`. compile: as in TrainConfig."""

    stage: int = ranged(0)
    num_stages: int = ranged(4, least=1)
    compile: str = one_of(*_COMPILE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage >= self.num_stages:
            raise ConfigError(
                f"stage={self.stage} does not exist with num_stages={self.num_stages}: "
                f"write 0 to {self.num_stages - 1}"
            )
