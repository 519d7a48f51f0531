"""The config of `zbpp train`: the groups together, and which of their switches go with each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zbpp.config.tree.commands import COMPILE, PRECISIONS, RunConfig
from zbpp.config.tree.finetune import FinetuneConfig
from zbpp.config.tree.groups import (
    CheckpointConfig,
    EarlyStopConfig,
    LoggerConfig,
    ParallelConfig,
    SampleConfig,
    ScheduleConfig,
)
from zbpp.config.tree.memory import MemoryConfig
from zbpp.config.tree.optimizer import OptimizerConfig, need_optimi
from zbpp.ranges import ConfigError, filled, one_of, ranged

NUM_MICROBATCHES = 8  # where neither the config nor a plan's file says how many

_MIXED = ("mixed_bfloat16", "mixed_float16")


@dataclass(kw_only=True)
class TrainConfig(RunConfig):
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
    precision: str = one_of("float32", *_MIXED, *PRECISIONS[1:])  # mixed: with float32 master weights
    steps: int = ranged(100, least=1)
    num_microbatches: int | None = ranged(None, least=1)  # null: as many as schedule.timetable has, or 8
    compile: str = one_of(*COMPILE)  # F, B, W of: no stage, each stage as a whole, each layer
    cuda_graphs: bool = False  # on GPUs: each F, B and W is captured once and replayed
    evaluate_every: int = ranged(50)  # steps; 0: never
    evaluation_batches: int = ranged(2, least=1)
    check_replicas_every: int = ranged(0)  # steps; 0: copies of weights and optimizer states aren't compared
    # A step whose loss or gradients are NaN or infinite: no update; the run stops; an update all the same.
    non_finite: str = one_of("skip", "stop", "continue")
    max_skipped: int = ranged(10, least=1)  # steps in a row that non_finite=skip skips before the run stops
    print_every: int = ranged(10, least=1)  # steps, where no progress bar can be drawn
    read_ahead: int = ranged(0)  # batches that a thread reads and moves to the device early; 0: none
    save_weights: bool = True  # at the end, a file per stage
    # One step of so many is measured action by action, for the bubble shown; 0: the last steps only.
    measure_every: int = ranged(100)
    max_hours: float | None = ranged(None, above=0, unit="hours")  # the run leaves before they are over
    profile: str | None = None  # START:STOP, the steps that torch.profiler records, STOP excluded
    profile_ranks: list[int] | None = None  # null: all
    # Nodes that name callbacks of the user's: {_target_: my_file.MyCallback, every: 5}
    callbacks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_early_stop()
        if self.cuda_graphs:
            self._check_graphs()
        if self.profile is not None:
            self.profiled_steps  # noqa: B018  # refuses what is no START:STOP
        if self.optimizer.kahan_sum and self.precision != "bfloat16":
            raise ConfigError(
                f"optimizer.kahan_sum=true is for weights in bfloat16, but precision={self.precision}: write "
                "precision=bfloat16, or optimizer.kahan_sum=false"
            )
        if self.memory.gradient_release != "off":
            self._check_gradient_release()
        if self.memory.offload != "none" and self.schedule.costs is None:
            raise ConfigError(
                f"memory.offload={self.memory.offload} plans copies by measured times: run zbpp measure, and "
                "write schedule.costs=costs.json, the file that it makes"
            )
        if self.memory.report:
            self._check_report()
        self._check_compile()
        self._check_recompute()
        if self.memory.offload_weights:
            self._check_offloaded_weights()
        if self.finetune.lora.r is not None and self.parallel.tensor > 1:
            raise ConfigError(
                f"finetune.lora doesn't go with parallel.tensor={self.parallel.tensor}, whose plan splits "
                "the modules that LoRA wraps: write parallel.tensor=1, with more pipeline ranks or shards"
            )

    def _check_graphs(self) -> None:
        """Refuse what a replayed step would leave out."""
        recompute, parallel = self.memory.recompute, self.parallel
        for is_given, given, remedy in (
            (parallel.shard > 1, f"parallel.shard={parallel.shard}", "write parallel.replicate instead"),
            (parallel.tensor > 1, f"parallel.tensor={parallel.tensor}", "write parallel.tensor=1"),
            (parallel.dynamic_shapes, "parallel.dynamic_shapes=true", "leave it false: shapes are fixed"),
            (recompute != "none", f"memory.recompute={recompute}", "write memory.recompute=none"),
        ):
            if is_given:
                raise ConfigError(f"cuda_graphs=true doesn't go with {given}: {remedy}, or cuda_graphs=false")

    def _check_report(self) -> None:
        """Refuse memory.report where the last step is not yet like all later ones."""
        least = 9 if self.schedule.replan is not None else 3
        if self.steps < least:
            raise ConfigError(
                "memory.report=true measures the last step, when optimizer states and receive buffers are "
                f"there: write steps={least} or more"
            )

    def _check_compile(self) -> None:
        """Refuse memory.budget without compiled stages, and FSDP2 with them."""
        if self.compile == "none" and self.memory.budget != 1:
            raise ConfigError(
                f"memory.budget={self.memory.budget} works with compile=stage or layer only: leave it at 1, "
                "or write memory.recompute=block to hold less"
            )
        if self.compile != "none" and self.parallel.shard > 1:
            raise ConfigError(
                f"parallel.shard={self.parallel.shard} doesn't go with compile={self.compile}: FSDP2's hooks "
                "would leave the stages eager; write compile=none, or parallel.replicate instead of shard"
            )

    def _check_recompute(self) -> None:
        """Refuse recomputing a stage whose weights are gathered, and a compiled one."""
        recompute = self.memory.recompute
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
        if self.precision == "mixed_float16" or (self.precision in _MIXED and parallel.shard == 1):
            raise ConfigError(
                f"{setting} doesn't go with precision={self.precision}, whose float32 gradients stay: write "
                "precision=bfloat16 with optimizer.kahan_sum=true"
            )
        if release != "accumulate":
            return
        need_optimi(setting)
        if parallel.replicate * parallel.shard > 1:
            raise ConfigError(
                f"{setting} with parallel.replicate={parallel.replicate}, parallel.shard={parallel.shard}: "
                "gradients would have to be reduced in each microbatch; write memory.gradient_release=step"
            )

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
