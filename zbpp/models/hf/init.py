"""Initial values for the tensors of one stage: the library's own, drawn from (seed, name of the module).

The library sets values in a module's constructor or in `_init_weights(module)`. A stage is built on the meta
device, where constructors set no values; so `_init_weights` has to set them, as it does for the library's own
loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import filterfalse
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from zbpp.models.hf.cut import CutError
from zbpp.models.hf.ties import aliases_of, assign, untie
from zbpp.models.hf.values import has_values, no_fake_mode
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def initialise(
    model: PreTrainedModel, seed: int, is_own: Callable[[str], bool], constants: Mapping[str, float]
) -> None:
    """Give the stage's own tensors memory on the CPU and initial values; the others stay on the meta device.

    In a FakeTensorMode, and with the meta device as the default, they get no values.

    is_own: whether a parameter or buffer of this full name is the stage's own. constants: values of tensors
    that `_init_weights` leaves alone. A tied parameter gets the values of its first name, also if the stage
    has only another of its names. Raises CutError for a tensor that gets no value.
    """
    with no_fake_mode():  # the model's tensors are on the meta device, and of no such mode
        aliases = aliases_of(model)
        untie(model, aliases)
    sources = {source for name, source in aliases.items() if is_own(name)}
    own = _materialise(model, lambda name: name in sources or (name not in aliases and is_own(name)))
    if all(map(has_values, own.values())):
        _set_values(model, own, seed, constants)
    for name, source in aliases.items():
        if is_own(name):
            assign(model, name, cast(nn.Parameter, own[source]))
    for source in filterfalse(is_own, sources):
        assign(model, source, nn.Parameter(own[source].to("meta"), own[source].requires_grad))


def _set_values(
    model: PreTrainedModel, own: Mapping[str, Tensor], seed: int, constants: Mapping[str, float]
) -> None:
    with torch.no_grad(), torch.random.fork_rng([]):
        for name, module, init_weights in _modules(model, "", model._init_weights):
            if not _has_own(module):
                continue
            torch.default_generator.manual_seed(seed_of(seed, name))
            init_weights(module)
    for name, tensor in own.items():
        if not tensor.is_floating_point() or not tensor.isnan().any():
            continue
        if name not in constants:
            raise CutError(f"{name} of {type(model).__name__} gets no value from the library's _init_weights")
        tensor.data.fill_(constants[name])


def perturb(model: nn.Module, seed: int, aliases: Mapping[str, str]) -> None:
    """Move all parameters: zeros and ones, which many have at first, would hide a value that is wrong."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                generator = torch.Generator().manual_seed(seed_of(seed, f"moved {aliases.get(name, name)}"))
                moved = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(moved.to(parameter.dtype), alpha=0.01)


def constants_of(config: PretrainedConfig) -> dict[str, float]:
    """The tensors that have one number in all entries after the library has constructed the model."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng([]):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # the library's
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: float(values.flatten()[0])
        for name, values in ((name, each.detach()) for name, each in tensors)
        if values.is_floating_point() and values.numel() and bool((values == values.flatten()[0]).all())
    }


def _materialise(model: nn.Module, is_own: Callable[[str], bool]) -> dict[str, Tensor]:
    """Allocate the own tensors, filled with NaN if they are floats. Shared buffers stay shared."""
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                full = f"{path}.{name}".removeprefix(".")
                if tensor is None or not is_own(full):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _empty(tensor)
                place[name] = found[full] = made[id(tensor)]
    return found


def _has_own(module: nn.Module) -> bool:
    return any(not tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def _empty(tensor: Tensor) -> Tensor:
    values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    values.fill_(torch.nan) if tensor.is_floating_point() else values.zero_()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _modules(
    module: nn.Module, path: str, init_weights: Callable[[nn.Module], None]
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
    """Yield (name, module, `_init_weights` of the model that it is in), children first, as the library."""
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        of_child = child._init_weights if isinstance(child, PreTrainedModel) else init_weights
        yield from _modules(child, f"{path}.{name}".removeprefix("."), of_child)
    yield path, module, init_weights
