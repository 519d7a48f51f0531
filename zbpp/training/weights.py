"""The weights of a run, by the names that they have in the whole model: written stage by stage, and read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbpp.checkpoints import Checkpoint, CheckpointError
from zbpp.checkpoints.folders import HeldCheckpoint, check_contents, check_sizes, checkpoints_in, step_of
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.mesh import whole_of
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.run_folder import named_in_errors


def save_weights(folder: Path, pipeline: Pipeline, masters: MasterWeights | None = None) -> None:
    """Write stage-0-of-4.safetensors and so on into a folder, each by the rank that owns the stage.

    They hold parameters and buffers, named as `Pipeline.state_dict` names them: all files together are a
    state dict of the whole model. A parameter that has a master is written as its master, in float32. Of all
    copies the first is written; a sharded tensor is written whole. Collective. Raises FolderError.
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

_STAGE_FILE = re.compile(r"stage-(\d+)-of-(\d+)\.safetensors")


class SavedWeights(Protocol):
    """Weights in a folder. Each tensor is read when it is asked for."""

    @property
    def names(self) -> Sequence[str]:
        """The names in the whole model, in the order in which reading them is cheapest."""
        ...

    def num_bytes(self, name: str) -> int:
        """The size of a tensor, in bytes."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises ValueError for a damaged file."""
        ...


def weights_of_run(run: Path) -> SavedWeights:
    """The weights that a run has saved at its end (config: save_weights), else its newest whole checkpoint.

    run: the run's folder, or a checkpoint's. Raises ValueError for a folder without weights.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is no folder: name the run_dir of a zbpp train")
    if step_of(run) is not None:
        return CheckpointWeights(run)
    if any(_STAGE_FILE.fullmatch(path.name) for path in run.iterdir()):
        return StageFiles(run)
    for path in _newest_first(run / "checkpoints"):
        try:
            return CheckpointWeights(path)
        except CheckpointError:
            raise  # a newer zbpp wrote it: an older checkpoint would not be the model that the user means
        except FileNotFoundError:
            print(f"passed over: the run has just removed {path}", flush=True)
        except ValueError as error:
            print(f"passed over: {error}", flush=True)
    raise ValueError(
        f"{run} holds no weights, neither stage-0-of-....safetensors nor a whole checkpoint: name the "
        "run_dir of a zbpp train with save_weights=true or checkpoint.every=STEPS"
    )


def _newest_first(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder. A run that trains may add some meanwhile, and remove others."""
    seen = set[Path]()
    while new := [path for path in checkpoints_in(folder) if path not in seen]:
        seen.add(new[0])
        yield new[0]


class CheckpointWeights:
    """The model's tensors in a checkpoint, without optimizer states. The run may remove it meanwhile.

    Raises FileNotFoundError if it is gone; ValueError if it is damaged; CheckpointError if a newer zbpp wrote
    it.
    """

    def __init__(self, path: Path) -> None:
        self._held = HeldCheckpoint(path)
        held = self._held.path
        try:
            check_contents(held, files := check_sizes(held), files)
            self._checkpoint = Checkpoint(held)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(held), str(path))) from error
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        self._shapes = self._checkpoint.shapes()

    @property
    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def num_bytes(self, name: str) -> int:
        return self._dtype(name).itemsize * prod(self._shapes[name])

    def read(self, name: str) -> Tensor:
        values = torch.empty(self._shapes[name], dtype=self._dtype(name))
        self._checkpoint.read({f"model.{name}": values})
        return values

    def _dtype(self, name: str) -> torch.dtype:
        return self._checkpoint.dtype_of(f"model.{name}")


class StageFiles:
    """The weights in stage-0-of-4.safetensors and so on. Raises ValueError if one is missing or damaged."""

    def __init__(self, run: Path) -> None:
        found = {path: match for path in run.iterdir() if (match := _STAGE_FILE.fullmatch(path.name))}
        counts = {int(match[2]) for match in found.values()}
        stages = {int(match[1]) for match in found.values()}
        if len(counts) > 1 or stages != set(range(max(counts))):
            have = ", ".join(sorted(path.name for path in found))
            raise ValueError(f"{run} holds the weights of a part of the stages: {have}")
        self._places: dict[str, tuple[Any, Path]] = {}
        for path in sorted(found, key=lambda each: int(found[each][1])):
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118  # no mapping
                self._places.setdefault(name, (file, path))

    @property
    def names(self) -> Sequence[str]:
        return list(self._places)

    def num_bytes(self, name: str) -> int:
        part = self._places[name][0].get_slice(name)
        return _SIZES.get(part.get_dtype(), 4) * prod(part.get_shape())

    def read(self, name: str) -> Tensor:
        file, _ = self._places[name]
        tensor: Tensor = file.get_tensor(name)
        return tensor


_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _opened(path: Path) -> Any:
    """The opened file. backend="pread": a mapped file would count as memory of this process."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu", backend="pread")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error})") from error
