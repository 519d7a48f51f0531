"""The config of what a rank holds between F, B and W: configs/memory/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zbpp.ranges import Checked, ConfigError, one_of, ranged


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
    offload: which activations are in host memory between F and B, by the times in schedule.costs: "none";
        "auto": those whose copies make no action late; a number: up to so many GiB of each rank.
    offload_weights: whether weights, their gradients and the optimizer's states live in host memory.
    head_at_once: whether the W of a language model's head runs at the end of its B: of the gradients of the
        logits, one exists at a time.
    gradient_release: when weights are updated and their gradients dropped. "off": after the step; "step":
        after each stage's last W; "accumulate": each microbatch's gradients go into the optimizer's states,
        and the last microbatch's also update the weights.
    """

    prefix: ClassVar[str] = "memory."
    recompute: str = one_of("none", "block", "stage", "auto")
    budget: float = ranged(1.0, most=1)
    limit: float | None = ranged(None, above=0, unit="GiB")
    report: bool = False  # true: the last step's memory, measured beside predicted, in memory.json and .png
    offload: int | float | str = "none"
    offload_weights: bool = False
    head_at_once: bool = False
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
