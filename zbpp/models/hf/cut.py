"""One stage of a Hugging Face model: the library's own code, with the layers of other stages skipped.

A stage keeps the whole config, and its layers keep their numbers. Its forward calls the library's whole
model. On a stage that owns layers 2 and 3 that call goes:

    tokens -> code before the layers -> Skip, Skip, Enter layer 2, layer 3, Leave     (the rest is not run)

The boundary between two stages is the CALL of a layer. A stage ends where the model calls the first layer of
the next stage, and sends the tensors of that call; the next stage begins with the same call. So the code
before, between and after the layers runs on every stage that needs its results. Each stage makes masks and
positions anew, by the library's code. Parameters of other stages are replaced by zeros that take no memory,
and what is computed from these zeros is thrown away.

A forward changes no object of the model: it runs on copies of the few modules above the layers, made for
each call. So microbatches can't influence each other, and Dynamo can trace the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.hf.masks import NONE, Given, Kind, keywords, kind_of, merged, own_part, refuse, seen_by
from zbpp.models.hf.ties import names_of
from zbpp.models.hf.whole_masks import whole_sequences
from zbpp.models.layers import Head, head_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zbpp.models.hf.context import Connect
    from zbpp.models.hf.slices import Slices


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
    constants: Mapping[str, float]  # values of tensors that the library sets in constructors only
    refused: Mapping[Kind, str]  # batches that the family can't be trained with, and why


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
        children: dict[str, Any] = dict(module._modules)
        for name, child in module._modules.items():
            below = f"{path}.{name}".removeprefix(".")
            if below == self.path:
                children[name] = list(layers)
            elif below in self.copied and child is not None:
                children[name] = self._copy(child, below, layers, like, training)
        shapes = self.shapes.get(path, {})
        zeros = {name: like.new_zeros(()).expand(shape) for name, shape in shapes.items()}
        changed = {"_modules": children, "_parameters": {**module._parameters, **zeros}}
        copy.__dict__.update({**module.__dict__, **changed, "training": training})
        return copy


def _above(path: str) -> list[str]:
    """The names of the modules that contain a module; the whole model, "", comes first."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))] if path else []


class Stage(nn.Module):
    """Some layers of a model: tokens, or what the stage before returned -> hidden states, or logits.

    model: the whole model; tensors of other stages may be on the meta device.
    The stage's parameters have the names that they have in the library's whole model. The modules above the
    layers, which each forward copies, appear in the stage as plain containers of their parameters, buffers
    and children. An attention_mask and position_ids (see masks.py) follow the values of the boundary.
    slices: see slices.py; None as long as nobody has asked for a slice.
    """

    slices: Slices | None = None

    def __init__(self, model: PreTrainedModel, cut: Cut, index: int) -> None:
        super().__init__()
        self._cut, self._index = cut, index
        self._contexts: list[Context] = []  # of the attentions, where processes share sequences
        self._not_in_parts: Mapping[Kind, str] = {}  # batches that are refused there
        others = [name for name in names_above_layers(model, cut.path) if cut.owners[name] != index]
        head = cut.head if index == len(cut.layers) - 1 else ""
        self._patched = PatchedModel(model, cut.path, others, head)
        for path, shapes in self._patched.shapes.items():
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
            elif below in self._patched.copied and child is not None:
                container._modules[name] = held = nn.ModuleDict()
                self._hold(held, child, below)
            else:
                container._modules[name] = child

    @property
    def library_model(self) -> PreTrainedModel:
        """The whole model; parameters of other stages are on the meta device."""
        return self._patched.model

    def adopt_modules(self) -> None:
        """Let the library's model run the stage's present modules: a replaced one is in the stage alone."""
        self._adopt(self, self._patched.model, "")

    def _adopt(self, container: nn.Module, module: nn.Module, path: str) -> None:
        for name, child in container._modules.items():
            below = f"{path}.{name}".removeprefix(".")
            if below == self._cut.path:
                continue  # layers are the same objects in both
            original = module._modules[name]
            if below in self._patched.copied and child is not None and original is not None:
                self._adopt(child, original, below)
            else:
                module._modules[name] = child

    def forward(
        self,
        *received: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        head: bool = True,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        count = len(self._cut.calls[self._cut.layers[self._index].start].carried)
        given = merged(received[count:], (attention_mask, position_ids))
        return self._run(received[:count], given, head, sequence_slice)

    def _run(
        self, received: tuple[Tensor, ...], given: Given, head: bool, place: SequenceSlice | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        first, last = self._index == 0, self._index == len(self._cut.layers) - 1
        is_given, kind = given != NONE, type(self._patched.model).__name__
        if is_given:
            refuse(kind_of(given), self._cut.refused, kind)
            refuse(kind_of(given), self._not_in_parts, kind)
        options: dict[str, Any] = {}
        if place is not None:
            given = own_part(given, place)
            options = self._options_of_slice(given, place)
        layers = self._layers(received)
        like = self._like() if first else received[0]
        tokens = received[0] if first else self._tokens(received[0])
        try:
            with whole_sequences(next(iter(self._contexts), None), tokens, given) as batch:
                output = self._patched.run(
                    tokens,
                    layers,
                    like,
                    training=self.training,
                    ends_at_head=not head,
                    **(batch | options),
                )
        except HeadReached as reached:
            (output,) = reached.args
        except StageDone as done:
            sent = (*done.args, *given) if is_given else done.args
            return sent if len(sent) > 1 else sent[0]
        own = self._cut.layers[self._index]
        if not last or (not first and not layers[own.start].entered):
            number = own.start if last else own.stop
            raise RuntimeError(
                f"{kind} has not called layer {number}, where a stage begins: "
                "write config.layerdrop=0, if it has one"
            )
        return output

    def hold_contexts(self, connect: Connect | None) -> None:
        """See zbpp/runtime/parallel/context.py. The first stage of a process tries a small copy."""
        from zbpp.models.hf.context import hold_contexts

        self._not_in_parts = hold_contexts(self.library_model, connect)
        self._contexts = [each for each in self.modules() if isinstance(each, Context)]

    def check_slices(self) -> None:
        """See zbpp/stage_api.py. The first stage of a process tries slices on a small copy."""
        from zbpp.models.hf.slices import tried

        if any(getattr(each, "gradient_checkpointing", False) for each in self.library_model.modules()):
            raise ValueError(
                "the library's gradient checkpointing drops the cache, and slices need one: write "
                "memory.recompute=block, or zbpp.autograd.recompute(layer), instead"
            )
        if self.slices is None:
            self.slices = tried(self.library_model, self._cut)

    def _options_of_slice(self, given: Given, place: SequenceSlice) -> dict[str, Any]:
        """The arguments of the library's model for a slice."""
        from zbpp.models.hf.slices import cache_of

        self.check_slices()
        assert self.slices is not None
        if given != NONE:
            refuse(kind_of(given), self.slices.refused, type(self.library_model).__name__)
        windows = self.slices.windows
        if kind_of(given)[0] == 4:  # the library takes such a mask for all layers
            windows = [None] * len(windows)
        return {**keywords(seen_by(given, place)), "past_key_values": cache_of(place, windows)}

    def _like(self) -> Tensor:
        """A plain tensor of the stage's dtype and device; its parameters may be sharded over a mesh."""
        parameter = next(self.parameters())
        return torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _layers(self, received: tuple[Tensor, ...]) -> list[Any]:
        """The objects that the model calls as its layers: Skip, Enter, the stage's own layers, Leave."""
        cut, own, replaced = self._cut, self._cut.layers[self._index], {}
        layers: list[Any] = layers_at(self._patched.model, cut.path)
        for number in range(own.start):
            layers[number] = Skip(layers[number], cut.calls[number])
        if own.start:
            replaced = dict(zip(cut.calls[own.start].carried, received, strict=True))
            layers[own.start] = Enter(layers[own.start], replaced)
            for number in own[1:]:
                replaced = repeated(cut.calls[number], replaced)
                if replaced:
                    layers[number] = Enter(layers[number], replaced)
        if own.stop < len(layers):
            call = cut.calls[own.stop]
            layers[own.stop] = Leave(layers[own.stop], call, repeated(call, replaced))
        return layers

    def _tokens(self, hidden: Tensor) -> Tensor:
        batch, time = (hidden.shape[dim] for dim in self._cut.batch_and_time)
        return torch.full((batch, time), self._cut.token, device=hidden.device)


class FirstStage(Stage):
    """Stage 0, which gets the batch: its arguments have the names of the library's."""

    def forward(  # type: ignore[override]  # no other stage has the tokens
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        head: bool = True,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        return self._run((input_ids,), (attention_mask, position_ids), head, sequence_slice)


class _OwnsLoss(Stage):
    """A last stage that computes the loss itself, see zbpp/stage_api.py. keeps_logits: see `Head`."""

    def __init__(self, model: PreTrainedModel, cut: Cut, index: int, *, keeps_logits: bool) -> None:
        super().__init__(model, cut, index)
        head = self.get_submodule(cut.head)
        head.__class__ = Head  # it was an nn.Linear without bias
        cast(Head, head).keeps_logits = keeps_logits

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """`token_loss` of the logits."""
        return head_loss(self.get_submodule(self._cut.head), hidden, target)


class LastStage(_OwnsLoss):
    """The last stage of several."""


class OnlyStage(_OwnsLoss, FirstStage):
    """The one stage of a model that is not cut."""


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
