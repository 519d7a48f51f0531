"""CudaGraphs, a feature: when a step is eager, when it is captured, when it is replayed.

The first two steps of equal inputs (their shapes and numbers) are eager; the second one notes the layouts of
messages. The next such step is captured, then replayed, and so is every later one. A step with other inputs
is eager. What else a step relies on is taken to stay as it was in the capture: see docs/pipeline.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch

from zbpp.features.graphs.capture import CAPTURED, ActionGraphs, Captured, GraphMaker, noting, receive_into
from zbpp.features.graphs.cuda import TorchGraphs
from zbpp.features.graphs.static import Key, StaticGradients, StaticInputs, key_of
from zbpp.runtime.call.feed import Call, Feed, LossGradients
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.layout import Layout, Message, Run
from zbpp.runtime.rank import Rank
from zbpp.schedule import Program
from zbpp.schedule.program import Instruction

_log = logging.getLogger(__name__)

_WARM_UP = 2  # eager steps before the capture


class GiveLosses(NamedTuple):
    """Hand out the losses of a replayed step."""

    def __str__(self) -> str:
        return "Give losses"


class CudaGraphs(Feature):
    """Captures each F, B and W as a CUDA graph and replays it. Results are the same to the last bit.

    maker: captures the graphs; None: what the stages' device has, which on a CPU is nothing: all is eager.

    num_replays: how many steps were replayed.
    """

    name = "cuda_graphs"
    excludes = MappingProxyType(
        {
            "dynamic_shapes": "graphs have fixed shapes; leave one of them out",
            "shard": "FSDP2's hooks gather the weights; write replicate",
            "tensor": "it was not tried on GPUs yet; leave it at 1",
            "activation_offload": "Python starts its copies to the host; leave one of them out",
            "weight_offload": "Python starts its copies to the device; leave one of them out",
            "gradient_release": "Python updates weights in the middle of W; leave one of them out",
            "post_validation": "a step may begin again; leave one of them out",
            "empty_microbatches": "graphs are captured for one timetable: leave it out",
        }
    )

    def __init__(self, maker: GraphMaker | None = None) -> None:
        self._maker, self.num_replays = maker, 0

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        if self._maker is None and rank.device.type == "cuda":
            self._maker = TorchGraphs(rank.device)
        if self._maker is None and rank.index == 0:  # one line, not one of each rank
            _log.warning("CUDA graphs need a GPU: running eagerly")
        self._rank, self._workers, self._is_paused = rank, rank.workers, False
        self._eager: dict[Captured, Run] = {}
        self._now: Mapping[Captured, Run] = self._eager  # what runs in this step
        self._captured: _Captured | None = None
        self._key: Key | None = None  # of the last step's inputs
        self._num_warm = 0  # eager steps in a row with this key
        self._layouts: dict[Captured, Layout] = {}
        self._loss_grads: dict[int, LossGradients] = {}  # by stage: the captured step starts from them
        self._around = ExitStack()  # of an eager step before the capture

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        if call != "step" or self._maker is None:
            return program
        return program._replace(instructions=(*program.instructions, GiveLosses()))

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {GiveLosses: self._give_losses}

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """In each step, run the action as that step does: eagerly, or its graph."""
        if call != "step" or self._maker is None or not isinstance(at, CAPTURED):
            return run
        self._eager[at] = run

        def run_now(message: Message) -> Message:
            return self._now[at](message)

        return run_now

    def begin(self, call: Call) -> None:
        """Choose how this step runs."""
        if call.kind != "step" or self._maker is None:
            return
        feeds = {stage: worker.feed for stage, worker in self._workers.items()}
        key = key_of(feeds)
        self._use_eager()
        if self._is_paused:
            return
        if self._captured is None:
            if key != self._key or self._num_warm < _WARM_UP:
                return self._warm_up(self._maker, key)
            self._captured = self._capture(self._maker, key, feeds)
        if key == self._captured.key:
            self._replay(self._captured, feeds)

    def end(self, call: Call, result: Result) -> None:
        """See Extra. A warm-up, a capture and the first replays may wait for the device."""
        self._around.close()
        if self._maker is not None and self._captured is None:
            self._rank.executors["step"].may_wait = True

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._around.close()

    def close(self) -> None:
        """Drop the graphs and their memory."""
        self._use_eager()
        self._captured = None
        self._eager.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context steps are eager: somebody needs the Python code inside each action."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _use_eager(self) -> None:
        self._now = self._eager
        receive_into(self._rank.executors["step"], {})

    def _warm_up(self, maker: GraphMaker, key: Key) -> None:
        """Let the step run eagerly, where captures run; it notes the layouts of messages."""
        self._num_warm = self._num_warm + 1 if key == self._key else 1
        self._key, self._layouts = key, {}
        self._loss_grads = {stage: worker.feed.loss_grads for stage, worker in self._workers.items()}
        self._now = noting(self._eager, self._layouts)
        self._around.enter_context(maker.warming_up())

    def _capture(self, maker: GraphMaker, key: Key, feeds: Mapping[int, Feed]) -> _Captured:
        """Capture the step of these feeds; afterwards the workers have begun it anew."""
        gradients = StaticGradients(each for module in self._rank.modules for each in module.parameters())
        gradients.attach()
        torch.clear_autocast_cache()  # a graph would read a copy of a weight in it, which may go
        try:
            inputs = StaticInputs(feeds, self._rank.device)
            self._begin(inputs.feeds)
            graphs = ActionGraphs(self._rank, self._eager, maker, self._layouts)
            gradients.captured()
        except Exception as error:
            error.add_note("a step can't be captured (see docs/pipeline.md): leave cuda_graphs out")
            raise
        finally:
            torch.clear_autocast_cache()  # it may hold copies that the capture never computed
            gradients.detach()
        self._begin(feeds)
        return _Captured(key, inputs, gradients, graphs)

    def _begin(self, feeds: Mapping[int, Feed]) -> None:
        for stage, worker in self._workers.items():
            worker.begin(feeds[stage]._replace(loss_grads=self._loss_grads[stage]))

    def _replay(self, captured: _Captured, feeds: Mapping[int, Feed]) -> None:
        captured.gradients.begin()
        captured.inputs.load(feeds)
        for stage, feed in feeds.items():
            self._loss_grads[stage].set(feed.loss_grads.value)  # loss_scale may have changed
        self._now = captured.graphs.replays
        receive_into(self._rank.executors["step"], captured.graphs.received)

    def _give_losses(self, at: GiveLosses) -> None:
        """The step's last instruction: give out the losses, if it was replayed."""
        if self._captured is not None and self._now is self._captured.graphs.replays:
            self._captured.graphs.give_losses()
            self.num_replays += 1


class _Captured(NamedTuple):
    """key: of the inputs that were captured."""

    key: Key
    inputs: StaticInputs
    gradients: StaticGradients
    graphs: ActionGraphs
