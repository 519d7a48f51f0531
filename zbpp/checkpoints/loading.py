"""Loading a checkpoint under this job's cut, schedule and mesh, whichever it was written under."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zbpp.checkpoints import model_states
from zbpp.checkpoints.folders import CheckpointError, checkpoints_in, set_aside, step_of
from zbpp.checkpoints.nest import decoded, tensor_keys
from zbpp.checkpoints.optimizer_states import (
    FRESH,
    UNEVEN_OPTIMIZERS,
    Masters,
    Restored,
    optimizers_of,
)
from zbpp.checkpoints.reading import Checkpoint, newest_whole
from zbpp.checkpoints.saving import Stateful
from zbpp.job.agreement import gather_or_refuse, refuse_together
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.tracebacks import hiding_own_frames


@hiding_own_frames
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

    folder: the folder that `zbpp.save` was given, one checkpoint in it (`folder`/step-N), or the folder of a
    run. Damaged checkpoints are passed over, and the first process prints why. missing_ok: if the folder has
    no checkpoint, return 0 and change nothing. The other arguments are those of `zbpp.save`; a state that is
    left out is not loaded. Gradients are set to None, since a checkpoint holds none.

    The checkpoint may have been written by any number of ranks, stages, replicas, shards and tensor-parallel
    processes. Raises CheckpointError, on every process, for a checkpoint of another model or optimizer (the
    error names the first tensors that differ), and if no checkpoint is whole; nothing is changed then. Runs
    no code from the checkpoint.
    """
    place = pipeline.place
    source, refusal = place.broadcast(_source(Path(folder)))
    if refusal:
        raise CheckpointError(refusal)
    if source is None and missing_ok:
        return 0
    found = opened(source or Path(folder), place)
    restore(found, pipeline, optimizer, masters=masters, states=states)
    return found.step


def _source(folder: Path) -> tuple[Path | None, str]:
    """(the folder with checkpoints, or one checkpoint; None if there are none), and what is wrong, or ""."""
    if step_of(folder) is not None and not folder.exists():
        others = ", ".join(path.name for path in checkpoints_in(folder.parent)) or "no checkpoint"
        return None, f"{folder} does not exist; {folder.parent} holds {others}"
    for each in (folder, folder / "checkpoints"):  # a run's folder
        if step_of(each) is not None or checkpoints_in(each):
            return each, ""
    return None, ""


def opened(folder: Path, place: MeshPosition, *, is_own: bool = True) -> Checkpoint:
    """The newest whole checkpoint of a folder. Collective. Raises CheckpointError on every process.

    The first process prints which newer checkpoints are damaged. is_own: whether this job saves into the
    folder; damaged checkpoints are then renamed, since their steps will be saved again.
    """
    path, damaged = newest_whole(folder, place)
    if damaged and place.is_first and place.rank == 0:
        complaints = "; ".join(f"{each} is damaged: {why}" for each, why in damaged.items())
        print(f"{complaints}; going on from {path}", flush=True)
        for each in damaged if is_own else ():
            set_aside(each)
    found, refusal = None, ""
    try:
        found = Checkpoint(path)
    except CheckpointError as error:
        refusal = str(error)
    refuse_together(refusal, place.gather, CheckpointError)
    assert found is not None  # there was no refusal
    return found


def restore(
    checkpoint: Checkpoint,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    *,
    masters: Masters | None,
    states: dict[str, Stateful],
    keep_options: bool = False,
) -> None:
    """Give the pipeline, the optimizers and `states` the values of the checkpoint. Collective.

    keep_options: the optimizers' options stay as they are. Raises CheckpointError, on every process: before
    anything is changed, or, if an object refuses its state, with the words "loaded in part".
    """
    pipeline.finish_update()
    _check_model(checkpoint, pipeline)
    refusal, model, restored = "", None, None
    try:
        model = model_states.RestoredModel(pipeline, masters, checkpoint.facts["model"], checkpoint)
        restored = _optimizers(checkpoint, pipeline, optimizers_of(optimizer), masters)
        _check_states(checkpoint, states)
        targets = model.targets | (restored.targets if restored else {}) | _targets(checkpoint, states)
        checkpoint.read(targets)
    except Exception as error:  # the other processes wait
        refusal = _message_of(error, checkpoint)
    have_none = gather_or_refuse(refusal, optimizer is None, pipeline.place.gather, CheckpointError)
    if len(set(have_none)) > 1:
        raise CheckpointError(UNEVEN_OPTIMIZERS)
    assert model is not None  # there was no refusal
    try:
        model.apply()
        _forget_gradients(pipeline, optimizers_of(optimizer))
    except Exception as error:
        refusal = f"{_message_of(error, checkpoint)}; it is loaded in part"
    refuse_together(refusal, pipeline.place.gather, CheckpointError)
    try:
        if restored is not None:
            restored.apply(keep_options=keep_options)
        for name, each in states.items():
            each.load_state_dict(decoded(checkpoint.facts["states"][name], targets.__getitem__))
    except Exception as error:
        refusal = f"{_message_of(error, checkpoint)}; it is loaded in part"
    refuse_together(refusal, pipeline.place.gather, CheckpointError)


def _message_of(error: Exception, checkpoint: Checkpoint) -> str:
    is_known = isinstance(error, CheckpointError | ValueError)
    return str(error) if is_known else f"{checkpoint.path} can't be loaded ({type(error).__name__}: {error})"


def _forget_gradients(pipeline: Pipeline, optimizers: Sequence[Optimizer]) -> None:
    """Set all gradients to None: they belong to the weights before."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    for each in (*pipeline.parameters(), *(each for group in groups for each in group)):
        each.grad = None


def _check_model(checkpoint: Checkpoint, pipeline: Pipeline) -> None:
    """Raise CheckpointError, on every process, if the model's tensors are not the checkpoint's."""
    own: dict[str, tuple[int, ...]] = {}
    saved: dict[str, tuple[int, ...]] = {}
    refusal = ""
    try:
        state = pipeline.state_dict().items()
        own = {name: () if model_states.is_extra(name) else tuple(each.shape) for name, each in state}
        saved = checkpoint.shapes() | dict.fromkeys(checkpoint.facts["model"]["extra"], ())
    except Exception as error:  # the other processes wait
        refusal = _message_of(error, checkpoint)
    everyone = gather_or_refuse(refusal, sorted(own), pipeline.place.gather, CheckpointError)
    everywhere = {name for names in everyone for name in names}
    found = model_states.differences(own, everywhere, saved)
    if found:
        num_stages = pipeline.timetable.num_stages
        text = model_states.refusal(found, checkpoint.facts["model"], num_stages)
        refusal = f"{checkpoint.path}: {text}"
    refuse_together(refusal, pipeline.place.gather, CheckpointError)


def _optimizers(
    checkpoint: Checkpoint, pipeline: Pipeline, optimizers: Sequence[Optimizer], masters: Masters | None
) -> Restored | None:
    if not optimizers:
        return None
    facts = checkpoint.facts["optimizer"]
    if facts is None:
        raise CheckpointError(f"{checkpoint.path} was saved without an optimizer: {FRESH}")
    return Restored(pipeline, optimizers, masters, facts, checkpoint)


def _check_states(checkpoint: Checkpoint, states: dict[str, Stateful]) -> None:
    for name in states:
        if name not in checkpoint.facts["states"]:
            raise CheckpointError(
                f"{checkpoint.path} has no state of {name}; it has "
                f"{', '.join(checkpoint.facts['states']) or 'none beside model and optimizer'}: leave it out"
            )


def _targets(checkpoint: Checkpoint, states: dict[str, Stateful]) -> dict[str, Any]:
    keys = [key for name in states for key in tensor_keys(checkpoint.facts["states"][name])]
    return {key: torch.empty(checkpoint.size_of(key), dtype=checkpoint.dtype_of(key)) for key in keys}
