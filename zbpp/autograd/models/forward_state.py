"""The buffers that a forward used, so that its recompute reads the same values.

A recompute runs later than the forward that it repeats; in between, other forwards may have changed buffers.
A small buffer, such as running statistics, is copied in the forward. The recompute runs on copies of that
copy: its own changes are dropped, since the forward has made them already. A buffer that the forward makes,
or puts where None was, is not there yet in the recompute. Parameters and large buffers are not copied: if one
was changed in place since, the recompute raises an error, as autograd does for a saved tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zbpp.autograd.hooks import has_own_hooks
from zbpp.autograd.references import references

SMALL = 64 * 1024
"""A buffer of at most so many bytes is copied."""

_Table = dict[str, Tensor | None]


class ForwardState:
    """The buffers and parameters that a callable refers to, as they are when this object is made."""

    def __init__(self, things: Any) -> None:
        found = list(references(things))
        roots = [each for each in found if isinstance(each, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        parameters = [each for module in modules for each in module.parameters(recurse=False)]
        buffers = [each for module in modules for each in module.buffers(recurse=False)]
        # Several modules may share one buffer, and then share its copy.
        self._copies = {id(each): each.clone() for each in buffers if _is_small(each)}
        self._tables: list[tuple[_Table, _Table]] = [
            (module._buffers, dict(module._buffers)) for module in modules
        ]
        uncopied = [each for each in buffers if not _is_small(each)]
        self.devices = {each.device for each in (*found, *parameters, *buffers) if isinstance(each, Tensor)}
        used = [*(each for each in found if isinstance(each, Tensor)), *parameters, *uncopied]
        self._versions = [(each, version(each)) for each in used]

    def hooked(self) -> list[Tensor]:
        """The trainable leaves that have hooks; hooks of their nodes alone don't count."""
        leaves = {id(each): each for each, _ in self._versions if each.requires_grad and each.is_leaf}
        return [each for each in leaves.values() if has_own_hooks(each)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, modules have the buffers that the forward found; small ones are copies.

        Raises RuntimeError if a parameter or a large buffer was changed in place.
        """
        for tensor, count in self._versions:
            if version(tensor) != count:
                raise RuntimeError(
                    f"a parameter or buffer of shape {tuple(tensor.shape)} was changed in place between a "
                    "checkpoint's forward and its recompute, which would compute with other values"
                )
        copies = {key: copy.clone() for key, copy in self._copies.items()}  # there may be another recompute
        now = [(table, dict(table)) for table, _ in self._tables]
        try:
            for table, before in self._tables:
                _fill(table, {name: copies.get(id(buffer), buffer) for name, buffer in before.items()})
            yield
        finally:
            for table, after in now:
                _fill(table, after)


def _is_small(buffer: Tensor) -> bool:
    return buffer.nbytes <= SMALL and not buffer.requires_grad


def _fill(table: _Table, entries: _Table) -> None:
    table.clear()
    table.update(entries)


def version(tensor: Tensor) -> int:
    """Autograd's count of a tensor's in-place changes; 0 for an inference tensor, which has no count."""
    return 0 if tensor.is_inference() else tensor._version
