"""Runs and records the actions of torch's pipeline stages, which torch's runtime calls one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zbpp.observers.record import StepRecord
from zbpp.schedule import Action, Op

Around = Callable[[Action, Callable[[], Any]], Any]
"""Runs an action by its function, and returns what the function returns."""


def recording(record: StepRecord, row: list[Action]) -> Around:
    """Begin a step in the record. Each action that runs goes to the end of the row, and its times there."""
    mark = record.begin(row)

    def around(action: Action, run: Callable[[], Any]) -> Any:
        row.append(action)
        mark()
        result = run()
        mark()
        return result

    return around


@contextmanager
def stages_run_by(stages: Sequence[Any], around: Around) -> Iterator[None]:
    """Inside, `around` runs each action of torch's stages."""
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    for stage in stages:
        for name in names:
            setattr(stage, name, _run_by(around, stage, name))
    try:
        yield
    finally:
        for stage in stages:
            for name in names:
                delattr(stage, name)


def _run_by(around: Around, stage: Any, name: str) -> Any:
    method = getattr(stage, name)

    def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        is_whole = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        ops = {"forward_one_chunk": Op.F, "backward_one_chunk": Op.BW if is_whole else Op.B}
        action = Action(stage.stage_index, ops.get(name, Op.W), microbatch)
        return around(action, lambda: method(microbatch, *args, **kwargs))

    return run
