"""A chain of modules, cut into stages that hold the modules themselves, under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from zbpp.partition import check_counts, partition

Children = list[tuple[str, nn.Module]]
Ties = dict[str, tuple[int, str]]
"""{name of a parameter: the stage, and the name in it, that has the same one}."""


class SequentialStage(nn.Module):
    """Some children of an nn.Sequential, called in turn. They keep the names that they have in it."""

    def __init__(self, children: Children, tied: Ties, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tied_parameters = tied
        self._is_first, self._is_last = is_first, is_last
        for name, child in children:
            self.add_module(name, child)

    def forward(self, *values: Any) -> Any:
        # Inside an nn.Sequential a tuple is one value; between stages its elements are separate arguments.
        if len(values) != 1 and self._is_first:
            raise TypeError(
                f"the first stage got {len(values)} inputs: a chain takes one value, as nn.Sequential does"
            )
        value = values[0] if len(values) == 1 else values
        for child in self._modules.values():
            value = child(value)  # type: ignore[misc]  # split_sequential lets no None in
        if not self._is_last:
            self._check_output(value)
        return value

    def _check_output(self, value: Any) -> None:
        """Raise TypeError for a value that the next stage would not get as it is."""
        if isinstance(value, tuple) and (type(value) is not tuple or len(value) < 2):
            name = list(self._modules)[-1]
            raise TypeError(
                f"child {name!r} returned a {type(value).__name__} of {len(value)} to the next stage, which "
                "would not get it as such: return a tensor or a plain tuple of several, or cut elsewhere by "
                "layers_per_stage"
            )


def split_sequential(
    layers: nn.Sequential | nn.ModuleList,
    num_stages: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> dict[int, nn.Module]:
    """{stage index: module}, each with a contiguous part of the children. A ModuleList is called as a chain.

    The stages hold the given children, not copies, under the same names: an optimizer made from `layers`
    updates them, and the stages' state_dicts together are that of `layers`. A child that gets a tuple gets it
    as one value, as inside an nn.Sequential, also where the tuple comes from another stage. A rank keeps
    `stages[i]` of its own stages; the others are freed with the dict and `layers`.

    layers_per_stage: how many children each stage gets. None: the cut whose heaviest stage has the fewest
    parameters.
    Stages on different ranks that share a parameter have a copy each, which is trained as one (see
    zbpp/stage_api.py).
    Raises TypeError for a container that is not a plain chain (with a forward, hooks or parameters of its
    own), ValueError for a cut that does not fit, and for a buffer that two stages would share.
    """
    children = _children(layers)
    counts = _counts(children, num_stages, layers_per_stage)
    bounds = list(pairwise(accumulate(counts, initial=0)))
    parts = [children[start:stop] for start, stop in bounds]
    return {
        index: SequentialStage(part, tied, is_first=index == 0, is_last=index == num_stages - 1)
        for index, (part, tied) in enumerate(zip(parts, _ties(parts), strict=True))
    }


def _children(layers: nn.Module) -> Children:
    """The container's children; one that occurs twice is listed twice. TypeError unless a plain chain."""
    given = type(layers).__name__
    if not isinstance(layers, nn.Sequential | nn.ModuleList):
        raise TypeError(
            f"split_sequential takes an nn.Sequential or nn.ModuleList, not {given}: "
            "zbpp.trace_stages cuts any module that torch.export can trace"
        )
    plain = nn.Sequential if isinstance(layers, nn.Sequential) else nn.ModuleList
    if type(layers).forward is not plain.forward or "forward" in vars(layers):
        raise TypeError(
            f"{given} has a forward of its own, which its children called in turn would leave out: "
            "give a plain nn.Sequential, or use zbpp.trace_stages"
        )
    own = [
        name for name, _ in (*layers.named_parameters(recurse=False), *layers.named_buffers(recurse=False))
    ]
    if own:
        raise TypeError(
            f"{given} has parameters or buffers of its own ({', '.join(own)}): move them into a child"
        )
    if _has_hooks(layers):
        raise TypeError(f"{given} has hooks, which no stage would call: register them on a child")
    children: Children = []
    for name, child in layers._modules.items():  # named_children() would list each child once
        if child is None:
            raise TypeError(f"child {name!r} of {given} is None: remove it, or put nn.Identity() there")
        children.append((name, child))
    return children


def _has_hooks(module: nn.Module) -> bool:
    return any(
        hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and "state" not in name
    )


def _counts(children: Children, num_stages: int, layers_per_stage: Sequence[int] | None) -> list[int]:
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: write 1 or more")
    if len(children) < num_stages:
        raise ValueError(
            f"{len(children)} children are too few for {num_stages} stages, each needs one: use fewer "
            "stages, or make one chain of all layers where a child is a chain itself"
        )
    if layers_per_stage is not None:
        check_counts(list(layers_per_stage), len(children), num_stages)
        return list(layers_per_stage)
    sizes = [sum(each.numel() for each in child.parameters()) for _, child in children]
    # If no child has parameters, all children weigh the same.
    return partition(sizes if any(sizes) else [1] * len(sizes), num_stages)


def _ties(stages: Sequence[Children]) -> list[Ties]:
    """Per stage, the parameters that an earlier stage has, too. Raises ValueError for such a buffer."""
    places: dict[Tensor, tuple[int, str]] = {}
    ties: list[Ties] = [{} for _ in stages]
    for index, children in enumerate(stages):
        for name, tensor in _state(dict(children)):
            stage, first = places.setdefault(tensor, (index, name))
            if stage == index:
                continue
            if not isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"stage {stage} ({first}) and stage {index} ({name}) would share one buffer, whose "
                    "copies on two ranks would drift apart: cut so that one stage holds both"
                )
            ties[index][name] = stage, first
    return ties


def _state(children: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    found = []
    for child_name, child in children.items():
        tensors = [*child.named_parameters(), *child.named_buffers()]
        found += [(f"{child_name}.{name}", tensor) for name, tensor in tensors]
    return found
