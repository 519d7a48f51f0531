"""What one rank holds, under the names of the whole model; what it sends to the first rank."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zbpp.autograd.leaf_grad import total_of
from zbpp.error_text import error_text
from zbpp.job.agreement import broadcast
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import whole_of

Naming = Callable[[int, str], str]
Stages = Pipeline | nn.Module | Mapping[int, nn.Module] | Sequence[Any]

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_DROPOUTS = ("dropout", "attention_dropout", "dropout_p")  # attributes of attention and recurrent layers
Result = TypeVar("Result")


class Sent(NamedTuple):
    """One tensor of a rank. names: those of its places in the rank's stages, in the whole model."""

    names: tuple[str, ...]
    value: Tensor | None


class Facts(NamedTuple):
    """What the reference needs to know of a rank before a call.

    part: ranks of one part are given the same batch and draw the same random numbers. seeds: per stage,
    of its microbatch 0. modules: per stage, the names of its modules.
    """

    part: str
    seeds: Mapping[int, int]
    modules: Mapping[int, Sequence[str]]


class Ranks:
    """All ranks of a check, seen from one of them. group: theirs; None: the default one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.number = dist.get_world_size(group) if dist.is_initialized() else 1

    def gather(self, value: Result) -> list[Result]:
        """Every rank's value, on the first rank; [] elsewhere."""
        if self.number == 1:
            return [value]
        found: list[Any] | None = [None] * self.number if self.rank == 0 else None
        dist.gather_object(value, found, group=self.group, group_dst=0)
        return found or []

    def on_first(self, work: Callable[[], Result]) -> Result:
        """What the first rank gets from `work`, on all ranks. All raise ValueError if `work` raises."""
        result: Any = None
        refusal, cause = "", None
        if self.rank == 0:
            try:
                result = work()
            except Exception as error:  # whatever it is, the other ranks must not wait for this one
                cause = error
                refusal = str(error) if isinstance(error, ValueError) else error_text(error)
        result, refusal = broadcast((result, refusal), self.group)
        if refusal:
            raise ValueError(refusal) from cause
        return cast(Result, result)


class Held:
    """The stages of one rank.

    stages: a Pipeline; {stage index: module}; torch's PipelineStages; or one module. names(stage index, name
    in the stage) -> name in the whole model; None: the names are those of the whole model.
    """

    def __init__(self, stages: Stages, names: Naming | None) -> None:
        self.pipeline = stages if isinstance(stages, Pipeline) else None
        self.modules = {index: _unwrapped(each) for index, each in _modules_of(stages).items()}
        self._names = names or (lambda stage, name: name)
        places: dict[int, tuple[list[str], Tensor]] = {}
        for name, parameter in self._named(nn.Module.named_parameters):
            places.setdefault(id(parameter), ([], parameter))[0].append(name)
        for name, parameter in self.pipeline.named_parameters() if self.pipeline else ():
            if id(parameter) not in places and name.startswith("loss."):
                places[id(parameter)] = [name], parameter
        self._parameters = [(tuple(names), parameter) for names, parameter in places.values()]

    def parameters(self) -> list[Tensor]:
        """Each parameter once."""
        return [parameter for _, parameter in self._parameters]

    def gradients(self) -> list[Sent]:
        """The gradient of each parameter, whole where it is sharded. Collective over the shards."""
        return [Sent(names, _copied(total_of(parameter))) for names, parameter in self._parameters]

    def weights(self) -> list[Sent]:
        """The same of the parameters themselves."""
        return [Sent(names, _copied(parameter)) for names, parameter in self._parameters]

    def buffers(self) -> list[Sent]:
        """The stages' buffers."""
        return [Sent((name,), _copied(each)) for name, each in self._named(nn.Module.named_buffers)]

    def facts(self, part: str) -> Facts:
        """What the reference needs to know before the next call. part: of this rank's batch."""
        if self.pipeline is None:
            return Facts(part, {}, {})
        modules = {index: [*self._modules_in(index, module)] for index, module in self.modules.items()}
        return Facts(f"{part} {self.pipeline.place.data_part}", self.pipeline.seeds(), modules)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None
            main: Tensor | None = getattr(parameter, "main_grad", None)
            if main is not None:
                main.zero_()

    def _named(self, of: Callable[..., Iterator[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
        for index, module in self.modules.items():
            for name, value in of(module, remove_duplicate=False):
                yield self._name(index, name), value

    def _modules_in(self, index: int, module: nn.Module) -> Iterator[str]:
        for name, _ in module.named_modules():
            with suppress(LookupError):  # names may be a dict's look-up, which knows parameters only
                if name:
                    yield self._name(index, name)

    def _name(self, index: int, name: str) -> str:
        return self._names(index, _WRAPPERS.sub("", name))


def _modules_of(stages: Any) -> dict[int, nn.Module]:
    if isinstance(stages, nn.Module):
        return {0: stages}
    if isinstance(stages, Pipeline):
        return dict(stages.stages)
    if isinstance(stages, Mapping):
        return dict(stages)
    each_of = stages if isinstance(stages, Sequence) else [stages]  # torch's PipelineStages
    return {each.stage_index: each.submod for each in each_of}


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _copied(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    whole = whole_of(value.detach())
    return (whole.to_dense() if whole.is_sparse else whole).to("cpu", copy=True)


def on_host(batch: Any) -> Any:
    """The batch with its tensors on the CPU: another process may not have this one's device."""

    def plain(value: Any) -> Any:
        return value.detach().cpu().contiguous().clone() if isinstance(value, Tensor) else value

    return tree_map(plain, batch)


def digest_of(batch: Any) -> str:
    """A text that is the same for equal batches."""
    file = io.BytesIO()
    torch.save(on_host(batch), file)
    return blake2b(file.getvalue(), digest_size=8).hexdigest()


@contextmanager
def without_dropout(modules: Sequence[nn.Module]) -> Iterator[bool]:
    """Inside, dropout layers drop nothing. Yields whether there are any."""
    found: list[tuple[nn.Module, str, float]] = []
    for each in (part for module in modules for part in module.modules()):
        of_class = ("p",) if isinstance(each, nn.modules.dropout._DropoutNd) else _DROPOUTS
        values = [(name, getattr(each, name, None)) for name in of_class]
        found += [(each, name, value) for name, value in values if isinstance(value, float) and value]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    try:
        yield bool(found)
    finally:
        for module, name, value in found:
            setattr(module, name, value)
