"""Are the copies of each tensor equal? Compared by a digest of their bits, over the whole mesh in one gather.

what                                   its copies are on
parameters of a stage                  replicas; processes of `tensor` and `shard` that hold the same part
tied parameters                        also the other ranks that have the tie
optimizer states, master weights       where the parameters' copies are

Buffers are left out: after a step each replica has counted its own rows, and the next step begins with the
first one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.job.agreement import AgreementError, check_equal
from zbpp.runtime.digest import digest
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.processes.dtensors import dimensions_of, is_split

_SHOWN = 5  # tensors in an error

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
    parameter whole. Compared are parameters, with optimizer its states and its options for each parameter,
    with masters master weights. The error names the tensors and the values' ranks. Returns how many tensors
    have copies. Waits for a pending update. Collective over the pipeline or its mesh.
    """
    pipeline.finish_update()
    _check_options(pipeline, optimizer, masters)
    held = [*_parameters(pipeline, optimizer, masters)]
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
                    "equal copies get equal updates. Has code changed the weights of some ranks only, as an "
                    "optimizer with other options does? If not, memory or arithmetic of a machine is at "
                    "fault. Go on from an earlier checkpoint",
                ]
            )
        )
    return sum(len(each) > 1 for by_digest in ranks.values() for each in by_digest.values())


def _check_options(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, masters: Masters | None
) -> None:
    """Raise AgreementError if the ranks' optimizers have other options for copies of one parameter."""
    if optimizer is None:
        return
    options = {
        id(each): {name: repr(group.get(name)) for name in optimizer.defaults}
        for group in optimizer.param_groups
        for each in group["params"]
    }
    mine: dict[str, dict[str, str]] = {}
    for names, parameter in pipeline.parameter_names():
        held = parameter if masters is None else masters.of(parameter)
        mine[min(names)] = options.get(id(held), {})
    everyone = pipeline.place.gather((dist.get_rank() if dist.is_initialized() else 0, mine))
    for name in sorted({name for _, each in everyone for name in each}):
        having = [(rank, each[name]) for rank, each in everyone if name in each]
        ranks, found = zip(*having, strict=True)
        what = (
            f"options of the optimizer for {name}, so that its copies drift apart: group parameters by "
            "pipeline.parameter_names(), which has all names of each on every rank"
        )
        check_equal(what, found, ranks)


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


def _text_of(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(set(ranks))))}"
