"""The blocks of a stage: the modules that are recomputed or gathered (FSDP2) one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module. A ModuleList or ModuleDict is never called: its children count instead."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks_of(child)
        else:
            yield child
