"""The weights of each stage in a file of its own, by the names that they have in the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from zbpp.runtime.world import gather


def save_weights(folder: Path, stages: Mapping[int, nn.Module], num_stages: int) -> list[str]:
    """Write stage-0-of-4.safetensors and so on into a folder, each by the rank that owns the stage.

    Parameters and buffers. Returns the names that several stages use for tensors of their own, on every rank:
    files with such names can't be put together. Collective.
    """
    from safetensors.torch import save_file

    width = len(str(num_stages - 1))
    names = []
    for index, stage in stages.items():
        tensors = {k: _plain(v) for k, v in stage.state_dict().items() if isinstance(v, torch.Tensor)}
        path = folder / f"stage-{index:0{width}}-of-{num_stages}.safetensors"
        unfinished = path.with_suffix(".tmp")
        save_file(tensors, unfinished)
        unfinished.replace(path)
        names += list(tensors)
    counts = Counter(name for each in gather(names) for name in each)
    return sorted(name for name, count in counts.items() if count > 1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: safetensors refuses tensors that share memory, as tied weights do.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
