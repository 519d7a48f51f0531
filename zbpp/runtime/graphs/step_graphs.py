"""When a step is eager, when it is captured, when it is replayed.

call                                        done
the first two of a layout, one by one       eager; the second one notes the layouts of messages and losses
the next one                                captured, then replayed
every later one of the same layout          replayed
one of another layout                       eager; the third in a row is captured in place of the old graphs
after a change of what the capture relies   eager, then captured anew
on (relied_on.py)

After so many captures (_MOST_CAPTURES) the last graphs stay, and all other calls are eager. A step that can't
be captured makes all later ones eager, and one line says why.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy
import torch
from torch import nn

from zbpp.runtime.executor import Executor
from zbpp.runtime.feed import Call
from zbpp.runtime.graphs.actions import ActionGraphs, RankActions, reason_of, watched
from zbpp.runtime.graphs.attributes import AttributesBefore
from zbpp.runtime.graphs.call import StaticCall, layout_of_call
from zbpp.runtime.graphs.captured import Captured
from zbpp.runtime.graphs.cuda import CudaGraphs
from zbpp.runtime.graphs.gradients import StaticGradients
from zbpp.runtime.graphs.losses import StaticLosses
from zbpp.runtime.graphs.maker import GraphMaker, NotCapturable
from zbpp.runtime.graphs.program import ProgramGraph
from zbpp.runtime.graphs.relied_on import Basis
from zbpp.runtime.graphs.weights import hooked, refuse_parameters, refusing_others
from zbpp.runtime.layout import Layout
from zbpp.runtime.measure import Recorder
from zbpp.runtime.microbatch import Cutter
from zbpp.schedule import Op, Value

_log = logging.getLogger(__name__)

_WARM_UP = 2  # eager calls before a capture
_MOST_CAPTURES = 8
_MOST_MISSES = 8  # calls in a row that are neither captured nor replayed, before a line says so

Seeds = Mapping[int, int]


def step_graphs(
    mode: str,
    rank: RankActions,
    modules: Iterable[nn.Module],
    executor: Executor,
    maker: GraphMaker | None = None,
) -> StepGraphs | None:
    """The graphs of one rank's steps; None for mode "none", and on a device without graphs.

    maker: captures the graphs; None: what the executor's device has.
    """
    if mode == "none":
        return None
    if maker is None:
        if executor.device.type != "cuda":
            if rank.program.rank == 0:  # one line, not one of each rank
                _log.warning("cuda_graphs=%s: CUDA graphs need a GPU: running eagerly", mode)
            return None
        maker = CudaGraphs(executor.device)
    return StepGraphs(mode, maker, rank, modules, executor)


class StepGraphs:
    """Runs the steps of one rank, by graphs where it can.

    mode: "actions" or "program". modules: the stages and the loss. executor: of the rank's step.
    """

    def __init__(
        self,
        mode: str,
        maker: GraphMaker,
        rank: RankActions,
        modules: Iterable[nn.Module],
        executor: Executor,
    ) -> None:
        self.mode, self._maker, self._rank, self._executor = mode, maker, rank, executor
        self._modules = [*modules]
        self.stopped = ""  # why no step is captured any more
        self.num_captures = self.num_replays = 0
        self._captured: Captured | None = None
        self._basis: Basis | None = None  # of the eager calls that came last
        self._why_eager: Callable[[], str] = str  # says why the last call was eager
        self._named: list[str] = []  # what a line has said to have hooks
        self._num_warm = self._num_missed = 0
        self._is_replaying = False  # whether the executor has the graphs
        self._layouts: dict[Value, Layout] = {}
        self._losses: dict[int, StaticLosses] = {}

    def run(self, call: Call, seeds: Seeds, recorder: Recorder | None) -> None:
        """Run a step whose call the workers have begun."""
        if self.stopped or (recorder is not None and self.mode == "program"):
            return self._run_eager(recorder)
        try:
            device = self._executor.device
            basis = Basis(layout_of_call(call, device), self._modules, device)
        except NotCapturable as error:
            self._why_eager = partial(str, error)
            return self._miss(recorder)
        if self._captured is not None and self._captured.fits(basis):
            return self._replay(call, recorder)
        self._compare(basis)
        if self.num_captures >= _MOST_CAPTURES:
            return self._miss(recorder)
        if self._num_warm < _WARM_UP:
            return self._warm_up(recorder)
        if self._capture(call, seeds, basis):
            return self._replay(call, recorder)
        return self._run_eager(recorder)

    def _compare(self, basis: Basis) -> None:
        """Compare an eager call with the one before, or else with the capture."""
        before, captured = self._basis, self._captured
        self._basis = basis
        if before is not None and basis != before:
            self._num_warm = 0
            self._why_eager = partial(basis.changed, before)
        elif captured is not None:
            self._why_eager = partial(captured.changed, basis)

    def close(self) -> None:
        """Drop the graphs and their memory."""
        if self._captured is not None:
            self._use_eager()
        self._captured = None

    def _run_eager(self, recorder: Recorder | None) -> None:
        self._use_eager()
        self._executor.run(recorder)

    def _use_eager(self) -> None:
        if self._is_replaying:
            self._executor.replace_actions({}, {})
            self._is_replaying = False

    def _miss(self, recorder: Recorder | None) -> None:
        """Run a call eagerly that is not even captured later."""
        self._count_as_missed()
        self._num_warm = 0
        self._run_eager(recorder)

    def _count_as_missed(self) -> None:
        """The call is eager; say why if that is the rule."""
        self._num_missed += 1
        if self._num_missed == _MOST_MISSES:
            often = f", after {self.num_captures} captures" if self.num_captures >= _MOST_CAPTURES else ""
            self._say(
                f"{_MOST_MISSES} steps in a row were eager{often}, the last one since {self._why_eager()}"
            )

    def _warm_up(self, recorder: Recorder | None) -> None:
        """Run a step eagerly, where captures run. The last one notes the layouts of messages and losses."""
        self._num_warm += 1
        self._count_as_missed()
        is_last = self._num_warm == _WARM_UP
        self._use_eager()
        if is_last:
            self._layouts = {}
            self._executor.replace_actions(watched(self._rank, self._layouts), {})
        try:
            with self._maker.warming_up():
                self._executor.run(recorder)
        finally:
            if is_last:
                self._executor.replace_actions({}, {})
        if is_last:
            self._losses = {stage: StaticLosses(worker) for stage, worker in self._rank.workers.items()}

    def _capture(self, call: Call, seeds: Seeds, basis: Basis) -> bool:
        """Capture the step. False: it can't be, and no later one will be tried."""
        self._use_eager()
        self._captured, gradients = None, StaticGradients(_parameters(self._modules))
        before = AttributesBefore(self._modules, self._rank.loss)
        generators = random.getstate(), numpy.random.get_state()
        try:
            refuse_parameters(self._modules)
            before.check_device(self._executor.device)
            static = StaticCall(call, self._executor.device)
            static.load(call)
            gradients.attach()
            self._begin(static.call, seeds)
            torch.clear_autocast_cache()
            graphs = self._graphs()
            gradients.captured()
            before.check()
            self._captured = Captured(basis, static, gradients, self._losses, graphs, self._rank.loss)
        except Exception as error:
            before.restore()
            random.setstate(generators[0])
            numpy.random.set_state(generators[1])
            self._stop(error)
        finally:
            torch.clear_autocast_cache()  # it may hold copies that the capture never computed
            gradients.detach()
            for worker in self._rank.workers.values():
                worker.abandon()
            self._begin(call, seeds)
            self._layouts, self._losses = {}, {}
        self.num_captures += 1
        self._num_warm, self._basis = 0, None
        if self._captured is not None:
            self._name_hooks()
        return self._captured is not None

    def _name_hooks(self) -> None:
        names = hooked(self._modules)
        if names and names != self._named:
            _log.warning(
                "cuda_graphs=%s: hooks of %s run when a step is captured, not when it is replayed",
                self.mode,
                ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            )
        self._named = names

    def _graphs(self) -> ActionGraphs | ProgramGraph:
        for each in self._losses.values():
            each.attach()
        forward = refusing_others(self._rank.methods[Op.F], self._modules)
        rank = self._rank._replace(methods={**self._rank.methods, Op.F: forward})
        if self.mode == "program":
            return ProgramGraph(rank, self._maker, self._losses, self._executor)
        return ActionGraphs(rank, self._maker, self._layouts, self._losses, self._executor)

    def _stop(self, error: Exception) -> None:
        """Nothing is captured from now on; say why."""
        self._captured, self.stopped = None, reason_of(error)
        self._say(self.stopped)

    def _say(self, why: str) -> None:
        rank = self._rank.program.rank
        _log.warning("cuda_graphs=%s on rank %d: %s: running eagerly", self.mode, rank, why)

    def _begin(self, call: Call, seeds: Seeds) -> None:
        """Give the stages their parts of a call."""
        cutter = Cutter(self._num_microbatches())
        feeds = call.feeds(cutter, seeds, last_stage=self._rank.num_stages - 1)
        for stage, worker in self._rank.workers.items():
            worker.begin(feeds[stage])

    def _num_microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self._rank.actions())

    def _replay(self, call: Call, recorder: Recorder | None) -> None:
        captured = self._captured
        assert captured is not None
        try:
            captured.begin(call)
        except NotCapturable as error:
            self._why_eager = partial(str, error)
            return self._miss(recorder)
        if not self._is_replaying:
            captured.graphs.use(self._executor)
            self._is_replaying = True
        captured.graphs.begin()
        captured.graphs.run(self._executor, recorder)
        captured.end()
        self.num_replays += 1
        self._num_missed = self._num_warm = 0


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(each for module in modules for each in module.parameters())]
