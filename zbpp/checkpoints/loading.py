"""Loading a checkpoint under this job's cut, schedule and mesh, whichever it was written under."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from zbpp.checkpoints import model_states
from zbpp.checkpoints.errors import CheckpointError
from zbpp.checkpoints.folders import checkpoints_in, set_aside, step_of
from zbpp.checkpoints.nest import decoded, tensor_keys
from zbpp.checkpoints.optimizer_states import Masters, Restored, optimizers_of
from zbpp.checkpoints.random_states import set_random_states
from zbpp.checkpoints.reading import Checkpoint, newest_whole
from zbpp.checkpoints.saving import Stateful
from zbpp.runtime import Pipeline
from zbpp.runtime.mesh import Place


def load(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    masters: Masters | None = None,
    missing_ok: bool = False,
    **states: Stateful,
) -> int:
    """Go on from the newest whole checkpoint of a folder; returns how many steps were done. Collective.

    folder: with checkpoints that `zbpp.save` wrote, or one of them (`folder`/step-N). A damaged one is
    passed over, which the first process says. missing_ok: return 0, and change nothing, if the folder has
    none. The other arguments are those of `zbpp.save`; what is left out is not loaded.

    Any number of ranks, stages, replicas, shards and tensor-parallel processes may have written it. Raises
    CheckpointError, on every process, for a checkpoint of another model or optimizer (it names the first
    tensors that differ), and if no checkpoint is whole; nothing is changed then. Runs no code from the
    checkpoint.
    """
    folder, place = Path(folder), pipeline.place
    if missing_ok and step_of(folder) is None and not place.broadcast(checkpoints_in(folder)):
        return 0
    found = opened(folder, place)
    restore(found, pipeline, optimizer, masters=masters, states=states)
    return found.step


def opened(folder: Path, place: Place) -> Checkpoint:
    """The newest whole checkpoint of a folder. Collective.

    The first process says which others are damaged, and renames them: their steps will be saved again.
    """
    path, damaged = newest_whole(folder, place)
    if damaged and place.is_first and place.rank == 0:
        complaints = "; ".join(f"{each} is damaged: {why}" for each, why in damaged.items())
        print(f"{complaints}; going on from {path}", flush=True)
        for each in damaged:
            set_aside(each)
    return Checkpoint(path)


def restore(
    checkpoint: Checkpoint,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    *,
    masters: Masters | None,
    states: dict[str, Stateful],
    keep_options: bool = False,
) -> None:
    """Give everything the state of the checkpoint. keep_options: the optimizers' options stay as they are.

    Collective. Raises CheckpointError, on every process, before anything is changed.
    """
    pipeline.settle()
    _check_model(checkpoint, pipeline)
    refusal, model, restored = "", None, None
    try:
        model = model_states.RestoredModel(pipeline, masters, checkpoint.facts["model"], checkpoint)
        restored = _optimizers(checkpoint, pipeline, optimizers_of(optimizer), masters)
        _check_states(checkpoint, states)
        targets = model.targets | (restored.targets if restored else {}) | _targets(checkpoint, states)
        checkpoint.read(targets)
    except (CheckpointError, ValueError) as error:
        refusal = str(error)
    _agree(refusal, pipeline.place)
    assert model is not None  # there was no refusal
    model.apply()
    if restored is not None:
        restored.apply(keep_options=keep_options)
    for name, each in states.items():
        each.load_state_dict(decoded(checkpoint.facts["states"][name], targets.__getitem__))
    _restore_random(checkpoint, pipeline.place)


def _check_model(checkpoint: Checkpoint, pipeline: Pipeline) -> None:
    """Raise CheckpointError, on every process, if the model's tensors are not the checkpoint's."""
    own = {
        name: tuple(value.shape) for name, value in pipeline.state_dict().items() if hasattr(value, "shape")
    }
    everyones = {name for names in pipeline.place.gather(sorted(own)) for name in names}
    found = model_states.differences(own, everyones, checkpoint.shapes())
    num_stages = pipeline.timetable.num_stages
    refusal = model_states.refusal(found, checkpoint.facts["model"], num_stages) if found else ""
    _agree(f"{checkpoint.path}: {refusal}" if refusal else "", pipeline.place)


def _optimizers(
    checkpoint: Checkpoint, pipeline: Pipeline, optimizers: Sequence[Optimizer], masters: Masters | None
) -> Restored | None:
    if not optimizers:
        return None
    facts = checkpoint.facts["optimizer"]
    if facts is None:
        raise CheckpointError(
            f"{checkpoint.path} was saved without an optimizer: load without one, to begin with fresh states"
        )
    return Restored(pipeline, optimizers, masters, facts, checkpoint)


def _check_states(checkpoint: Checkpoint, states: dict[str, Stateful]) -> None:
    for name in states:
        if name not in checkpoint.facts["states"]:
            raise CheckpointError(
                f"{checkpoint.path} has no state of {name}; it has "
                f"{', '.join(checkpoint.facts['states']) or 'none beside model and optimizer'}: leave it out"
            )


def _targets(checkpoint: Checkpoint, states: dict[str, Stateful]) -> dict[str, Any]:
    import torch

    keys = [key for name in states for key in tensor_keys(checkpoint.facts["states"][name])]
    return {key: torch.empty(checkpoint.size_of(key), dtype=checkpoint.dtype_of(key)) for key in keys}


def _restore_random(checkpoint: Checkpoint, place: Place) -> None:
    """Each process goes on with its own random numbers, if there are as many processes as there were."""
    mine = dist.get_rank() if dist.is_initialized() else 0
    everyone = place.gather(mine)
    saved = checkpoint.facts["random"]
    if len(saved) == len(everyone):
        set_random_states(saved[everyone.index(mine)])


def _agree(refusal: str, place: Place) -> None:
    for each in place.gather(refusal):
        if each:
            raise CheckpointError(each)
