"""The blocks of a stage: what is recomputed, compiled or gathered by itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; of a ModuleList or ModuleDict, which is never called, its own children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks_of(child)
        else:
            yield child
