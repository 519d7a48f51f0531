"""Recorder, which measures steps; ProfilerNames, which names their instructions.

with pipeline.using(zbpp.Recorder()) as recorder:
    pipeline.step(x, target=y)
timeline = recorder.timeline()
"""

from __future__ import annotations

from torch import Tensor
from torch.profiler import record_function

from zbpp.autograd.models.exchange import Pending, RowExchange, Transfer, exchanges_in
from zbpp.observers.record import StepRecord
from zbpp.observers.timeline import measured_timeline
from zbpp.runtime.call.feed import Call
from zbpp.runtime.extra import Background, Observer
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.schedule import Reduce, Timeline
from zbpp.schedule.program import Instruction


class Recorder(Observer):
    """Measures each instruction of a step; a later step replaces the measured one.

    record: where the times go; None: a StepRecord of its own.
    """

    name = "recorder"

    def __init__(self, record: StepRecord | None = None) -> None:
        self._given = record

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank = rank
        self.record = StepRecord(rank.device) if self._given is None else self._given
        self._transfers: list[tuple[RowExchange, Transfer]] = []
        for exchange in exchanges_in(worker.module for worker in rank.workers.values()):
            assert exchange.transfer is not None
            self._transfers.append((exchange, exchange.transfer))
            exchange.transfer = self._timed(exchange.transfer)

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        if call != "step":
            return run

        def measured(message: Message) -> Message:
            self._mark()
            result = run(message)
            self._mark()
            return result

        return measured

    def background(self, at: Instruction) -> Background | None:
        """See Observer."""
        match at:
            case Reduce(stage):
                return lambda: self.record.reduction(stage)
            case _ if hasattr(at, "is_out") and hasattr(at, "value"):  # a copy out of the device, or back
                return self.record.copy(at.value, is_out=at.is_out)
        return None

    def begin(self, call: Call) -> None:
        """See Extra."""
        self._is_measured = call.kind == "step"
        if self._is_measured:
            self._mark = self.record.begin(self._rank.executors["step"].instructions)

    def close(self) -> None:
        """See Extra."""
        for exchange, transfer in self._transfers:
            exchange.transfer = transfer

    def _timed(self, transfer: Transfer) -> Transfer:
        def start(rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Pending:
            pending = transfer(rows, send_counts, receive_counts)
            return _TimedPending(pending, self.record) if self._is_measured else pending

        return start

    def timeline(self) -> Timeline:
        """The last step as it ran on all ranks; it starts at 0 ms. Collective.

        peak_memory as `measured_timeline` has it. Raises RuntimeError if no step was recorded.
        """
        if self.record.is_empty:
            raise RuntimeError("no step was recorded: run one inside `with pipeline.using(recorder):`")
        return measured_timeline(self.record, self._rank.followed, self._rank.place.pipeline)


class _TimedPending:
    """A transfer under way; the wait for its end is recorded."""

    def __init__(self, pending: Pending, record: StepRecord) -> None:
        self._pending, self._record = pending, record
        self.is_done = pending.is_done

    def wait(self) -> Tensor:
        """See Pending."""
        ended = self._record.exchange()
        received = self._pending.wait()
        ended()
        return received


class ProfilerNames(Observer):
    """Shows torch's profiler the instructions of all calls by their text, `2F5`."""

    name = "profiler_names"

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""

        def named(message: Message) -> Message:
            with record_function(text):
                return run(message)

        text = str(at)
        return named
