"""How a library's model is cut, and run with other layers than its own.

A `Cut` says which stage owns what, and what is sent between two stages. A `PatchedModel` runs the library's
whole model, whose layers may be Skip, Enter or Leave: see stage.py.

A forward changes no object of the model: it runs on copies of the few modules above the layers, made for
each call. So microbatches can't influence each other, and Dynamo can trace the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbpp.models.hf.masks import Kind
from zbpp.models.hf.ties import names_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CutError(ValueError):
    """The model can't be cut as asked; the message names the module and the reason."""


class LibraryError(ValueError):
    """The model does not run, even without a cut."""


class LayerCall(NamedTuple):
    """How the library calls one layer. Positions count the leaves of (args, kwargs).

    carried: positions of the values that a stage beginning here has to receive, hidden states first.
    repeated: those among them that are the same tensors as in the call of the layer before: position in this
    call -> position in that call.
    returned: if the layer returns a tuple, its length and the position of the hidden states in it; None if
    the layer returns the hidden states alone.
    """

    carried: tuple[int, ...]
    repeated: Mapping[int, int]
    returned: tuple[int, int] | None


class Cut(NamedTuple):
    """How a model is cut into stages. All models of a family with as many layers are cut alike.

    path: the name of the list of layers. layers: those of each stage. owners: the stage of each parameter,
    under each name of a tied one. batch_and_time: the dimensions of the hidden states that have the sizes of
    batch and time.
    """

    path: str
    layers: Sequence[range]
    owners: Mapping[str, int]
    calls: Sequence[LayerCall]
    batch_and_time: tuple[int, int]
    token: int  # one that is not padding, for stages that have no tokens
    head: str  # the name of the head, see `head_of` in check.py; "" if logits are more than its product
    no_head: str  # why
    label_shift: int | None  # see `shift_of` in labels.py
    one_document: bool  # whether a row without mask and positions is one for the library, see masks.py
    constants: Mapping[str, float]  # values of tensors that the library sets in constructors only
    refused: Mapping[Kind, str]  # batches that the family can't be trained with, and why
    # {(whether sequences come in slices, how many processes share each): the batches that a trial of such
    # parts has refused, and why}, see trial.py.
    refused_in_parts: dict[tuple[bool, int], Mapping[Kind, str]]


class PatchedModel:
    """A model that can be run with other layers, and with zeros in place of some parameters.

    others: the names of these parameters. head: the name of a module at which a run may end.
    """

    def __init__(
        self, model: PreTrainedModel, path: str, others: Collection[str] = (), head: str = ""
    ) -> None:
        self.model, self.path, self.head = model, path, head
        self.shapes: dict[str, dict[str, torch.Size]] = {}
        for name in others:
            owner, _, leaf = name.rpartition(".")
            self.shapes.setdefault(owner, {})[leaf] = model.get_parameter(name).shape
        self.copied = {name for each in (path, *self.shapes, head) for name in _above(each)} | {*self.shapes}

    def run(
        self,
        tokens: Tensor,
        layers: Sequence[Any],
        like: Tensor,
        *,
        training: bool,
        ends_at_head: bool = False,
        **given: Any,
    ) -> Tensor:
        """Run the model and return its logits.

        layers: called instead of the model's own. like: a tensor with the dtype and device of the zeros.
        ends_at_head: the call of the head raises HeadReached. given: further arguments of the model, such as
        attention_mask or past_key_values.
        """
        model = self._copy(self.model, "", layers, like, training)
        if ends_at_head:
            path, _, name = self.head.rpartition(".")
            above = model.get_submodule(path)._modules
            above[name] = LastLeave(above[name])  # type: ignore[assignment, arg-type]  # no module
        logits: Tensor = model(input_ids=tokens, **given, return_dict=True).logits
        return logits

    def _copy(
        self, module: nn.Module, path: str, layers: Sequence[Any], like: Tensor, training: bool
    ) -> nn.Module:
        """A copy of a module above the layers; it shares its tensors and all other modules with it."""
        copy: nn.Module = object.__new__(type(module))
        children, plain = dict(module._modules), dict[str, Any]()
        for name, child in module._modules.items():
            below = f"{path}.{name}".removeprefix(".")
            if below == self.path:
                plain[name] = [*layers]  # no child: torch's counters walk over those, and they are modules
                del children[name]
            elif below in self.copied and child is not None:
                children[name] = self._copy(child, below, layers, like, training)
        shapes = self.shapes.get(path, {})
        zeros = {name: like.new_zeros(()).expand(shape) for name, shape in shapes.items()}
        changed = {"_modules": children, "_parameters": {**module._parameters, **zeros}}
        copy.__dict__.update({**module.__dict__, **changed, **plain, "training": training})
        return copy


def _above(path: str) -> list[str]:
    """The names of the modules that contain a module; the whole model, "", comes first."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))] if path else []


def repeated(call: LayerCall, before: Mapping[int, Any]) -> dict[int, Any]:
    """The values that were replaced in the call of the layer before and have to be in this one, too."""
    return {here: before[there] for here, there in call.repeated.items() if there in before}


def layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of the list that has this name."""
    return list(cast(nn.ModuleList, model.get_submodule(path)))


def names_above_layers(model: nn.Module, path: str) -> list[str]:
    """The names of the parameters outside the list of layers."""
    return [name for name in names_of(model) if not name.startswith(f"{path}.")]


class StageDone(Exception):
    """Raised to end a stage's forward; its arguments are the tensors for the next stage."""


class HeadReached(Exception):
    """Raised where the model calls its head; its argument are the hidden states."""


class LayerProxy:
    """Is called instead of a layer; has the attributes of the layer, since the library may read them."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class LastLeave(LayerProxy):
    """Stands in place of the head."""

    def __call__(self, hidden: Tensor) -> Any:
        raise HeadReached(hidden)


class Skip(LayerProxy):
    """Stands in place of a layer of an earlier stage.

    A call returns the hidden states unchanged, and None for every other value that the layer returns.
    """

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        super().__init__(layer)
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        hidden = leaves[self.call.carried[0]]
        if self.call.returned is None:
            return hidden
        count, position = self.call.returned
        return tuple([hidden if i == position else None for i in range(count)])


class Enter(LayerProxy):
    """A layer of this stage, called with received tensors. replaced: position in the call -> tensor."""

    def __init__(self, layer: nn.Module, replaced: Mapping[int, Tensor]) -> None:
        super().__init__(layer)
        self.replaced, self.entered = replaced, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([self.replaced.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        self.entered = True
        return self.layer(*args, **kwargs)


class Leave(LayerProxy):
    """Stands in place of the next stage's first layer: its call ends the forward with the call's tensors."""

    def __init__(self, layer: nn.Module, call: LayerCall, replaced: Mapping[int, Tensor]) -> None:
        super().__init__(layer)
        self.call, self.replaced = call, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        raise StageDone(*[self.replaced.get(i, leaves[i]) for i in self.call.carried])
