"""Restores state at the end of a pipeline call, or when a step begins again.

The state is random numbers, training mode, and module buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.runtime.processes.dtensors import local_of


class Buffers:
    """Copies of the buffers of some modules, which forward may change (BatchNorm's statistics).

    Each `keep` copies into the same memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*dict.fromkeys(each for module in modules for each in module.modules())]
        self._kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self._tables: dict[nn.Module, dict[str, Tensor | None]] = {}  # each module's buffers, also None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all buffers."""
        before, self._kept = self._kept, {}
        self._tables = {module: dict(module._buffers) for module in self._modules}
        for module in self._modules:
            for name, buffer in module.named_buffers(recurse=False):
                _, copy = before.get((module, name), (None, None))
                local = local_of(buffer)
                if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                    copy = torch.empty_like(local)
                self._kept[module, name] = buffer, copy.copy_(local)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the modules the buffers, with the values, that they had at the last `keep`.

        A buffer that a forward has added since (a table of positions) stays: the module relies on it.
        """
        for module, table in self._tables.items():
            module._buffers.update(table)
        for buffer, copy in self._kept.values():
            local_of(buffer).copy_(copy)


@contextmanager
def restored_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give the modules the buffers, with the values, that they have now, at the end of the block."""
    buffers = Buffers(modules)
    buffers.keep()
    try:
        yield
    finally:
        buffers.restore()


class InPlaceChanges:
    """Finds out whether tensors are changed in place. values: a nest that contains the tensors."""

    def __init__(self, values: object) -> None:
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def are_found(self) -> bool:
        """Whether a tensor was changed since this object was made."""
        return any(tensor._version != version for tensor, version in self._versions)


@contextmanager
def eval_mode(roots: Iterable[object]) -> Iterator[None]:
    """Put those roots that are modules into eval mode; afterwards each module has its own mode again."""
    found = [root for root in roots if isinstance(root, nn.Module)]
    modes = [(module, module.training) for root in found for module in root.modules()]
    for root in found:
        root.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
