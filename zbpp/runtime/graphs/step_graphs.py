"""When a step is eager, when it is captured, when it is replayed.

The first two steps of equal inputs (their shapes and numbers) are eager; the second one notes the layouts of
messages. The next such step is captured, then replayed, and so is every later one. A step with other inputs
is eager. What else a step relies on is taken to stay as it was in the capture: see docs/compiled.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.runtime.call import Feed
from zbpp.runtime.executor import Executor
from zbpp.runtime.graphs.capture import ActionGraphs, GraphMaker, RankActions
from zbpp.runtime.graphs.cuda import CudaGraphs
from zbpp.runtime.graphs.gradients import StaticGradients
from zbpp.runtime.graphs.inputs import Key, StaticInputs, key_of
from zbpp.runtime.layout import Layout
from zbpp.schedule import Action

_log = logging.getLogger(__name__)

_WARM_UP = 2  # eager steps before the capture


def step_graphs(
    rank: RankActions, modules: Iterable[nn.Module], executor: Executor, maker: GraphMaker | None = None
) -> StepGraphs | None:
    """The graphs of one rank's steps; None on a device without graphs.

    maker: captures the graphs; None: what the executor's device has.
    """
    if maker is None:
        if executor.device.type != "cuda":
            if rank.program.rank == 0:  # one line, not one of each rank
                _log.warning("CUDA graphs need a GPU: running eagerly")
            return None
        maker = CudaGraphs(executor.device)
    return StepGraphs(maker, rank, modules, executor)


class StepGraphs:
    """Runs the steps of one rank: by graphs from the third on.

    modules: the stages and the loss. executor: of the rank's step.
    """

    def __init__(
        self, maker: GraphMaker, rank: RankActions, modules: Iterable[nn.Module], executor: Executor
    ) -> None:
        self._maker, self._rank, self._executor = maker, rank, executor
        self._modules = [*modules]
        self.num_replays = 0
        self._captured: _Captured | None = None
        self._key: Key | None = None  # of the last step's inputs
        self._num_warm = 0  # eager steps in a row with this key
        self._is_replaying = False  # whether the executor has the graphs
        self._layouts: dict[Action, Layout] = {}
        self._loss_grads: dict[int, dict[Any, Tensor]] = {}  # by stage; see StageWorker

    def run(self, feeds: Mapping[int, Feed]) -> None:
        """Run a step whose feeds the workers have begun."""
        key = key_of(feeds)
        if self._captured is None:
            if key != self._key or self._num_warm < _WARM_UP:
                return self._warm_up(key)
            self._captured = self._capture(key, feeds)
        if key == self._captured.key:
            return self._replay(self._captured, feeds)
        self._use_eager()
        self._executor.run()

    def close(self) -> None:
        """Drop the graphs and their memory."""
        self._use_eager()
        self._captured = None

    def _use_eager(self) -> None:
        if self._is_replaying:
            self._executor.replace_actions({}, {})
            self._is_replaying = False

    def _warm_up(self, key: Key) -> None:
        """Run a step eagerly, where captures run. It notes layouts of messages and gradients of losses."""
        self._num_warm = self._num_warm + 1 if key == self._key else 1
        self._key, self._layouts = key, {}
        self._executor.replace_actions(self._rank.noting(self._layouts), {})
        try:
            with self._maker.warming_up():
                self._executor.run()
        finally:
            self._executor.replace_actions({}, {})
        self._loss_grads = {stage: worker.loss_grads for stage, worker in self._rank.workers.items()}

    def _capture(self, key: Key, feeds: Mapping[int, Feed]) -> _Captured:
        """Capture the step of these feeds; afterwards the workers have begun it anew."""
        gradients = StaticGradients(each for module in self._modules for each in module.parameters())
        gradients.attach()
        torch.clear_autocast_cache()  # a graph would read a copy of a weight in it, which may go
        try:
            inputs = StaticInputs(feeds, self._executor.device)
            self._begin(inputs.feeds)
            graphs = ActionGraphs(self._rank, self._maker, self._layouts, self._executor)
            gradients.captured()
        except Exception as error:
            error.add_note("a step can't be captured (see docs/compiled.md): leave cuda_graphs out")
            raise
        finally:
            torch.clear_autocast_cache()  # it may hold copies that the capture never computed
            gradients.detach()
        self._begin(feeds)
        return _Captured(key, inputs, gradients, graphs)

    def _begin(self, feeds: Mapping[int, Feed]) -> None:
        for stage, worker in self._rank.workers.items():
            worker.begin(feeds[stage])
            worker.loss_grads = self._loss_grads[stage]

    def _replay(self, captured: _Captured, feeds: Mapping[int, Feed]) -> None:
        captured.gradients.begin()
        captured.inputs.load(feeds)
        for stage, feed in feeds.items():
            for each in self._loss_grads[stage].values():
                each.fill_(feed.loss_grad)  # loss_scale may have changed
        if not self._is_replaying:
            captured.graphs.use(self._executor)
            self._is_replaying = True
        self._executor.run()
        captured.graphs.give_losses()
        self.num_replays += 1


class _Captured(NamedTuple):
    """key: of the inputs that were captured."""

    key: Key
    inputs: StaticInputs
    gradients: StaticGradients
    graphs: ActionGraphs
