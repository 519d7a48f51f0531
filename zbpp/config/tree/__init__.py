"""The typed config tree: a class per group of configs/ and one per command, each field with its range.

Wrong types and unknown keys fail while Hydra composes; ranges (zbpp/ranges.py) stand beside the fields.
"""

from zbpp.config.tree.commands import BenchConfig, ExplainConfig, JobConfig, MeasureConfig
from zbpp.config.tree.finetune import FinetuneConfig, LoraConfig
from zbpp.config.tree.groups import (
    CheckpointConfig,
    EarlyStopConfig,
    LoggerConfig,
    ParallelConfig,
    SampleConfig,
    ScheduleConfig,
)
from zbpp.config.tree.memory import MemoryConfig
from zbpp.config.tree.optimizer import OptimizerConfig
from zbpp.config.tree.train import NUM_MICROBATCHES, TrainConfig

__all__ = [
    "NUM_MICROBATCHES",
    "BenchConfig",
    "CheckpointConfig",
    "EarlyStopConfig",
    "ExplainConfig",
    "FinetuneConfig",
    "JobConfig",
    "LoggerConfig",
    "LoraConfig",
    "MeasureConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SampleConfig",
    "ScheduleConfig",
    "TrainConfig",
]
