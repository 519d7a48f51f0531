"""One stage of a Hugging Face model: the library's own code runs, other stages' layers are skipped.

A stage keeps the whole config and its layers keep their numbers. Its forward calls the whole model:

    tokens -> [before the layers] -> skip, skip, ENTER layer 2, layer 3, LEAVE -> [never reached]

What a layer is CALLED with is the boundary: the stage before leaves at the call of a layer, the next one
enters there. So whatever the library computes before, between and behind the layers runs on the stage that
needs the result, and masks and positions are made anew on each stage, by the library's code. Parameters
of other stages have stand-ins there, zeros without memory; what is computed from them is thrown away.

A forward changes no object: it runs copies of the few modules above the layers, made anew each time. So
microbatches can't meet, and Dynamo can trace it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CutError(ValueError):
    """A model that can't be cut as asked; the message names the module and the reason."""


class LibraryError(ValueError):
    """A model that does not run, cut or not."""


class Call(NamedTuple):
    """How the library calls one layer; positions are those of the leaves of (args, kwargs).

    carried: what only the stages before know, hidden states first.
    again: carried ones that are the same tensors in the call of the layer before, position -> position.
    returned: of how many the layer returns a tuple, and the position of the hidden states; None: just them.
    """

    carried: tuple[int, ...]
    again: Mapping[int, int]
    returned: tuple[int, int] | None


class Cut(NamedTuple):
    """How a model falls into stages; the same for every model of its family with as many layers.

    path: the name of the list of layers. owners: the stage of each parameter.
    batch_and_time: which dimensions of the carried hidden states those of the tokens are.
    """

    path: str
    layers: Sequence[range]
    owners: Mapping[str, int]
    calls: Sequence[Call]
    batch_and_time: tuple[int, int]
    token: int  # any that is not padding
    constants: Mapping[str, float]  # tensors that the library's constructors alone give a value


class Opened:
    """A model whose layers can be replaced for one call, and some of its parameters by stand-ins."""

    def __init__(self, model: PreTrainedModel, path: str, others: Collection[str] = ()) -> None:
        self.model, self.path = model, path
        self.shapes: dict[str, dict[str, torch.Size]] = {}
        for name in others:
            owner, _, leaf = name.rpartition(".")
            self.shapes.setdefault(owner, {})[leaf] = model.get_parameter(name).shape
        self.copied = {name for each in (path, *self.shapes) for name in _above(each)} | set(self.shapes)

    def run(self, tokens: Tensor, layers: Sequence[Any], like: Tensor, *, training: bool) -> Tensor:
        """Logits. layers: in the place of the model's own. like: dtype and device of stand-ins."""
        model = self._copy(self.model, "", layers, like, training)
        logits: Tensor = model(input_ids=tokens, return_dict=True).logits
        return logits

    def _copy(
        self, module: nn.Module, path: str, layers: Sequence[Any], like: Tensor, training: bool
    ) -> nn.Module:
        copy: nn.Module = object.__new__(type(module))
        children: dict[str, Any] = dict(module._modules)
        for name, child in module._modules.items():
            below = f"{path}.{name}".removeprefix(".")
            if below == self.path:
                children[name] = list(layers)
            elif below in self.copied and child is not None:
                children[name] = self._copy(child, below, layers, like, training)
        shapes = self.shapes.get(path, {})
        stand_ins = {name: like.new_zeros(()).expand(shape) for name, shape in shapes.items()}
        changed = {"_modules": children, "_parameters": {**module._parameters, **stand_ins}}
        copy.__dict__.update({**module.__dict__, **changed, "training": training})
        return copy


def _above(path: str) -> list[str]:
    """The names of the modules that a module is in, the whole model "" first."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))] if path else []


class Stage(nn.Module):
    """Some layers of a model. Tokens or what the stage before returned -> hidden states or logits.

    model: its tensors that belong to other stages may be on the meta device.
    Its parameters have the names that they have in the library's whole model. A module that is run as a
    copy is replaced by a plain container of its parameters, buffers and children.
    """

    def __init__(self, model: PreTrainedModel, cut: Cut, index: int) -> None:
        super().__init__()
        self._cut, self._index = cut, index
        stages = stage_of(model, cut)
        others = [name for name in names_above_layers(model, cut.path) if stages[name] != index]
        self._opened = Opened(model, cut.path, others)
        for path, shapes in self._opened.shapes.items():
            for name in shapes:
                del model.get_submodule(path)._parameters[name]
        self._hold(self, model, "")

    def _hold(self, container: nn.Module, module: nn.Module, path: str) -> None:
        container._parameters, container._buffers = module._parameters, module._buffers
        container._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name, child in module._modules.items():
            below = f"{path}.{name}".removeprefix(".")
            if below == self._cut.path:
                own = self._cut.layers[self._index]
                layers = list(cast(nn.ModuleList, child))
                container._modules[name] = nn.ModuleDict({str(i): layers[i] for i in own})
            elif below in self._opened.copied and child is not None:
                container._modules[name] = held = nn.ModuleDict()
                self._hold(held, child, below)
            else:
                container._modules[name] = child

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        first, last = self._index == 0, self._index == len(self._cut.layers) - 1
        layers = self._layers(received)
        like = next(self.parameters()) if first else received[0]
        try:
            logits = self._opened.run(
                received[0] if first else self._tokens(received[0]), layers, like, training=self.training
            )
        except Left as left:
            return left.args if len(left.args) > 1 else left.args[0]
        own = self._cut.layers[self._index]
        if not last or (not first and not layers[own.start].entered):
            number, kind = own.start if last else own.stop, type(self._opened.model).__name__
            raise RuntimeError(
                f"{kind} has not called layer {number}, where a stage begins: "
                "write config.layerdrop=0, if it has one"
            )
        return logits

    def _layers(self, received: tuple[Tensor, ...]) -> list[Any]:
        cut, own, replaced = self._cut, self._cut.layers[self._index], {}
        layers: list[Any] = layers_at(self._opened.model, cut.path)
        for number in range(own.start):
            layers[number] = Skip(layers[number], cut.calls[number])
        if own.start:
            replaced = dict(zip(cut.calls[own.start].carried, received, strict=True))
            layers[own.start] = Enter(layers[own.start], replaced)
            for number in own[1:]:
                replaced = again(cut.calls[number], replaced)
                if replaced:
                    layers[number] = Enter(layers[number], replaced)
        if own.stop < len(layers):
            call = cut.calls[own.stop]
            layers[own.stop] = Leave(layers[own.stop], call, again(call, replaced))
        return layers

    def _tokens(self, hidden: Tensor) -> Tensor:
        batch, time = (hidden.shape[dim] for dim in self._cut.batch_and_time)
        return torch.full((batch, time), self._cut.token, device=hidden.device)


def again(call: Call, before: Mapping[int, Any]) -> dict[int, Any]:
    """What was replaced in the call of the layer before, and is given to this layer, too."""
    return {here: before[there] for here, there in call.again.items() if there in before}


def layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of the list that has this name."""
    return list(cast(nn.ModuleList, model.get_submodule(path)))


def stage_of(model: nn.Module, cut: Cut) -> dict[str, int]:
    """The stage of each parameter, under every name that a tied one has."""
    owners = {id(parameter): cut.owners[name] for name, parameter in model.named_parameters()}
    return {name: owners[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}


def names_above_layers(model: nn.Module, path: str) -> list[str]:
    """The parameters that are not in the list of layers."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if not name.startswith(f"{path}.")]


class Left(Exception):
    """The stage is done: the tensors that are its arguments go to the next one."""


class InPlaceOf:
    """Stands in the list of layers for a layer; the library may ask it for the layer's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Skip(InPlaceOf):
    """Stands for a layer of an earlier stage.

    A call returns the hidden states unchanged, and None for every other value that the layer returns.
    """

    def __init__(self, layer: nn.Module, call: Call) -> None:
        super().__init__(layer)
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        hidden = leaves[self.call.carried[0]]
        if self.call.returned is None:
            return hidden
        count, position = self.call.returned
        return tuple([hidden if i == position else None for i in range(count)])


class Enter(InPlaceOf):
    """A layer of this stage that gets what was received. replaced: position in its call -> tensor."""

    def __init__(self, layer: nn.Module, replaced: Mapping[int, Tensor]) -> None:
        super().__init__(layer)
        self.replaced, self.entered = replaced, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([self.replaced.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        self.entered = True
        return self.layer(*args, **kwargs)


class Leave(InPlaceOf):
    """The first layer of the next stage."""

    def __init__(self, layer: nn.Module, call: Call, replaced: Mapping[int, Tensor]) -> None:
        super().__init__(layer)
        self.call, self.replaced = call, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        raise Left(*[self.replaced.get(i, leaves[i]) for i in self.call.carried])
