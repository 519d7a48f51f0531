"""Which switches of a config don't go together: what the extras behind them say (docs/pipeline.md)."""

from __future__ import annotations

from collections.abc import Mapping

from zbpp.config import ConfigError, TrainConfig, check_node
from zbpp.runtime import ActivationOffload, CudaGraphs, GradientRelease, OverlapExchange
from zbpp.runtime.memory.weight_offload import OffloadedWeights
from zbpp.runtime.parallel.experts import ExpertParallel
from zbpp.runtime.update.validation import Validation


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for what the config alone shows: excluded switches, unknown arguments of a class."""
    check_together(config)
    optimizer = config.optimizer
    nodes = [("model", config.model), ("data", config.data)]
    nodes += [(f"callbacks[{number}]", node) for number, node in enumerate(config.callbacks)]
    nodes += [("optimizer.build", optimizer.build), ("optimizer.lr_scheduler", optimizer.lr_scheduler)]
    for part, node in nodes:
        if isinstance(node, Mapping) and node:
            check_node(part, node)


def check_together(config: TrainConfig) -> None:
    """Raise ConfigError for two switches that are on, and whose extras exclude each other."""
    memory, validation = config.memory, config.optimizer.validation
    release, offload = memory.gradient_release, memory.offload
    switches = (
        (ActivationOffload, "memory.offload", offload, offload != "none"),
        (CudaGraphs, "cuda_graphs", "true", config.cuda_graphs),
        (ExpertParallel, "parallel.expert", str(config.parallel.expert), config.parallel.expert > 1),
        (GradientRelease, "memory.gradient_release", release, release != "off"),
        (OffloadedWeights, "memory.offload_weights", "true", memory.offload_weights),
        (OverlapExchange, "parallel.overlap_exchange", "true", config.parallel.overlap_exchange),
        (Validation, "optimizer.validation", validation, validation == "after"),
    )
    on = {extra.name: f"{key}={value}" for extra, key, value, is_on in switches if is_on}
    for extra, *_ in switches:
        for other, instead in extra.excludes.items():
            if extra.name in on and other in on:
                raise ConfigError(f"{on[extra.name]} doesn't go with {on[other]}: {instead}")
