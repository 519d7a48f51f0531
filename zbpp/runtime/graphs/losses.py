"""The losses of captured F's: each F copies its losses to fixed places, which are read after the step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.graphs.maker import NotCapturable
from zbpp.runtime.stage import StageWorker

_Kind = tuple[torch.dtype, torch.device]


class _Kept(NamedTuple):
    """Where a loss is. name: None for the loss itself."""

    name: str | None
    kind: _Kind
    position: int


class StaticLosses:
    """The losses of one stage. Made when an eager step has run and its losses are still in the worker."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        counts: dict[_Kind, int] = {}
        for _, loss in _losses(worker):
            counts[_kind(loss)] = counts.get(_kind(loss), 0) + 1
        self._values = {
            (dtype, device): torch.zeros(count, dtype=dtype, device=device)
            for (dtype, device), count in counts.items()
        }
        self._places = {kind: list(values.unbind()) for kind, values in self._values.items()}
        # The gradient that B starts from at a loss, by kind of loss; see StageWorker.
        self._gradients = {kind: each.clone() for kind, each in worker.loss_grads.items()}
        self._gradient = worker.loss_grad
        self._kept: list[_Kept] = []

    def attach(self) -> None:
        """Before the captures: give the worker the fixed gradients of losses."""
        self._kept.clear()
        self._worker.loss_grads.update(self._gradients)

    @torch.no_grad()
    def take(self) -> None:
        """In the capture of an F: copy its losses to their places. NotCapturable for more than before."""
        for name, loss in _losses(self._worker):
            kind = _kind(loss)
            position = sum(each.kind == kind for each in self._kept)
            if position >= len(self._places.get(kind, ())):
                raise NotCapturable("it has other losses than in the step before")
            self._places[kind][position].copy_(loss)
            self._kept.append(_Kept(name, kind, position))
        if len(self._worker.loss_grads) > len(self._gradients):
            raise NotCapturable("it has losses of other kinds than in the step before")
        self._worker.losses, self._worker.named = [], {}

    def begin(self) -> None:
        """A replayed step begins: losses may have another scale than in the last one."""
        if self._worker.loss_grad != self._gradient:
            self._gradient = self._worker.loss_grad
            for each in self._gradients.values():
                each.fill_(self._gradient)

    def give(self) -> None:
        """The replayed step has run: give the worker copies of the losses, as if its F's had run."""
        copies = {kind: values.clone().unbind() for kind, values in self._values.items()}
        for name, kind, position in self._kept:
            loss = copies[kind][position]
            if name is None:
                self._worker.losses.append(loss)
            else:
                self._worker.named.setdefault(name, []).append(loss)


def _losses(worker: StageWorker) -> list[tuple[str | None, Tensor]]:
    named = [(name, loss) for name, losses in worker.named.items() for loss in losses]
    return [*((None, loss) for loss in worker.losses), *named]


def _kind(loss: Tensor) -> _Kind:
    return loss.dtype, loss.device
