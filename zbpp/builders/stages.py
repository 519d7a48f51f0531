"""What is done to this rank's stages before the first step: device and dtype, recompute, compile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from zbpp.autograd import recompute
from zbpp.config import ConfigError
from zbpp.runtime.blocks import blocks_of


def move_stages(stages: Mapping[int, nn.Module], device: torch.device, dtype: str) -> None:
    """Move the stages to a device; floating-point parameters and buffers get the dtype."""
    for stage in stages.values():
        stage.to(device, getattr(torch, dtype))


def recompute_stages(stages: Mapping[int, nn.Module], what: str) -> None:
    """Let B recompute activations. `what`: "none", "block" (each block by itself) or "stage"."""
    for stage in stages.values():
        modules = {"none": [], "block": list(blocks_of(stage)), "stage": [stage]}[what]
        for module in modules:
            recompute(module)


def compile_stages(stages: Mapping[int, nn.Module], what: str, budget: float) -> None:
    """Let the stages be compiled in their first F. `what`: "none", "stage" or "layer" (each layer by itself).

    Layers that are alike are compiled once. budget: the share of the activations to keep between F
    and B. Raises ConfigError where compiling is not possible here.
    """
    if what == "none":
        return
    from zbpp.autograd.compiled import SplitCache, compile_stage  # imports the compiler: seconds

    cache: SplitCache = {}
    for index, stage in stages.items():
        try:
            compile_stage(
                stage,
                whole=what == "stage",
                budget=budget,
                name=f"stage {index}",
                cache=cache,
                say=partial(print, flush=True),
            )
        except RuntimeError as error:
            raise ConfigError(f"compile={what}: {error}") from error
