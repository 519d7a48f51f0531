"""Are the copies of each tensor equal? Compared by a digest of their bits, over the whole mesh in one gather.

what                                   its copies are on
parameters of a stage                  replicas; processes of `tensor` and `shard` that hold the same part
tied parameters                        also the other ranks that have the tie
optimizer states, master weights       where the parameters' copies are
buffers (BatchNorm's statistics)       replicas and shards: after each step all have the first one's, except
                                       those with persistent=False
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.job.agreement import AgreementError
from zbpp.runtime.dtensors import dimensions_of, is_split, local_of
from zbpp.runtime.mesh import TENSOR
from zbpp.runtime.parameters import persistent_buffers
from zbpp.runtime.pipeline import Pipeline

_SHOWN = 5  # tensors in an error
_CHUNK = 2**22  # words of a digest at a time: bounds the memory that it takes
_ODD = 0x9E3779B97F4A7C15 - 2**64  # its bits look random: those of the golden ratio

Key = tuple[str, ...]  # what a tensor is; tensors of one key are copies


class Masters(Protocol):
    """See zbpp.MasterWeights."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a parameter, or the parameter itself."""


def check_replicas(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None = None, *, masters: Masters | None = None
) -> int:
    """Raise AgreementError, on every process, if copies of one tensor have different bits.

    Copies are on replicas, on ranks that share a tied parameter, and on tensor-parallel processes that hold a
    parameter whole. Compared are parameters and buffers, with optimizer its states, with masters master
    weights. The error names the tensors and the values' ranks. Returns how many tensors have copies. Waits
    for a pending update. Collective over the pipeline or its mesh.
    """
    pipeline.finish_update()
    held = [*_parameters(pipeline, optimizer, masters), *_buffers(pipeline)]
    digests = torch.stack([digest(each).to(pipeline.device) for _, each in held]).tolist() if held else []
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = list(zip((key for key, _ in held), digests, strict=True))
    ranks: dict[Key, dict[int, list[int]]] = {}  # by digest
    for other, theirs in pipeline.place.gather((rank, mine)):
        for key, value in theirs:
            ranks.setdefault(key, {}).setdefault(value, []).append(other)
    different = [
        f"{' '.join(key)}: different on {' and on '.join(map(_text_of, by_digest.values()))}"
        for key, by_digest in ranks.items()
        if len(by_digest) > 1
    ]
    if different:
        more = [f"and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        raise AgreementError(
            "\n  ".join(
                [
                    f"copies of one tensor differ after step {pipeline.num_steps}:",
                    *different[:_SHOWN],
                    *more,
                    "equal copies get equal updates, so memory or arithmetic of a machine is at fault, or "
                    "code changed the weights of some ranks only: go on from an earlier checkpoint",
                ]
            )
        )
    return sum(len(each) > 1 for by_digest in ranks.values() for each in by_digest.values())


def _parameters(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, masters: Masters | None
) -> Iterator[tuple[Key, Tensor]]:
    """Parameters, their master weights, and their optimizer states."""
    for names, parameter in pipeline.parameter_names():
        placements = dimensions_of(parameter).items()
        split = [f"{name} {pipeline.place.coordinate(name)}" for name, each in placements if is_split(each)]
        key = (min(names), *split)
        yield key, parameter
        master = parameter if masters is None else masters.of(parameter)
        if master is not parameter and parameter.requires_grad:
            yield ("the master weights of", *key), master
        state = {} if optimizer is None else optimizer.state.get(master, {})
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield (f"{name} of", *key), value


def _buffers(pipeline: Pipeline) -> Iterator[tuple[Key, Tensor]]:
    part = f"tensor {pipeline.place.coordinate(TENSOR)}"
    for index, stage in pipeline.stages.items():
        for name, buffer in persistent_buffers(stage):
            yield (f"the buffer {name} of stage {index}", part), buffer


def _text_of(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(set(ranks))))}"


def digest(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device; it depends on all bits of the local part and on their places.

    The sum of the words, each times an odd number of its own. The sum is exact, in whatever order a device
    adds, and a change of one word always changes it. Nothing here waits for the device.
    """
    plain = local_of(tensor.detach()).resolve_conj().resolve_neg().contiguous().view(-1)
    words = plain.view({1: torch.int8, 2: torch.int16}.get(plain.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        weights = torch.arange(len(chunk), device=words.device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + weights.mul_(chunk).sum()
    return total
