"""One stage of a Hugging Face model: the library's own code, with the layers of other stages skipped.

A stage keeps the whole config, and its layers keep their numbers. Its forward calls the library's whole
model. On a stage that owns layers 2 and 3 that call goes:

    tokens -> code before the layers -> Skip, Skip, Enter layer 2, layer 3, Leave     (the rest is not run)

The boundary between two stages is the CALL of a layer. A stage ends where the model calls the first layer of
the next stage, and sends the tensors of that call; the next stage begins with the same call. So the code
before, between and after the layers runs on every stage that needs its results. Each stage makes masks and
positions anew, by the library's code. Parameters of other stages are replaced by zeros that take no memory,
and what is computed from these zeros is thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.hf.cut import (
    Cut,
    Enter,
    HeadReached,
    Leave,
    PatchedModel,
    Skip,
    StageDone,
    layers_at,
    names_above_layers,
    repeated,
)
from zbpp.models.hf.dtypes import dtypes_of
from zbpp.models.hf.labels import target_names_of
from zbpp.models.hf.masks import (
    NONE,
    Given,
    Kind,
    as_one_document,
    in_dtype,
    kind_of,
    made_without_reading,
    merged,
    own_part,
    refuse,
)
from zbpp.models.hf.values import made_as_of_real_tensors
from zbpp.models.hf.whole_masks import whole_sequences
from zbpp.models.layers import Head, head_loss
from zbpp.stage_api import TargetNames

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zbpp.models.hf.context import Connect


class TryParts(Protocol):
    """Raises ValueError if stages don't compute, of sequences in these parts, what they do of whole ones."""

    def __call__(self, *, is_sliced: bool, context: Context | None) -> None: ...


class Stage(nn.Module):
    """Some layers of a model: tokens, or what the stage before returned -> hidden states, or logits.

    model: the whole model; tensors of other stages may be on the meta device.
    The stage's parameters have the names that they have in the library's whole model. The modules above the
    layers, which each forward copies, appear in the stage as plain containers of their parameters, buffers
    and children. An attention_mask and position_ids (see masks.py) follow the values of the boundary.
    windows: of each layer, see slices.py; None as long as nobody has asked for a slice. try_parts: tries
    sequences in parts on a small copy, see trial.py; None for the stages of the small copy.
    """

    windows: Sequence[int | None] | None = None
    try_parts: TryParts | None = None

    def __init__(self, model: PreTrainedModel, cut: Cut, index: int) -> None:
        super().__init__()
        self._cut, self._index = cut, index
        self._contexts: list[Context] = []  # of the attentions, where processes share sequences
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

    @property
    def target_names(self) -> TargetNames:
        """See zbpp/stage_api.py; labels.py has the rule."""
        return target_names_of(self.library_model, self._cut.label_shift)

    def declared_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """See zbpp/stage_api.py: the dtypes of the library's from_pretrained(dtype=)."""
        return dtypes_of(self._patched.model.config, dtype)

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
        options = {} if place is None else self._options_of_slice(given, place)
        if is_given:
            refuse(kind_of(given), self._refused(place), kind)
        given = own_part(given, place)
        layers = self._layers(received)
        like = self._like() if first else received[0]
        tokens = received[0] if first else self._tokens(received[0])
        try:
            masks = whole_sequences(self._context, tokens, given, place)
            documents = as_one_document(asked=self._cut.one_document and not is_given)
            with masks as batch, documents, made_without_reading(given), made_as_of_real_tensors(tokens):
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
            self._check_entered(layers)
            sent = (*done.args, *given) if is_given else done.args
            return sent if len(sent) > 1 else sent[0]
        self._check_entered(layers)
        if not last:
            raise self._not_called(self._cut.layers[self._index].stop)
        return output

    def _check_entered(self, layers: Sequence[Any]) -> None:
        """Raises RuntimeError if the model has skipped the layer that takes what the stage received."""
        start = self._cut.layers[self._index].start
        if self._index and not layers[start].entered:
            raise self._not_called(start)

    def _not_called(self, number: int) -> RuntimeError:
        kind = type(self._patched.model).__name__
        return RuntimeError(
            f"{kind} has not called layer {number}, where a stage begins: a model that is cut into stages "
            "calls every layer in each forward"
        )

    def _refused(self, place: SequenceSlice | None) -> Mapping[Kind, str]:
        """The batches that are refused where sequences come as they do now."""
        num = 1 if self._context is None else self._context.num_processes
        return {**self._cut.refused_in_parts.get((place is not None, num), {}), **self._cut.refused}

    @property
    def _context(self) -> Context | None:
        """The Context of one of the attentions; None where no processes share sequences."""
        return next(iter(self._contexts), None)

    def hold_contexts(self, connect: Connect | None) -> None:
        """See zbpp/features/context/context.py. The first stage of a process tries a small copy."""
        from zbpp.models.hf.context import hold_contexts

        hold_contexts(self.library_model, connect)
        self._contexts = [each for each in self.modules() if isinstance(each, Context)]
        if connect is not None and self.try_parts is not None:
            self.try_parts(is_sliced=False, context=self._context)
            if self.windows is not None:
                self.try_parts(is_sliced=True, context=self._context)

    def check_slices(self) -> None:
        """See zbpp/stage_api.py. The first stage of a process tries slices on a small copy."""
        from zbpp.models.hf.slices import windows_of

        if any(getattr(each, "gradient_checkpointing", False) for each in self.library_model.modules()):
            raise ValueError(
                "the library's gradient checkpointing drops the cache, and slices need one: write "
                "memory.recompute=block, or zbpp.autograd.recompute(layer), instead"
            )
        if self.windows is None:
            windows = windows_of(self.library_model)
            if self.try_parts is not None:
                self.try_parts(is_sliced=True, context=None)
            self.windows = windows

    def _options_of_slice(self, given: Given, place: SequenceSlice) -> dict[str, Any]:
        """The arguments of the library's model for a slice."""
        from zbpp.models.hf.slices import cache_of

        self.check_slices()
        assert self.windows is not None
        # The library takes a mask of four dimensions for all layers.
        windows = [None] * len(self.windows) if kind_of(given)[0] == 4 else self.windows
        return {"past_key_values": cache_of(place, windows, self._context)}

    def _like(self) -> Tensor:
        """A plain tensor of the stage's dtype and device; its parameters may be sharded over a mesh."""
        parameter = next(each for each in self.parameters() if each.is_floating_point())
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
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = in_dtype(attention_mask, self._like().dtype)
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
