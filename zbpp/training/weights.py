"""The weights of each stage in a file of its own, by the names that they have in the whole model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.mesh import whole_of
from zbpp.training.master_weights import MasterWeights
from zbpp.training.run_files import named_in_errors


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
