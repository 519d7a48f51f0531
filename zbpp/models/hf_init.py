"""Initial values of a Hugging Face model: the library's own, drawn from (seed, name of the module).

The library makes values in a module's constructor or in `_init_weights(module)`; its loader, which builds
on the meta device as we do, relies on the latter for parameters and buffers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zbpp.models.hf_cut import CutError
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def initialise(
    model: PreTrainedModel, seed: int, is_own: Callable[[str], bool], constants: Mapping[str, float]
) -> None:
    """Give the model's own tensors memory on the CPU and their initial values; the others stay on meta.

    is_own: told the full name of a parameter or buffer. constants: values for those that `_init_weights`
    leaves alone. Raises CutError for a tensor without any.
    """
    own = _materialise(model, is_own)
    with torch.no_grad(), torch.random.fork_rng([]):
        for name, module, init_weights in _modules(model, "", model._init_weights):
            if not _has_own(module):
                continue
            torch.manual_seed(seed_of(seed, name))
            init_weights(module)
    for name, tensor in own.items():
        if not tensor.is_floating_point() or not tensor.isnan().any():
            continue
        if name not in constants:
            raise CutError(f"{name} of {type(model).__name__} gets no value from the library's _init_weights")
        tensor.data.fill_(constants[name])


def _materialise(model: nn.Module, is_own: Callable[[str], bool]) -> dict[str, Tensor]:
    """Memory for the own tensors; floats are NaN until they have values. Tied ones stay tied."""
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
    values = torch.empty_like(tensor, device="cpu", requires_grad=False)
    values.fill_(torch.nan) if tensor.is_floating_point() else values.zero_()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _modules(
    module: nn.Module, path: str, init_weights: Callable[[nn.Module], None]
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
    """In the library's order, children first; each with the `_init_weights` of the model that it is in."""
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        of_child = child._init_weights if isinstance(child, PreTrainedModel) else init_weights
        yield from _modules(child, f"{path}.{name}".removeprefix("."), of_child)
    yield path, module, init_weights
