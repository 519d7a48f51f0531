"""What a resolved program calls, with what, and what is left when it ends. Messages: see test_links.py."""

import pytest
import torch

from zbpp import lower, plan
from zbpp.runtime.executor import Executor
from zbpp.schedule import Op, consumes

CPU = torch.device("cpu")


class Made(str):
    """Stands for a tensor; says who made it."""

    _version = 0


class Worker:
    """Stands for a stage: gives out tensors that say who made them, and notes what it was given."""

    def __init__(self, index, num_stages, log):
        self.index, self.is_last, self.log = index, index == num_stages - 1, log

    def act(self, op, microbatch, message):
        self.log.append((f"{self.index}{op}{microbatch}", message))
        return () if op == "W" else (Made(f"made by {self.index}{op}{microbatch}"),)


METHODS = {op: lambda worker, m, message, op=op: worker.act(op.name, m, message) for op in Op}


def executor(timetable, methods=METHODS, log=None):
    log = [] if log is None else log
    workers = {s: Worker(s, timetable.num_stages, log) for s in range(timetable.num_stages)}
    (program,) = lower(timetable)
    return Executor(program, workers, methods, timetable.num_stages, {}, CPU), log


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "interleaved_zb"])
def test_every_action_runs_once_in_order_with_what_its_producer_made(schedule):
    timetable = plan(schedule, 1, 4)
    run, log = executor(timetable)
    for _ in range(2):  # nothing of one run is in the next
        log.clear()
        run.run()
        assert [name for name, _ in log] == list(map(str, timetable.rows[0]))
        for action, (_, message) in zip(timetable.rows[0], log, strict=True):
            kinds = [value.name for value in consumes(action) if value.name in ("x", "g")]
            assert message == tuple(f"made by {producer(timetable, action)}" for _ in kinds)


def producer(timetable, action):
    """Who makes what an action takes: for F the F before, for B the B behind, at the end F."""
    stage, op, microbatch = action
    if op == Op.F:
        return f"{stage - 1}F{microbatch}"
    if stage == timetable.num_stages - 1:
        return f"{stage}F{microbatch}"
    backward = next(a for a in timetable.rows[0] if a.stage == stage + 1 and a.op in (Op.B, Op.BW))
    return f"{stage + 1}{backward.op}{microbatch}"


def test_an_error_of_a_stage_is_raised_as_it_is_with_a_note_of_its_place():
    def fail(worker, microbatch, message):
        raise RuntimeError("planted")

    run, _ = executor(plan("1f1b", 1, 2), {**METHODS, Op.BW: fail})
    with pytest.raises(RuntimeError) as raised:
        run.run()
    assert str(raised.value) == "planted"
    assert raised.value.__notes__ == ["in 0BW0 (the backward, of stage 0, microbatch 0) on rank 0"]
