"""How a model calls its layers, and which stage uses which parameter: found by running a small model.

Nothing here knows a family or a module by its name. In this order:

1. `list_of_layers` runs the model and finds the list whose modules are called once each.
2. `record` runs the uncut model and records the call of every layer.
3. `calls_of` runs the model as a later stage does, without its tokens and with zeros for all parameters above
   the layers. A value of a call that differs from the recorded one has to be sent by the stage before.
4. `owners_of` asks autograd which boundary's values depend on a parameter first: that stage uses it.

A cut that these steps get wrong does not pass the check (check.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from zbpp.models.hf.cut import (
    CutError,
    LayerCall,
    LayerProxy,
    LibraryError,
    PatchedModel,
    Skip,
    layers_at,
    names_above_layers,
)
from zbpp.models.hf.ties import untied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, TIME = 3, 11  # sizes of the tokens to try with; no other dimension may have these sizes


def list_of_layers(model: PreTrainedModel, tokens: Tensor) -> str:
    """The name of the one list whose modules are called once each. Raises CutError if there isn't one."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(any(True for _ in each.parameters()) for each in module)
    }
    outer = {name: each for name, each in lists.items() if not any(name.startswith(f"{o}.") for o in lists)}
    counts: dict[nn.Module, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        counts[module] = counts.get(module, 0) + 1

    hooks = [layer.register_forward_pre_hook(count) for each in outer.values() for layer in each]
    try:
        with torch.no_grad():
            model(input_ids=tokens, return_dict=True)
    except Exception as error:  # whatever the library's code may raise
        raise LibraryError(f"{type(model).__name__} fails: {type(error).__name__}: {error}") from error
    for hook in hooks:
        hook.remove()
    called = [name for name, each in outer.items() if len(each) and all(counts.get(layer) for layer in each)]
    again = [name for name in called if any(counts[layer] > 1 for layer in outer[name])]
    if len(called) != 1 or again:
        which = f"calls layers of {again[0]} twice" if again else f"has {', '.join(called) or 'none'}"
        raise CutError(
            f"{type(model).__name__} needs one list of layers, each called once, to be cut: it {which}"
        )
    return called[0]


class RecordedLayer(LayerProxy):
    """A layer that records its last call: the names and values of the arguments' leaves, and the output."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.leaves: list[Any] = []
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.names = _names(self.layer, args, kwargs)
        self.leaves, _ = tree_flatten((args, kwargs))
        self.output = self.layer(*args, **kwargs)
        return self.output


def _names(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of a call, made of the parameter names of the layer's forward."""
    known = list(signature(layer.forward).parameters)
    given = dict(zip(known, args, strict=False)) | kwargs
    return [keystr(path) for path, _ in tree_flatten_with_path(given)[0]]


def record(model: PreTrainedModel, path: str, tokens: Tensor) -> tuple[list[RecordedLayer], Tensor]:
    """Run the uncut model: (the call of every layer, logits). Raises CutError if a layer is not called."""
    seen = [RecordedLayer(layer) for layer in layers_at(model, path)]
    logits = PatchedModel(model, path).run(tokens, seen, next(model.parameters()), training=False)
    for number, each in enumerate(seen):
        if each.output is None:
            raise CutError(f"{path}.{number} of {type(model).__name__} is not called: it can't be cut there")
    return seen, logits


def calls_of(
    model: PreTrainedModel, path: str, recorded: list[RecordedLayer], tokens: Tensor
) -> list[LayerCall]:
    """The call of each layer, with the values that a stage has to receive if it begins there.

    Such a stage has neither the tokens nor their embedding.
    """
    like = next(model.parameters())
    calls = [LayerCall((0,), {}, _returned(model, path, recorded, number)) for number in range(len(recorded))]
    hidden = [_hidden(each) for each in recorded]
    blind = [
        RecordedLayer(Skip(each.layer, call._replace(carried=(position,))))
        for each, call, position in zip(recorded, calls, hidden, strict=True)
    ]
    PatchedModel(model, path, names_above_layers(model, path)).run(tokens, blind, like, training=False)
    found = []
    for number, (call, position) in enumerate(zip(calls, hidden, strict=True)):
        differing = _differing(recorded[number].leaves, blind[number].leaves)
        carried = (position, *(each for each in differing if each != position))
        for each in carried:
            if not isinstance(recorded[number].leaves[each], Tensor):
                raise CutError(
                    f"{path}.{number} of {type(model).__name__} is given {recorded[number].names[each]}, "
                    "which depends on the tokens and is no tensor: it can't be sent"
                )
        found.append(call._replace(carried=carried, repeated=_repeated(recorded, number, carried)))
    return found


def _repeated(recorded: list[RecordedLayer], number: int, carried: tuple[int, ...]) -> dict[int, int]:
    """Map a carried value's position to the position at which the layer before got the same tensor."""
    before = recorded[number - 1].leaves if number else []
    places = {id(leaf): position for position, leaf in enumerate(before) if isinstance(leaf, Tensor)}
    now = recorded[number].leaves
    return {here: places[id(now[here])] for here in carried[1:] if id(now[here]) in places}


def _hidden(seen: RecordedLayer) -> int:
    """The position of the hidden states: the first tensor of a call that requires a gradient."""
    return next(i for i, leaf in enumerate(seen.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _returned(
    model: PreTrainedModel, path: str, recorded: list[RecordedLayer], number: int
) -> tuple[int, int] | None:
    """If a layer returns a tuple: its length, and the position of the hidden states in it. Else None."""
    seen = recorded[number]
    if isinstance(seen.output, Tensor):
        return None
    shape = seen.leaves[_hidden(seen)].shape
    returned = seen.output if isinstance(seen.output, tuple | list) else ()
    for position, each in enumerate(returned):
        if isinstance(each, Tensor) and each.shape == shape:
            return len(returned), position
    raise CutError(f"{path}.{number} of {type(model).__name__} returns no hidden states like it was given")


def _differing(one: list[Any], other: list[Any]) -> list[int]:
    if len(one) != len(other):
        return list(range(len(one)))
    return [position for position, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (
        one is other or not isinstance(one, int | float | str) or one == other
    )


def batch_and_time(model: PreTrainedModel, hidden: Tensor) -> tuple[int, int]:
    """Which dimensions of the hidden states are batch and time.

    Raises CutError if there are none, LibraryError if another dimension of a narrow copy has the same size.
    """
    sizes = list(hidden.shape)
    if min(sizes.count(BATCH), sizes.count(TIME)) and max(sizes.count(BATCH), sizes.count(TIME)) > 1:
        raise LibraryError(f"{type(model).__name__} has hidden states of {sizes}: batch or time is not clear")
    if sizes.count(BATCH) != 1 or sizes.count(TIME) != 1:
        raise CutError(
            f"the hidden states of {type(model).__name__} have no dimension of batch and one of time: for "
            f"{BATCH} x {TIME} tokens they are {sizes}"
        )
    return sizes.index(BATCH), sizes.index(TIME)


def owners_of(
    model: PreTrainedModel, path: str, tokens: Tensor, calls: Sequence[LayerCall], layers: Sequence[range]
) -> dict[str, int]:
    """The stage that uses each parameter; a tied one under each of its names.

    A parameter of a layer belongs to the layer's stage. Any other one belongs to the first stage that sends
    a value which depends on it (the last stage sends the logits), and to stage 0 if nothing does.
    """
    stage_of_layer = {f"{path}.{number}": stage for stage, own in enumerate(layers) for number in own}
    with untied(model) as aliases:
        seen, logits = record(model, path, tokens)
        parameters = dict(model.named_parameters())
        owner = {
            name: stage_of_layer[".".join(name.split(".")[: path.count(".") + 2])]
            for name in parameters
            if name.startswith(f"{path}.")
        }
        ends = [[seen[own.start].leaves[p] for p in calls[own.start].carried] for own in layers[1:]]
        for stage, outputs in enumerate([*ends, [logits]]):
            asked = [name for name, p in parameters.items() if name not in owner and p.requires_grad]
            sums = [each.sum() for each in outputs if each.requires_grad]
            leaves = [parameters[name] for name in asked]
            grads = torch.autograd.grad(sums, leaves, allow_unused=True, retain_graph=True) if asked else ()
            owner |= {name: stage for name, grad in zip(asked, grads, strict=True) if grad is not None}
    of_tie: dict[str, int] = {}  # the first stage that uses any name of a tie: it has those that none uses
    for name, stage in owner.items():
        source = aliases.get(name, name)
        of_tie[source] = min(stage, of_tie.get(source, stage))
    return {name: owner.get(name, of_tie.get(aliases.get(name, name), 0)) for name in parameters}
