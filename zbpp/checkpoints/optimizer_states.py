"""The states and options of optimizers by the names that parameters have in the whole model.

torch's state_dict names a parameter by its number in the optimizer. Optimizers of different stages use the
same numbers, which can't be merged. Names can: each process picks the states of its own parameters, whatever
the cut was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zbpp.checkpoints.folders import CheckpointError
from zbpp.checkpoints.nest import decoded, encoded
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import dimensions_of, is_split, like, local_of

Facts = dict[str, Any]

FRESH = "load without one, to begin with fresh states (zbpp train: resume_optimizer=false)"
UNEVEN_OPTIMIZERS = (
    "some ranks give an optimizer, and others none: give one on all ranks, and [] where a rank has nothing "
    "to update"
)


class Masters(Protocol):
    """The part of zbpp.MasterWeights that checkpoints use."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter: ...
    def update(self) -> None: ...


class Saved(Protocol):
    """The part of a Checkpoint that is used here."""

    def size_of(self, key: str) -> torch.Size: ...
    def dtype_of(self, key: str) -> torch.dtype: ...


class _Optimized(NamedTuple):
    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    group: dict[str, Any]


_OF_THIS_RUN = "params", "foreach"  # what a group holds that a run with another mesh chooses for itself


def optimizers_of(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, Optimizer) else list(given)


def _optimized(
    pipeline: Pipeline, optimizers: Sequence[Optimizer], masters: Masters | None
) -> Iterator[_Optimized]:
    """Each parameter of the optimizers with its name. Raises ValueError for one that the pipeline lacks."""
    names = {
        id(each if masters is None else masters.of(each)): name for name, each in pipeline.named_parameters()
    }
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                        "pipeline's, so it has no name: make the optimizer of pipeline.parameters(), or of "
                        "masters.parameters() and give masters=..., too"
                    )
                yield _Optimized(names[id(parameter)], parameter, optimizer, group)


# ---- Saving


def collect(
    pipeline: Pipeline,
    optimizers: Sequence[Optimizer],
    masters: Masters | None,
    tensors: dict[str, Tensor],
) -> Facts:
    """This process's part as JSON; tensors are added to `tensors`.

    Raises ValueError for states that a checkpoint can't hold.
    """
    states: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    texts: dict[int, str] = {}  # id of a group -> its options
    for name, parameter, optimizer, group in _optimized(pipeline, optimizers, masters):
        everything = optimizer.state.get(parameter, {})
        found = {key: value for key, value in everything.items() if value is not group}
        mine: dict[str, Tensor] = {}
        state = encoded(found, f"optimizer.{name}", mine)
        states[name] = {"state": state, "is_released": len(found) < len(everything)}
        for key, tensor in mine.items():
            _check_split(key, tensor, parameter)
        tensors |= mine
        if id(group) not in texts:
            options = {key: value for key, value in group.items() if key not in _OF_THIS_RUN}
            entry = {"kind": kind_of(optimizer), "options": encoded(options, f"options.{name}", tensors)}
            texts[id(group)] = json.dumps(entry)
        groups.setdefault(texts[id(group)], []).append(name)
    return {"states": states, "groups": groups, "aliases": _aliases(pipeline)}


def kind_of(value: object) -> str:
    """The full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_same_kind(saved: str, mine: str) -> bool:
    """Whether two names are of one class. A class of zbpp's may have moved since the checkpoint was saved."""
    is_own = saved.startswith("zbpp.") and mine.startswith("zbpp.")
    return saved == mine or (is_own and saved.rpartition(".")[2] == mine.rpartition(".")[2])


def _check_split(key: str, tensor: Tensor, parameter: nn.Parameter) -> None:
    """Raise ValueError for a plain tensor that differs between the processes with parts of the parameter."""
    is_plain = not hasattr(tensor, "device_mesh")
    if is_plain and tensor.numel() > 1 and any(map(is_split, dimensions_of(parameter).values())):
        raise ValueError(
            f"{key} belongs to a parameter that is split over processes, but it is a plain tensor, so nobody "
            "knows how it is split: use an optimizer whose states are DTensors, such as torch.optim.AdamW"
        )


def _aliases(pipeline: Pipeline) -> dict[str, str]:
    """{further name of a parameter: the name in `named_parameters`}, for tied ones."""
    first = {id(each): name for name, each in pipeline.named_parameters()}
    everything = pipeline.state_dict(keep_vars=True)
    return {name: first[id(each)] for name, each in everything.items() if first.get(id(each), name) != name}


def merged(parts: Sequence[Facts]) -> Facts:
    """The parts of all processes as one."""
    whole: Facts = {"states": {}, "groups": {}, "aliases": {}}
    for part in parts:
        whole["states"] = part["states"] | whole["states"]
        whole["aliases"] = part["aliases"] | whole["aliases"]
        for text, names in part["groups"].items():
            whole["groups"][text] = list(dict.fromkeys([*whole["groups"].get(text, []), *names]))
    return whole


# ---- Loading


class Restored:
    """The states and options that this process's optimizers get from a checkpoint.

    targets: empty tensors by their keys in the checkpoint. The caller fills them, then calls `apply`.

    Raises CheckpointError if the checkpoint has no states for a parameter, or those of another optimizer.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizers: Sequence[Optimizer],
        masters: Masters | None,
        facts: Facts,
        saved: Saved,
    ) -> None:
        self.targets: dict[str, Tensor] = {}
        self._saved, self._facts = saved, facts
        self._rows = list(_optimized(pipeline, optimizers, masters))
        self._aliases = {
            name: other for pair in facts["aliases"].items() for name, other in (pair, pair[::-1])
        }
        self._groups = {name: text for text, names in facts["groups"].items() for name in names}
        self._names = [self._saved_name(row) for row in self._rows]
        for row, name in zip(self._rows, self._names, strict=True):
            self._prepare(row, name)

    def _saved_name(self, row: _Optimized) -> str:
        for name in (row.name, self._aliases.get(row.name, "")):
            if name in self._groups:
                kind, mine = json.loads(self._groups[name])["kind"], kind_of(row.optimizer)
                if not is_same_kind(kind, mine):
                    raise CheckpointError(
                        f"the checkpoint has the states of {kind} for {name}, this optimizer is {mine}: take "
                        f"the same optimizer, or {FRESH}"
                    )
                return name
        raise CheckpointError(
            f"the checkpoint has no optimizer states for {row.name}, which this optimizer updates: was it "
            f"frozen? Freeze it here, too, or {FRESH}"
        )

    def _prepare(self, row: _Optimized, name: str) -> None:
        def target(key: str) -> None:
            self.targets[key] = self._empty(key, name, row)

        decoded(self._facts["states"][name]["state"], target)
        decoded(json.loads(self._groups[name])["options"], self._plain)

    def _plain(self, key: str) -> None:
        self.targets[key] = torch.empty(self._saved.size_of(key), dtype=self._saved.dtype_of(key))

    def _empty(self, key: str, name: str, row: _Optimized) -> Tensor:
        """A tensor for a saved state; one of the parameter's shape is split as the parameter is."""
        size, dtype = self._saved.size_of(key), self._saved.dtype_of(key)
        parameter = row.parameter
        if dtype.is_floating_point and dtype == self._saved.dtype_of(f"model.{name}"):
            dtype = parameter.dtype  # the run may go on in another precision
        if size == parameter.shape and size:
            part = torch.empty_like(local_of(parameter.detach()), dtype=dtype)
            return like(parameter, part)
        # As torch does it: the count of steps stays on the CPU, unless the update wants it on the device.
        on_device = not key.endswith(".step") or row.group.get("capturable") or row.group.get("fused")
        return torch.empty(size, dtype=dtype, device=parameter.device if on_device else None)

    def apply(self, *, keep_options: bool = False) -> None:
        """Give the optimizers their states and options. keep_options: the options stay as they are."""
        for row, name in zip(self._rows, self._names, strict=True):
            entry = self._facts["states"][name]
            state = decoded(entry["state"], self.targets.__getitem__)
            if entry["is_released"]:
                state["group"] = row.group  # torch-optimi's, with gradient_release
            if state:
                row.optimizer.state[row.parameter] = state
            else:
                row.optimizer.state.pop(row.parameter, None)
        if not keep_options:
            self._apply_options()

    def _apply_options(self) -> None:
        first: dict[int, tuple[Any, str]] = {}  # id of a group -> its options, and of which name they are
        for row, name in zip(self._rows, self._names, strict=True):
            options = json.loads(self._groups[name])["options"]
            values = decoded(options, lambda key: self.targets[key].tolist())
            values.pop("foreach", None)  # of an older checkpoint
            other, whose = first.setdefault(id(row.group), (values, name))
            if repr(other) != repr(values):  # NaN equals itself
                raise CheckpointError(
                    f"{whose} and {name} are in one group of this optimizer, but the checkpoint has other "
                    "options for each: group the parameters as they were"
                )
            for key, value in decoded(options, self.targets.__getitem__).items():
                if key in _OF_THIS_RUN:
                    continue
                if isinstance(value, Tensor) and isinstance(row.group.get(key), Tensor):
                    row.group[key].copy_(value)
                else:
                    row.group[key] = value
