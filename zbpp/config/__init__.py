"""The config: its typed tree, composing it from YAML files and a command line, and objects from its nodes.

Hydra and OmegaConf are known in this folder only. Plain objects leave it.

train        the keys of `zbpp train`; commands: those of other commands
batching     the keys of the node `data` that say how sequences become batches
typed_file   a YAML file as a dataclass
compose      from YAML files and a command line to one checked config
instantiate  the objects that nodes name by `_target_`
choice_help  help on the keys of a choice
folder       where the YAML files are
"""

from zbpp.config.batching import BatchingConfig, batching_of, without_batching
from zbpp.config.commands import (
    BenchConfig,
    ExplainConfig,
    FinetuneConfig,
    JobConfig,
    MeasureConfig,
    ScheduleConfig,
)
from zbpp.config.compose import (
    Composed,
    command,
    composition_error,
    flat,
    has_key,
    help_text,
    key_called,
    read_run_config,
    register,
    typed,
    with_values,
)
from zbpp.config.folder import config_folder
from zbpp.config.instantiate import check_node, instantiate_node, naming, partial_of_node
from zbpp.config.train import (
    NUM_MICROBATCHES,
    LoggerConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from zbpp.ranges import ConfigError

__all__ = [
    "NUM_MICROBATCHES",
    "BatchingConfig",
    "BenchConfig",
    "Composed",
    "ConfigError",
    "ExplainConfig",
    "FinetuneConfig",
    "JobConfig",
    "LoggerConfig",
    "MeasureConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "TrainConfig",
    "batching_of",
    "check_node",
    "command",
    "composition_error",
    "config_folder",
    "flat",
    "has_key",
    "help_text",
    "instantiate_node",
    "key_called",
    "naming",
    "partial_of_node",
    "read_run_config",
    "register",
    "typed",
    "with_values",
    "without_batching",
]
