"""The config: its typed tree, composing it from YAML files and a command line, and objects from its nodes.

Hydra and OmegaConf are known in this folder only. Plain objects leave it.
"""

from zbpp.config.compose import (
    Composed,
    as_yaml,
    command,
    composition_error,
    config_folder,
    flat,
    read_run_config,
    register,
    typed,
)
from zbpp.config.instantiate import instantiate_node, naming, partial_of_node
from zbpp.config.tree import (
    NUM_MICROBATCHES,
    BenchConfig,
    EarlyStopConfig,
    ExplainConfig,
    FinetuneConfig,
    JobConfig,
    LoggerConfig,
    LoraConfig,
    MeasureConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)
from zbpp.ranges import ConfigError

__all__ = [
    "NUM_MICROBATCHES",
    "BenchConfig",
    "Composed",
    "ConfigError",
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
    "as_yaml",
    "command",
    "composition_error",
    "config_folder",
    "flat",
    "instantiate_node",
    "naming",
    "partial_of_node",
    "read_run_config",
    "register",
    "typed",
]
