"""The weights of a run, by the names that they have in the whole model: written stage by stage, and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.checkpoints import Checkpoint, CheckpointError
from zbpp.checkpoints.folders import check_sizes, checkpoints_in, step_of
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import whole_of
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.run_folder import named_in_errors


def save_weights(folder: Path, pipeline: Pipeline, masters: MasterWeights | None = None) -> None:
    """Write stage-0-of-4.safetensors and so on into a folder, each by the rank that owns the stage.

    They hold parameters and buffers, named as `Pipeline.state_dict` names them: all files together are a
    state dict of the whole model. A parameter that has a master is written as its master, in float32. Of all
    copies the first is written; a sharded tensor is written whole. Collective. Raises WriteError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with named_in_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)  # another machine may not have the folder yet
    num_stages = pipeline.timetable.num_stages
    for index in pipeline.stages:
        state = pipeline.state_dict(index, keep_vars=True)
        if masters is not None:
            state = {
                name: masters.of(each) if isinstance(each, nn.Parameter) else each
                for name, each in state.items()
            }
        path = folder / f"stage-{index:0{len(str(num_stages - 1))}}-of-{num_stages}.safetensors"
        copies = {name: _copied(each) for name, each in state.items() if isinstance(each, Tensor)}
        if pipeline.place.is_first:
            unfinished = path.with_suffix(".tmp")
            with named_in_errors(path, SafetensorError):
                try:
                    save_file(copies, unfinished)
                    unfinished.replace(path)
                except (OSError, SafetensorError):
                    unfinished.unlink(missing_ok=True)
                    raise


def _copied(tensor: Tensor) -> Tensor:
    # A copy: safetensors refuses tensors that share memory, as tied weights do.
    return whole_of(tensor.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)


# ----------------------------------------------------------------
# The trained weights in a run's folder, tensor by tensor, by their names in the whole model.


class SavedWeights(NamedTuple):
    """Weights in a folder, each read when it is asked for.

    names: in the whole model. read(name): the tensor, on the CPU.
    """

    names: list[str]
    read: Callable[[str], Tensor]


def weights_of_run(run: Path) -> SavedWeights:
    """The weights that a run has saved at its end (config: save_weights), else its newest whole checkpoint.

    run: the run's folder, or a checkpoint's. Raises ValueError for a folder without weights or with damaged
    ones, and CheckpointError for a checkpoint that a newer zbpp wrote.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is no folder: name the run_dir of a zbpp train")
    if step_of(run) is not None:
        return _of_checkpoint(run)
    if files := sorted(run.glob("stage-*-of-*.safetensors")):
        return _of_stages(files)
    for path in checkpoints_in(run / "checkpoints"):
        try:
            return _of_checkpoint(path)
        except CheckpointError:
            raise  # a newer zbpp wrote it: an older checkpoint would not be the model that the user means
        except ValueError as error:
            print(f"passed over: {error}", flush=True)
    raise ValueError(
        f"{run} holds no weights, neither stage-0-of-....safetensors nor a whole checkpoint: name the "
        "run_dir of a zbpp train with save_weights=true or checkpoint.every=STEPS"
    )


def _of_checkpoint(path: Path) -> SavedWeights:
    """The model's tensors in a checkpoint, without optimizer states."""
    try:
        check_sizes(path)
        found = Checkpoint(path)
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    shapes = found.shapes()
    dtypes = {name: found.dtype_of(f"model.{name}") for name in shapes}

    def read(name: str) -> Tensor:
        values = torch.empty(shapes[name], dtype=dtypes[name])
        found.read({f"model.{name}": values})
        return values

    return SavedWeights([*shapes], read)


def _of_stages(files: Sequence[Path]) -> SavedWeights:
    """The weights in stage-0-of-4.safetensors and so on."""
    from safetensors import SafetensorError, safe_open

    num_stages = int(files[0].stem.rpartition("-")[2])
    if len(files) != num_stages:
        have = ", ".join(path.name for path in files)
        raise ValueError(f"{files[0].parent} holds the weights of a part of the stages: {have}")
    places: dict[str, Any] = {}
    for path in files:
        file: Any
        try:
            # A mapped file would count as memory of this process.
            file = safe_open(path, framework="pt", device="cpu", backend="pread")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file ({error})") from error
        for name in file.keys():  # noqa: SIM118  # no mapping
            places.setdefault(name, file)
    return SavedWeights([*places], lambda name: places[name].get_tensor(name))
