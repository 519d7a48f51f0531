"""The part of Pipeline that checks a run against silent corruption.

Pipeline(check_messages=True)   messages between ranks carry checksums (checked_links.py)
check_replicas()                copies of one tensor are compared (replicas.py)
replaying()                     a step runs twice, under two timetables (replay.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zbpp.runtime.call import Call
from zbpp.runtime.check_counts import CheckCounts
from zbpp.runtime.named_tensors import buffers_of, parameters_of
from zbpp.runtime.pipeline_state import PipelineState
from zbpp.runtime.replay import Replay
from zbpp.runtime.replicas import check_copies, held_buffers, held_parameters


class Masters(Protocol):
    """See zbpp.MasterWeights."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a parameter, or the parameter itself."""


class PipelineChecks(PipelineState):
    """The part of Pipeline that checks a run against silent corruption."""

    stages: Mapping[int, nn.Module]
    check_counts: CheckCounts
    _loss_fn: Any
    _is_replayed = False

    def check_replicas(
        self, optimizer: torch.optim.Optimizer | None = None, *, masters: Masters | None = None
    ) -> None:
        """Raise AgreementError, on every process, if copies of one tensor have different bits.

        Copies are on replicas, on ranks that share a tied parameter, and on tensor-parallel processes that
        hold a parameter whole. Compared are parameters and buffers, with optimizer its states, with masters
        master weights. The error names the tensors and the ranks, and with three or more copies those that
        are alone. Waits for a pending update. Collective over the pipeline or its mesh.
        """
        self.settle()
        texts = {id(each.tensor): str(each) for each in parameters_of(self.stages, self._loss_fn)}
        own = {} if masters is None else {each: masters.of(each) for each in self.parameters()}
        buffers = [(str(each), each.tensor) for each in buffers_of(self.stages)]
        held = [
            *held_parameters(self.parameter_names(), texts, self.place, optimizer, own),
            *held_buffers(buffers, self.place),
        ]
        self.check_counts.replicas += check_copies(held, self.place, self.num_steps)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Steps inside the block run twice, the second time under a random timetable.

        Losses, gradients and buffers of both runs are compared to the last bit; then all is as after one run.
        The other timetable places the stages as this pipeline's does, and no stage holds more microbatches.
        `step` raises ReplayError, on every rank, if anything differs. On all ranks alike.

        Raises ValueError with gradient release and with offload; `step` raises it for inputs that require
        grad or that a stage changes in place. With zbpp.PostValidation call `settle` first. On CUDA the
        kernels have to be deterministic.
        """
        if self._engine.replay_refusal:
            raise ValueError(self._engine.replay_refusal)
        self._is_replayed = True
        try:
            yield
        finally:
            self._is_replayed = False

    def _begin_replay(self, call: Call) -> Replay:
        if self.pending_update is not None:
            raise ValueError("replaying with an update that is not validated: call pipeline.settle() first")
        return Replay(
            self._engine, self.place, self.stages, self._loss_fn, self.timetable, call, self.num_steps
        )
