"""A model and data that misbehave once: a job imports this file from its folder, as a user's own.

The environment says how: MISBEHAVE = {"do": NAME, "where": F, B, loss or data, "rank": R, "call": N}.
The N-th call there on that rank does it, and leaves the file `fired` with the time; where this file is,
nothing misbehaves any more. The process ids of the ranks are in `rank-0.pid` and so on.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.data import regression_data
from zbpp.models.mlp import Mlp

_HERE = Path.cwd()  # the folder of the case
_PLAN = json.loads(os.environ.get("MISBEHAVE", "{}"))
_SECONDS = float(os.environ.get("MISBEHAVE_SLEEP", "0.002"))  # of each F: so that a step takes a while


class Model(Mlp):
    """An Mlp whose stages and loss may misbehave."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(in_features=16, hidden_size=32, out_features=4, num_layers=6, **sizes)
        rank = os.environ.get("RANK")  # not at the import: the launcher may import this file for its ranks
        if rank is not None:
            draft = _HERE / f"rank-{rank}.draft"
            draft.write_text(str(os.getpid()))
            draft.rename(_HERE / f"rank-{rank}.pid")

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """The Mlp's stage, which misbehaves in F or in B."""
        stage = super().build_stage(index, num_stages)
        stage.register_forward_pre_hook(_before_forward)
        stage.register_forward_hook(_after_forward)
        return stage

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The Mlp's loss."""
        if output.requires_grad:
            _call("loss")
        return super().loss(output, target)


def data(*, batch_size: int, seed: int = 0) -> Any:
    """Random regression that misbehaves when a batch of training is read."""
    found = regression_data(in_features=16, out_features=4, batch_size=batch_size, seed=seed)
    return found._replace(train=_Source(found.train))


class _Source:
    def __init__(self, source: Any) -> None:
        self._source = source

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, target = self._source.batch(step)
        if step:  # batch 0 is also read to try the model
            _call("data")
        return inputs, target


def _before_forward(stage: nn.Module, inputs: Any) -> None:
    if stage.training:
        time.sleep(_SECONDS)
        _call("F")


def _after_forward(stage: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return _Backward.apply(output) if stage.training and output.requires_grad else output


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _call("B")
        return gradient


_calls = 0


def _call(where: str) -> None:
    """Count; misbehave if it is time."""
    global _calls
    if not _PLAN or str(_PLAN["rank"]) != os.environ.get("RANK") or _PLAN["where"] != where:
        return
    _calls += 1
    if _calls >= _PLAN["call"] and not (_HERE / "fired").exists():
        draft = _HERE / "fired.draft"
        draft.write_text(json.dumps({"time": time.time(), "process": os.getpid()}))
        draft.rename(_HERE / "fired")
        _DO[_PLAN["do"]]()


def _raise() -> None:
    raise RuntimeError("planted in user code")


def _loop() -> None:
    while True:
        pass


def _hold_the_lock() -> None:
    """C code that never gives up Python's lock."""
    sum(range(10**15))


def _leave() -> None:
    os._exit(0)


def _out_of_memory() -> None:
    """Less memory than the next tensor needs."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(2**30)


def _segfault() -> None:
    ctypes.string_at(0)


def _lose_a_message() -> None:
    """The next message that this rank sends never arrives."""
    from zbpp.runtime.links import Outbox

    start = Outbox._start

    def lost(self: Any, tensor: Tensor) -> Any:
        Outbox._start = start  # type: ignore[method-assign]
        self._num_sent += 1
        return _Sent(), tensor

    Outbox._start = lost  # type: ignore[method-assign]


class _Sent:
    """A message that seems to have been received."""

    def wait(self) -> None:
        """Do nothing."""


_DO = {
    "segfault": _segfault,
    "raise": _raise,
    "loop": _loop,
    "hold Python's lock": _hold_the_lock,
    "leave": _leave,
    "out of memory": _out_of_memory,
    "lose a message": _lose_a_message,
}
