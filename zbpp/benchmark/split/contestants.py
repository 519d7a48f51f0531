"""The contestants: plain backward, zbpp's split, eager and compiled, and torch's own split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd import backward_input
from zbpp.autograd.compiled import compile_stage
from zbpp.autograd.compiled.inductor import Backend


class Contestant(Protocol):
    """F, B and W of one stage.

    enter(x): x as the stage takes it; it requires grad. b runs B and returns all that is kept for W.
    """

    def enter(self, x: Tensor) -> Tensor: ...
    def f(self, stage: nn.Module, x: Tensor) -> Tensor: ...
    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any: ...
    def w(self, stage: nn.Module, kept: Any) -> None: ...


class _EagerForward:
    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = stage(x)
        return y


class Plain(_EagerForward):
    """torch.autograd.backward; its W is empty."""

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
        torch.autograd.backward([y], [dy])

    def w(self, stage: nn.Module, kept: None) -> None:
        pass


class Zbpp(_EagerForward):
    """zbpp's split."""

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_().view_as(x)  # no leaf, as in zbpp's runtime

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, weight_grads = backward_input(y, dy, x)
        return weight_grads

    def w(self, stage: nn.Module, kept: Any) -> None:
        kept.accumulate()


class Compiled(Zbpp):
    """zbpp's split, compiled. The stage itself stays eager for the other contestants."""

    def __init__(self, backend: Backend = "inductor") -> None:
        self.forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._backend = backend

    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        if stage in self.forwards:
            return self.forwards[stage](x)
        compile_stage(stage, backend=self._backend)
        y: Tensor = stage(x)
        self.forwards[stage] = stage.forward
        del stage.forward
        return y


class Torch(_EagerForward):
    """torch's split. Calls and keeps what torch.distributed.pipelining.stage.backward_one_chunk does."""

    def __init__(self) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        self.input, self.weight = stage_backward_input, stage_backward_weight

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, groups = self.input([y], [dy], [x], stage.parameters())
        return [x], groups, (y,), (dy,)

    def w(self, stage: nn.Module, kept: Any) -> None:
        self.weight(stage.parameters(), kept[1])
