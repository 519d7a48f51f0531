"""What cuda_graphs doesn't go with, said before anything is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbpp.ranges import ConfigError

if TYPE_CHECKING:
    from zbpp.config.tree.train import TrainConfig


def check_graphs(config: TrainConfig) -> None:
    """Raise ConfigError for a switch that a replayed step would leave out."""
    memory, parallel = config.memory, config.parallel
    if not config.cuda_graphs:
        return
    for is_given, given, remedy in (
        (parallel.shard > 1, f"parallel.shard={parallel.shard}", "write parallel.replicate instead"),
        (parallel.tensor > 1, f"parallel.tensor={parallel.tensor}", "write parallel.tensor=1"),
        (parallel.dynamic_shapes, "parallel.dynamic_shapes=true", "leave it false: graphs have fixed shapes"),
        (memory.recompute != "none", f"memory.recompute={memory.recompute}", "write memory.recompute=none"),
        (memory.offload != "none", f"memory.offload={memory.offload}", "write memory.offload=none"),
        (memory.offload_weights, "memory.offload_weights=true", "write memory.offload_weights=false"),
        (
            memory.gradient_release != "off",
            f"memory.gradient_release={memory.gradient_release}",
            "write memory.gradient_release=off",
        ),
        (
            config.optimizer.validation == "after",
            "optimizer.validation=after",
            "write optimizer.validation=before",
        ),
    ):
        if is_given:
            raise ConfigError(f"cuda_graphs=true doesn't go with {given}: {remedy}, or cuda_graphs=false")
