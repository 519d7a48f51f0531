"""Are the copies of each tensor equal? Compared by checksum, over the whole mesh in one gather.

what                                   its copies are on
parameters of a stage                  replicas; processes of `tensor` and `shard` that hold the same part
tied parameters                        also the other ranks, and other sharded stages, that have the tie
optimizer states, master weights       where the parameters' copies are
buffers (BatchNorm's statistics)       replicas and shards: after each step all have the first one's

A tensor is known by a key, a hash of its name and of the part that the process holds. Tensors with one key
must have one checksum; nothing else has to be known of the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.checksums import checksum
from zbpp.runtime.mesh import TENSOR, Place, dimensions_of, is_split, local_of
from zbpp.runtime.world import AgreementError
from zbpp.seeding import seed_of

_SHOWN = 5  # tensors in an error


class Held(NamedTuple):
    """A tensor of this process. Its copies are the tensors of any process that have the same key."""

    key: int
    text: str  # head.weight of stage 3
    tensor: Tensor


def held_parameters(
    names: Iterable[tuple[tuple[str, ...], nn.Parameter]],
    texts: Mapping[int, str],
    place: Place,
    optimizer: torch.optim.Optimizer | None,
    masters: Mapping[nn.Parameter, Tensor],
) -> Iterator[Held]:
    """Parameters, their master weights, and their optimizer states.

    names: as Pipeline.parameter_names gives them. texts: by id of the parameter. masters: by parameter.
    """
    for all_names, parameter in names:
        placements = dimensions_of(parameter)
        split = [(name, place.coordinate(name)) for name, each in placements.items() if is_split(each)]
        identity, text = (min(all_names), str(split)), texts[id(parameter)]
        yield Held(seed_of("parameter", *identity), text, parameter)
        master = masters.get(parameter, parameter)
        if master is not parameter:
            yield Held(seed_of("master", *identity), f"the master weights of {text}", master)
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(master, {})
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield Held(seed_of("state", name, *identity), f"{name} of {text}", value)


def held_buffers(buffers: Iterable[tuple[str, Tensor]], place: Place) -> Iterator[Held]:
    """Buffers; each with its text, which names the stage."""
    for text, buffer in buffers:
        yield Held(seed_of("buffer", text, place.coordinate(TENSOR)), f"the buffer {text}", buffer)


def check_copies(held: Iterable[Held], place: Place, num_steps: int) -> bool:
    """Whether any tensor has a copy; all processes of the mesh get the same answer. Collective.

    Raises AgreementError, on all processes, if copies of a tensor differ.
    """
    mine = list(held)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sums = _values([local_of(each.tensor) for each in mine])
    found: dict[int, dict[int, list[int]]] = {}  # key -> checksum -> ranks
    for other, keys in place.gather((rank, list(zip([each.key for each in mine], sums, strict=True)))):
        for key, value in keys:
            found.setdefault(key, {}).setdefault(value, []).append(other)
    different = {key: by_value for key, by_value in found.items() if len(by_value) > 1}
    if not different:
        return any(len(ranks) > 1 for by_value in found.values() for ranks in by_value.values())
    texts: dict[int, str] = {}
    for told in place.gather({each.key: each.text for each in mine if each.key in different}):
        texts = told | texts
    lines = [f"  {texts[key]}: {_who(by_value.values())}" for key, by_value in different.items()]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise AgreementError(
        "\n".join(
            [
                f"copies of one tensor differ after step {num_steps}:",
                *lines[:_SHOWN],
                *more,
                "equal copies get equal updates, so memory or arithmetic of a machine is at fault, or code "
                "changed the weights of some ranks only: go on from an earlier checkpoint",
            ]
        )
    )


def _values(tensors: Iterable[Tensor]) -> list[int]:
    """Their checksums; each device is waited for once."""
    sums = [checksum(each) for each in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(number)
    values = [0] * len(sums)
    for numbers in by_device.values():
        for number, value in zip(
            numbers, torch.stack([sums[number] for number in numbers]).tolist(), strict=True
        ):
            values[number] = value
    return values


def _who(groups: Iterable[list[int]]) -> str:
    """`rank 3 differs from the majority, ranks 1, 5, 7`; without a majority `rank 1 | rank 3`."""
    parts = sorted((sorted(each) for each in groups), key=len, reverse=True)
    total = sum(map(len, parts))
    if total > 2 and 2 * len(parts[0]) > total:
        others = sorted(rank for part in parts[1:] for rank in part)
        verb = "differs" if len(others) == 1 else "differ"
        return f"{_ranks(others)} {verb} from the majority, {_ranks(parts[0])}"
    return "different on " + " and on ".join(map(_ranks, parts))


def _ranks(ranks: list[int]) -> str:
    counted = sorted(Counter(ranks))
    return f"{'rank' if len(counted) == 1 else 'ranks'} {', '.join(map(str, counted))}"
