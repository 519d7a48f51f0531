"""Checks of save's arguments, which must be equal on all processes, before anything is written."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from zbpp.checkpoints.errors import CheckpointError
from zbpp.checkpoints.optimizer_states import UNEVEN_OPTIMIZERS
from zbpp.runtime import Pipeline


class UnderWay:
    """A checkpoint. is_open: it is written in the background, and nobody has called its `wait` yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_open = path, False


last_of: WeakKeyDictionary[Pipeline, UnderWay] = WeakKeyDictionary()
"""The last checkpoint of each pipeline."""


def check_arguments(pipeline: Pipeline, optimizer: object, step: object, keep: object) -> None:
    """Raise CheckpointError, on every process, for arguments of `save` that it can't take. Collective.

    Refused are a bad step or keep, arguments that differ between ranks, an optimizer on some ranks only, and
    a save before the `wait` of the one before.
    """
    refusal, last = "", last_of.get(pipeline)
    if type(step) is not int or not 0 <= step < 2**53:
        refusal = f"step={step!r}: write how many steps are done, a whole number from 0 to 2^53"
    elif keep is not None and (type(keep) is not int or keep < 1):
        refusal = f"keep={keep!r}: write how many checkpoints stay, 1 or more"
    elif last is not None and last.is_open:
        refusal = (
            f"{last.path} is written in the background, and nobody has waited for it: call wait() of what "
            "save returned before the next save"
        )
    told = pipeline.place.gather((refusal, f"step={step!r}, keep={keep!r}", optimizer is None))
    for each, *_ in told:
        if each:
            raise CheckpointError(each)
    found = sorted({values for _, values, _ in told})
    if len(found) > 1:
        raise CheckpointError(f"{found[0]} on one rank, {found[1]} on another one: give all ranks the same")
    if len({is_none for *_, is_none in told}) > 1:
        raise CheckpointError(UNEVEN_OPTIMIZERS)
