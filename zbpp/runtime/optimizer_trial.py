"""Trials on throwaway parameters: can an optimizer update some parameters at another time than others?

Two copies of the optimizer take the same steps. One copy updates all parameters together; the other updates
two parts of them, one after the other. If a parameter differs afterwards, or a value that the optimizer keeps
for several parameters (a count of steps in a group), the optimizer can't update its parameters in parts.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.mesh import is_split, local_of, whole_of

_NUM_STEPS = 3
_GRADIENTS = (0.1, 7.0)  # size of the gradients of part 0 and of part 1
_RATE = 0.01  # in place of the optimizer's own, which may be 0 at first: then no update could be seen
# Attributes that a copy of an optimizer does not take over. `step`: the wrapper of a learning rate schedule.
_NOT_COPIED = ("state", "param_groups", "step")


def refusal_of_parts(optimizer: torch.optim.Optimizer) -> str:
    """Why the optimizer can't update its parameters in parts; "" if it can."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    if any(each.default is each.empty and each.kind in _POSITIONAL for each in arguments):
        return "its step needs a closure that computes all gradients again"
    if not any(group["params"] for group in optimizer.param_groups):
        return ""
    problems = []
    for is_sparse in (False, True):  # SparseAdam takes sparse gradients alone
        try:
            return _difference(optimizer, is_sparse=is_sparse)
        except Exception as error:  # whatever a user's optimizer raises
            problems.append(f"{type(error).__name__}: {error}")
    return f"a trial step failed ({problems[0]})"


def refusal_of_ranks(optimizer: torch.optim.Optimizer) -> str:
    """Why each rank can't update its own parameters with an optimizer of its own; "" if each can.

    In this trial two separate copies of the optimizer update one part each.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        return ""
    problems = []
    for is_sparse in (False, True):
        together, *alone = _Trial(optimizer), _Trial(optimizer), _Trial(optimizer)
        try:
            for step in range(_NUM_STEPS):
                together.step(step, range(2), is_sparse=is_sparse)
                for part, trial in enumerate(alone):
                    trial.step(step, [part], is_sparse=is_sparse)
        except Exception as error:  # whatever a user's optimizer raises
            problems.append(f"{type(error).__name__}: {error}")
            continue
        pairs = zip(together.parts, [alone[0].parts[0], alone[1].parts[1]], strict=True)
        is_same = all(_is_same(*each) for part in pairs for each in zip(*part, strict=True))
        return "" if is_same else "the update of one parameter depends on the gradients of others"
    return f"a trial step failed ({problems[0]})"


def refusal_of_shards(optimizer: torch.optim.Optimizer) -> str:
    """Why the optimizer can't update parameters that are split over processes (DTensors); "" if it can.

    This trial compares steps on small DTensors with steps on the same tensors unsplit. Collective over the
    processes that hold parts of a parameter.
    """
    if not any(hasattr(each, "device_mesh") for group in optimizer.param_groups for each in group["params"]):
        return ""
    try:
        whole, split = _Trial(optimizer, _small_whole), _Trial(optimizer, _small_split)
        before = [each.detach().clone() for each in whole.parameters()]
        for step in range(_NUM_STEPS):
            for trial in (whole, split):
                trial.step(step, range(2), is_sparse=False)
        gathered = [whole_of(each.detach()) for each in split.parameters()]
    except Exception as error:  # whatever an optimizer raises on DTensors
        return f"a trial step failed ({type(error).__name__}: {error})"
    for old, one, other in zip(before, whole.parameters(), gathered, strict=True):
        # On shards an optimizer may round in another order: Muon multiplies matrices in bfloat16.
        allowed = 0.05 * (one - old).abs().max() + torch.finfo(one.dtype).eps
        if not bool((one - other).abs().max() <= allowed):
            return "its update of a split parameter differs from its update of the whole parameter"
    return ""


def _small_whole(parameter: Tensor) -> nn.Parameter:
    """As `_throwaway`, but with at least two rows for each process that a DTensor is split over."""
    size = 2 * parameter.device_mesh.size() if hasattr(parameter, "device_mesh") else 2
    shape = (size,) * parameter.dim()
    return nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=local_of(parameter).device))


def _small_split(parameter: Tensor) -> nn.Parameter:
    small = _small_whole(parameter)
    return nn.Parameter(_split_as(parameter, small.detach()))


def _split_as(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole` as a DTensor that is split as the parameter is; unchanged if the parameter is no DTensor."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # lazily: it imports sympy

    placements = [Shard(each.dim) if is_split(each) else Replicate() for each in parameter.placements]  # type: ignore[attr-defined]  # a DTensor's
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _difference(optimizer: torch.optim.Optimizer, *, is_sparse: bool) -> str:
    """How steps in parts differ from steps with all parameters together; "" if they agree."""
    together, apart = _Trial(optimizer), _Trial(optimizer)
    for step in range(_NUM_STEPS):
        together.step(step, range(2), is_sparse=is_sparse)
        for part in range(2):
            apart.step(step, [part], is_sparse=is_sparse)
    kept, kept_apart = together.shared_values(), apart.shared_values()
    for name in [*kept, *kept_apart]:
        if not _is_same(kept.get(name), kept_apart.get(name)):
            return f"it keeps {name} for all parameters together"
    pairs = zip(together.parameters(), apart.parameters(), strict=True)
    if not all(_is_same(one, other) for one, other in pairs):
        return "the update of one parameter depends on the gradients of others"
    return ""


class _Trial:
    """A copy of an optimizer. A group has two throwaway parameters of each dtype, one for each of two parts.

    make: makes a throwaway parameter like a given one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, make: Callable[[Tensor], nn.Parameter] | None = None
    ) -> None:
        make = make or _throwaway
        self.parts: list[list[nn.Parameter]] = [[], []]
        known: dict[int, Any] = {}  # deepcopy's memo: a throwaway in place of each parameter
        groups = []
        for group in optimizer.param_groups:
            mine = [make(each) for each in _one_of_each_dtype(group["params"]) for _ in self.parts]
            for place, parameter in enumerate(mine):
                self.parts[place % len(self.parts)].append(parameter)
            known |= {id(each): mine[0] for each in group["params"]}
            groups.append((group, mine))
        self._optimizer: Any = type(optimizer).__new__(type(optimizer))
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
        for name in attributes:
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                attributes[name] = OrderedDict()
        vars(self._optimizer).update(copy.deepcopy(attributes, known))
        self._optimizer.state = defaultdict(dict)
        self._optimizer.param_groups = [_group(group, mine, known) for group, mine in groups]

    def parameters(self) -> list[nn.Parameter]:
        return [each for part in self.parts for each in part]

    def step(self, number: int, parts: Iterable[int], *, is_sparse: bool) -> None:
        """Update the parameters of these parts. The gradients of part 1 are larger than those of part 0."""
        wanted = {id(each) for part in parts for each in self.parts[part]}
        whole = [group["params"] for group in self._optimizer.param_groups]
        for size, part in zip(_GRADIENTS, self.parts, strict=True):
            for parameter in part:
                gradient = _gradient(parameter, (number + 1) * size)
                parameter.grad = gradient.to_sparse() if is_sparse else gradient
        for group in self._optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in wanted]
        self._optimizer.step()
        for group, parameters in zip(self._optimizer.param_groups, whole, strict=True):
            group["params"] = parameters

    def shared_values(self) -> dict[str, Any]:
        """The values that belong to no single parameter: those of groups, attributes, other states."""
        optimizer = self._optimizer
        values = {
            f"{name!r} of a group": [group[name] for group in optimizer.param_groups]
            for name in dict.fromkeys(name for group in optimizer.param_groups for name in group)
            if name != "params" and all(name in group for group in optimizer.param_groups)
        }
        own = set(map(id, self.parameters()))
        values |= {
            f"the state {key!r}": state for key, state in optimizer.state.items() if id(key) not in own
        }
        hidden = (*_NOT_COPIED, "defaults")
        values |= {
            f"its attribute {name}": each for name, each in vars(optimizer).items() if name not in hidden
        }
        return values


def _gradient(parameter: Tensor, size: float) -> Tensor:
    """A gradient for the parameter, split as the parameter is, whose rows differ."""
    numbers = torch.arange(1, parameter.numel() + 1, device=local_of(parameter).device)
    whole = (size * numbers * (numbers % 3 - 0.8)).to(parameter.dtype).reshape(parameter.shape)
    return _split_as(parameter, whole)


def _throwaway(parameter: Tensor) -> nn.Parameter:
    """A small plain parameter with as many dimensions, of the same dtype and device."""
    ones = torch.ones((2,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(ones)


def _one_of_each_dtype(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The first trainable parameter of each dtype and each way of being split; the first one if none is."""
    found: dict[object, nn.Parameter] = {}
    for each in parameters:
        if each.requires_grad:
            found.setdefault((each.dtype, getattr(each, "placements", None)), each)
    return list(found.values()) or parameters[:1]


def _group(group: dict[str, Any], parameters: list[nn.Parameter], known: dict[int, Any]) -> dict[str, Any]:
    values = {name: value for name, value in group.items() if name not in ("params", "lr")}
    copied: dict[str, Any] = {**copy.deepcopy(values, known), "params": parameters}
    if "lr" in group:
        rate = group["lr"]
        copied["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
    return copied


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal. Objects other than tensors, numbers, texts and containers always are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.detach(), other.detach())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, _PLAIN) or isinstance(other, _PLAIN):
        return type(one) is type(other) and bool(one == other)
    return True


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
