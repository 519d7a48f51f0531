"""Saving a checkpoint: all processes agree on it while training stands still, then each writes its part.

all processes   facts -> one gather -> copy (in the background only)     training stands still
each process    plans and writes its tensors, by torch's DCP             training goes on
the first       .metadata, state.json, manifest.json, rename
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbpp.checkpoints import folders, model_states, optimizer_states
from zbpp.checkpoints.folders import CheckpointError
from zbpp.checkpoints.nest import encoded
from zbpp.checkpoints.optimizer_states import UNEVEN_OPTIMIZERS, Masters
from zbpp.checkpoints.writing import Saving, is_first, line_of
from zbpp.job.agreement import gather_or_refuse
from zbpp.runtime import Extra, Pipeline
from zbpp.runtime.processes.groups import close_groups, gloo_group
from zbpp.runtime.rank import Rank
from zbpp.tracebacks import hiding_own_frames


@runtime_checkable
class Stateful(Protocol):
    """A further object that a checkpoint may hold: a scheduler, a LossScale, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


@hiding_own_frames
def save(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int,
    masters: Masters | None = None,
    keep: int | None = None,
    background: bool = False,
    info: Mapping[str, Any] | None = None,
    **states: Stateful,
) -> Saving:
    """Write the checkpoint `folder`/step-N. A folder of this name exists only when it is whole. Collective.

    step: how many steps are done, 0 or more. masters: a MasterWeights; they are saved in place of the 16-bit
    weights. keep: how many checkpoints, the newest ones, stay in the folder; None: all. Those of later steps
    than this one stay, too. step and keep are the same on all ranks. states: further objects with a
    state_dict, such as scheduler=..., loss_scale=...; the first process's states are saved for all. info:
    plain values (JSON) to save as well. Gradients are not saved: save after the optimizer's step.

    background: return when the state is copied to host memory, and write while training goes on; call
    `wait()` of the returned Saving at the end. The next save waits, too.

    Weights and optimizer states get the names of the whole model: `zbpp.load` takes them under any other cut,
    number of ranks, schedule and mesh. Raises CheckpointError, on every process, if the checkpoint can't be
    written; the folder's other checkpoints stay as they are.
    """
    saving = prepared(
        folder, pipeline, optimizer, step=step, masters=masters, keep=keep, info=info, states=states
    )
    if background:
        saving.write_in_background()
    else:
        saving.write()
        saving.wait()
    return saving


class _Saver(Extra):
    """What a pipeline keeps from its first save on: a group to save in, and its last Saving.

    In the group the processes agree while training steps use the pipeline's other groups.
    """

    name = "saver"
    last: Saving | None = None

    def attach(self, rank: Rank) -> None:
        """Make the group."""
        self.group = gloo_group(rank.place, rank.timeout)

    def close(self) -> None:
        """Close the group, unless a thread still saves in it."""
        if self.group is not None and (self.last is None or self.last.is_done):
            close_groups([self.group])


def _saver_of(pipeline: Pipeline) -> _Saver:
    """The pipeline's saver. Collective."""
    found = next((each for each in pipeline.extras if isinstance(each, _Saver)), None)
    if found is None:
        found = _Saver()
        pipeline.use(found)
    if found.last is not None and not found.last.is_awaited:
        found.last.wait()
    return found


def prepared(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    *,
    step: int,
    masters: Masters | None,
    keep: int | None,
    info: Mapping[str, Any] | None,
    states: Mapping[str, Stateful],
) -> Saving:
    """The checkpoint, agreed on by all processes, not written yet. The arguments are those of `save`."""
    place = pipeline.place
    if type(step) is not int or not 0 <= step < 2**53:
        raise CheckpointError(f"step={step!r}: write how many steps are done, a whole number from 0 to 2^53")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r}: write how many checkpoints stay, 1 or more")
    path, tensors = folders.path_of(Path(folder), step), dict[str, Tensor]()
    facts, error = {}, ""
    writes, is_prepared = is_first(place), False
    pipeline.finish_update()  # collective; before anything that may fail on one process alone
    saver = _saver_of(pipeline)
    try:
        json.dumps(info)
        if writes:
            folders.prepare(path)
        is_prepared = writes
        facts = _facts(pipeline, optimizer, masters, tensors)
        mine = states if writes else {}  # a data loader of another replica is at another batch
        facts["states"] = {
            name: encoded(each.state_dict(), f"states.{name}", tensors) for name, each in mine.items()
        }
    except CheckpointError as caught:
        error = line_of(caught)
    except Exception as caught:  # of the user's objects, too: the other processes wait
        error = f"{path} can't be written: {type(caught).__name__}: {line_of(caught)}"
    try:
        parts = gather_or_refuse(error, facts, place.gather, CheckpointError)
        if len({each["optimizer"] is None for each in parts}) > 1:
            raise CheckpointError(UNEVEN_OPTIMIZERS)
    except CheckpointError:
        if is_prepared:
            folders.discard(folders.unfinished(path))
        raise
    whole = _merged(parts, pipeline, step) | {"info": dict(info or {})}
    saver.last = Saving(path, tensors, json.dumps(whole), keep, place, saver.group)
    return saver.last


def _facts(
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    masters: Masters | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """This process's part of state.json; its tensors are added to `tensors`."""
    optimizers = optimizer_states.optimizers_of(optimizer)
    return {
        "model": model_states.collect(pipeline, masters, tensors),
        "optimizer": optimizer_states.collect(pipeline, optimizers, masters, tensors)
        if optimizer is not None
        else None,
    }


def _merged(parts: list[dict[str, Any]], pipeline: Pipeline, step: int) -> dict[str, Any]:
    """state.json from the parts of all processes."""
    model = {**parts[0]["model"], "extra": {}}
    for part in parts:
        model["extra"] = part["model"]["extra"] | model["extra"]
    timetable = pipeline.timetable
    model |= {"num_stages": timetable.num_stages, "is_prefixed": pipeline.has_prefixed_names}
    optimizers = [each["optimizer"] for each in parts]  # None on all processes or on no one
    return {
        "format": folders.FORMAT,
        "step": step,
        "torch": torch.__version__,
        "num_processes": len(parts),
        "timetable": str(timetable),
        "model": model,
        "optimizer": None if optimizers[0] is None else optimizer_states.merged(optimizers),
        "states": parts[0]["states"],
    }
