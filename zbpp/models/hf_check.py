"""How a family's layers are called, found by running a small copy; and the proof that the cut is right.

Nothing here recognises a family or a module by its name: which stage a parameter belongs to and what
must cross a boundary is what the small copy was seen to use. Then its stages, built as the large ones
are, must give the uncut copy's logits and gradients. A family that does not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from zbpp.models.hf_cut import Call, Cut, InPlaceOf, Opened, Skip, Stage, names_above_layers
from zbpp.models.hf_init import initialise
from zbpp.models.hf_shrink import build_on_meta, shrunken
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BATCH, TIME = 3, 11  # such that no other dimension has these sizes
_RELATIVE = 1e-9  # the same kernels in the same order, in float64


def find_cut(config: PretrainedConfig, layers: Sequence[range], seed: int) -> Cut:
    """How the model falls into stages of these layers.

    Raises ValueError naming the module, and why it can't be cut there.
    """
    small = shrunken(config)
    whole = _made(small, seed)
    text = small.get_text_config(decoder=True)
    path = layers_of(whole, text.num_hidden_layers)
    token = int(getattr(text, "pad_token_id", None) == 0)
    tokens = torch.randint(text.vocab_size, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))
    recorded = _record(whole, path, tokens)
    calls = _calls(whole, path, recorded, torch.full_like(tokens, token))
    _refuse_what_is_made_later(whole, path, calls, recorded, layers)
    hidden = recorded[0].leaves[calls[0].carried[0]]
    owners = _owners(whole, path, tokens, calls, layers)
    cut = Cut(path, tuple(layers), owners, calls, _batch_and_time(whole, hidden), token)
    _compare(whole, small, cut, tokens, seed)
    return cut


def layers_of(model: nn.Module, num_layers: int) -> str:
    """The name of the list of layers. Raises ValueError unless there is exactly one of that length."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outer) != 1:
        which = ", ".join(outer) or "none"
        raise ValueError(
            f"{type(model).__name__} needs one list of its {num_layers} layers to be cut, and has: {which}"
        )
    return outer[0]


def _made(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    model = build_on_meta(config)
    initialise(model, seed, lambda name: True)
    return model.double().eval()


class _Seen(InPlaceOf):
    """A layer whose last call is remembered. seam: positions where the graph is cut in two."""

    def __init__(self, layer: Any, seam: Sequence[int] = ()) -> None:
        super().__init__(layer)
        self.seam = seam
        self.leaves: list[Any] = []  # as the library gave them
        self.entered: list[Any] = []  # as the layer got them
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.names = [keystr(path) for path, _ in tree_flatten_with_path((args, kwargs))[0]]
        self.leaves, spec = tree_flatten((args, kwargs))
        self.entered = list(self.leaves)
        for position in self.seam:
            tensor = self.leaves[position]
            self.entered[position] = tensor.detach().requires_grad_(tensor.requires_grad)
        args, kwargs = spec.unflatten(self.entered)
        self.output = self.layer(*args, **kwargs)
        return self.output


def _record(model: PreTrainedModel, path: str, tokens: Tensor) -> list[_Seen]:
    """Every layer's call in the uncut model. Raises ValueError if a layer is not called."""
    seen = [_Seen(layer) for layer in model.get_submodule(path)]  # type: ignore[union-attr]  # a ModuleList
    Opened(model, path).run(tokens, seen, next(model.parameters()), training=False)
    for number, each in enumerate(seen):
        if each.output is None:
            raise ValueError(f"{path}.{number} of {type(model).__name__} is not called: it can't be cut there")
    return seen


def _calls(model: PreTrainedModel, path: str, recorded: list[_Seen], tokens: Tensor) -> list[Call]:
    """What of each call a later stage can't make itself: it has neither the tokens nor their embedding."""
    like = next(model.parameters())
    calls = [Call((0,), {}, *_returned(model, path, recorded, number)) for number in range(len(recorded))]
    hidden = [_hidden(each) for each in recorded]
    blind = [
        _Seen(Skip(each.layer, call._replace(carried=(position,))))
        for each, call, position in zip(recorded, calls, hidden, strict=True)
    ]
    Opened(model, path, names_above_layers(model, path)).run(tokens, blind, like, training=False)
    found = []
    for number, (call, position) in enumerate(zip(calls, hidden, strict=True)):
        differing = _differing(recorded[number].leaves, blind[number].leaves)
        carried = (position, *(each for each in differing if each != position))
        for each in carried:
            if not isinstance(recorded[number].leaves[each], Tensor):
                raise ValueError(
                    f"{path}.{number} of {type(model).__name__} is given {recorded[number].names[each]}, which "
                    "depends on the tokens and is no tensor: it can't be sent"
                )
        found.append(call._replace(carried=carried, again=_again(recorded, number, carried)))
    return found


def _again(recorded: list[_Seen], number: int, carried: tuple[int, ...]) -> dict[int, int]:
    """Where the layer before was given the same tensors."""
    before = recorded[number - 1].leaves if number else []
    places = {id(leaf): position for position, leaf in enumerate(before) if isinstance(leaf, Tensor)}
    now = recorded[number].leaves
    return {here: places[id(now[here])] for here in carried[1:] if id(now[here]) in places}


def _hidden(seen: _Seen) -> int:
    """The first tensor of a call."""
    return next(i for i, leaf in enumerate(seen.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _returned(
    model: PreTrainedModel, path: str, recorded: list[_Seen], number: int
) -> tuple[TreeSpec, int]:
    """The structure of what a layer returns, and where in it the hidden states are."""
    shape = recorded[number].leaves[_hidden(recorded[number])].shape
    leaves, spec = tree_flatten(recorded[number].output)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.shape == shape:
            return spec, position
    raise ValueError(f"{path}.{number} of {type(model).__name__} returns no hidden states like it was given")


def _differing(one: list[Any], other: list[Any]) -> list[int]:
    if len(one) != len(other):
        return list(range(len(one)))
    return [position for position, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (one is other or not isinstance(one, int | float | str) or one == other)


def _refuse_what_is_made_later(
    model: PreTrainedModel, path: str, calls: list[Call], recorded: list[_Seen], layers: Sequence[range]
) -> None:
    """A layer inside a stage may need, besides hidden states, only what the first one was given, too."""
    for own in layers[1:]:
        for number in own[1:]:
            lacking = [p for p in calls[number].carried[1:] if p not in calls[number].again]
            if lacking:
                raise ValueError(
                    f"{path}.{number} of {type(model).__name__} is given {recorded[number].names[lacking[0]]}, which "
                    "is made of tokens or of parameters before the layers: a later stage has neither"
                )


def _batch_and_time(model: PreTrainedModel, hidden: Tensor) -> tuple[int, int]:
    sizes = list(hidden.shape)
    if sizes.count(BATCH) != 1 or sizes.count(TIME) != 1:
        raise ValueError(
            f"the hidden states of {type(model).__name__} have no dimension of batch and one of time: for "
            f"{BATCH} x {TIME} tokens they are {sizes}"
        )
    return sizes.index(BATCH), sizes.index(TIME)


def _owners(
    model: PreTrainedModel, path: str, tokens: Tensor, calls: Sequence[Call], layers: Sequence[range]
) -> dict[str, int]:
    """The stage that uses each parameter, by the graph; of one that none uses, the layer's, else stage 0.

    Raises ValueError for one that several use.
    """
    seams = {own.start: calls[own.start].carried for own in layers[1:]}
    held = model.get_submodule(path)
    seen = [_Seen(layer, seams.get(i, ())) for i, layer in enumerate(held)]  # type: ignore[arg-type]  # a ModuleList
    logits = Opened(model, path).run(tokens, seen, next(model.parameters()), training=False)
    ends = [[seen[start].leaves[p] for p in positions] for start, positions in seams.items()] + [[logits]]
    names = dict(model.named_parameters())
    stage_of_layer = {f"{path}.{i}": stage for stage, own in enumerate(layers) for i in own}
    users: dict[str, set[int]] = {name: set() for name in names}
    for name in names:
        if name.startswith(f"{path}."):
            users[name].add(stage_of_layer[".".join(name.split(".")[: path.count(".") + 2])])
    for stage, outputs in enumerate(ends):
        wanted = [each.sum() for each in outputs if each.requires_grad]
        grads = torch.autograd.grad(wanted, list(names.values()), allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                users[name].add(stage)
    for name, stages in users.items():
        if len(stages) > 1:
            raise ValueError(_shared(model, name, sorted(stages)))
    return {name: min(stages, default=0) for name, stages in users.items()}


def _shared(model: PreTrainedModel, name: str, stages: list[int]) -> str:
    which = " and ".join(map(str, stages))
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    if tied and model.get_parameter(name) is getattr(model.get_output_embeddings(), "weight", None):
        return (
            f"its embedding and head share one weight, {name}, and they are on stages {which}: "
            "write config.tie_word_embeddings=false, or use one stage"
        )
    return f"{name} of {type(model).__name__} is used on stages {which}: use one stage, or another cut"


def build_stage(config: PretrainedConfig, cut: Cut, index: int, seed: int) -> Stage:
    """A stage with its initial values, on the CPU; other stages' tensors are never made.

    Raises ValueError unless its names are those that the cut says.
    """
    model = build_on_meta(config)
    names = {name for name, _ in model.named_parameters()}
    if names != cut.owners.keys():
        other = min(names ^ cut.owners.keys())
        raise ValueError(f"{other}: a small copy of the config has other parameters, and can't check the cut")
    inside = f"{cut.path}."
    own_layers = tuple(f"{inside}{number}." for number in cut.layers[index])
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_own(name: str) -> bool:
        if name in parameters:
            return cut.owners.get(name, index) == index
        return name.startswith(own_layers) or not name.startswith(inside)

    initialise(model, seed, is_own)
    return Stage(model, cut, index)


def _compare(whole: PreTrainedModel, config: PretrainedConfig, cut: Cut, tokens: Tensor, seed: int) -> None:
    """Raises ValueError unless the stages in a row are the whole model."""
    stages = [build_stage(config, cut, index, seed).double().eval() for index in range(len(cut.layers))]
    _compare_tensors(whole, stages)
    logits = whole(input_ids=tokens, return_dict=True).logits
    generator = torch.Generator().manual_seed(seed_of(seed, "gradient of logits"))
    gradient = torch.rand(logits.shape, generator=generator, dtype=logits.dtype) + 0.5
    whole.zero_grad()
    logits.backward(gradient)
    x: Any = (tokens,)
    for stage in stages:
        x = stage(*x)
        x = x if isinstance(x, tuple) else (x,)
    _refuse_difference(whole, "logits", x[0], logits)
    x[0].backward(gradient)
    found = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        _refuse_difference(whole, f"the gradient of {name}", found[name].grad, parameter.grad)


def _compare_tensors(whole: PreTrainedModel, stages: Sequence[nn.Module]) -> None:
    """Each parameter on exactly one stage, each buffer on one at least, all with the whole model's values."""
    expected: Mapping[str, Tensor] = dict(whole.named_parameters())
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    if sorted(names) != sorted(expected):
        other = min(set(names) ^ set(expected), default=max(names, key=names.count))
        raise ValueError(f"{other} of {type(whole).__name__} is not on exactly one stage")
    buffers = dict(whole.named_buffers())
    missing = buffers.keys() - {name for stage in stages for name, _ in stage.named_buffers()}
    if missing:
        raise ValueError(f"{min(missing)} of {type(whole).__name__} is on no stage")
    for stage in stages:
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            _refuse_difference(
                whole, f"the initial value of {name}", tensor, {**expected, **buffers}[name]
            )


def _refuse_difference(whole: nn.Module, what: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        is_same = (found is None or not found.any()) and (expected is None or not expected.any())
    else:
        scale = _RELATIVE * max(float(expected.detach().abs().max()), 1e-30) if expected.numel() else 0.0
        is_same = found.shape == expected.shape and torch.allclose(
            found.double(), expected.double(), rtol=0, atol=scale
        )
    if not is_same:
        raise ValueError(
            f"{type(whole).__name__} can't be cut there: {what} is not the uncut model's in a small copy"
        )
