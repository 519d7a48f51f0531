"""How a family's layers are called, found by running a small copy; and the proof that the cut is right.

Nothing here recognises a family or a module by its name: which stage a parameter belongs to and what
must cross a boundary is what the small copy was seen to use. Then its stages, built as the large ones
are, must give the uncut copy's logits and gradients. A family that does not is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from zbpp.models.hf_cut import Call, Cut, CutError, InPlaceOf, LibraryError, Opened, Skip, Stage, names_above_layers
from zbpp.models.hf_init import initialise
from zbpp.models.hf_shrink import build_on_meta, with_small_copy
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BATCH, TIME = 3, 11  # such that no other dimension has these sizes
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-6}  # they are the same kernels in the same order


def find_cut(
    config: PretrainedConfig, split: Callable[[int], Sequence[range]], seed: int
) -> Cut:
    """How the model falls into stages. split: number of layers -> those of each stage.

    Raises ValueError naming the module, and why it can't be cut there.
    """

    def find(small: PretrainedConfig) -> Cut:
        try:
            return _find_cut(small, split, seed, torch.float64)
        except LibraryError:  # some code knows float32 only
            return _find_cut(small, split, seed, torch.float32)

    return with_small_copy(config, find)


def _find_cut(
    config: PretrainedConfig, split: Callable[[int], Sequence[range]], seed: int, dtype: torch.dtype
) -> Cut:
    constants = _constants(config)
    whole = build_on_meta(config)
    initialise(whole, seed, lambda name: True, constants)
    whole.to(dtype).eval()
    initial = {name: value.detach().clone() for name, value in _tensors(whole).items()}
    text = config.get_text_config(decoder=True)
    token = int(getattr(text, "pad_token_id", None) == 0)
    tokens = torch.randint(text.vocab_size, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))
    path = _list_of_layers(whole, tokens)
    layers = split(len(whole.get_submodule(path)))  # type: ignore[arg-type]  # a ModuleList
    recorded = _record(whole, path, tokens)
    calls = _calls(whole, path, recorded, torch.full_like(tokens, token))
    _refuse_what_is_made_later(whole, path, calls, recorded, layers)
    hidden = recorded[0].leaves[calls[0].carried[0]]
    owners = _owners(whole, path, tokens, calls, layers)
    cut = Cut(path, tuple(layers), owners, calls, _batch_and_time(whole, hidden), token, constants)
    _compare(whole, initial, config, cut, tokens, seed)
    return cut


def _list_of_layers(model: PreTrainedModel, tokens: Tensor) -> str:
    """The name of the one list whose modules are called once each. Raises CutError if there is none."""
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
        raise CutError(f"{type(model).__name__} needs one list of layers, each called once, to be cut: it {which}")
    return called[0]


def _constants(config: PretrainedConfig) -> dict[str, float]:
    """The tensors of a model made by the library itself that are one number throughout."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng([]):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # the library's
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: float(values.flatten()[0])
        for name, values in ((name, each.detach()) for name, each in tensors)
        if values.is_floating_point() and values.numel() and bool((values == values.flatten()[0]).all())
    }


class _Seen(InPlaceOf):
    """A layer whose last call is remembered. seam: positions where the graph is cut in two.

    severed: the cut tensors by the id of the ones that the library goes on with, shared by all layers.
    """

    def __init__(self, layer: Any, seam: Sequence[int] = (), severed: dict[int, Tensor] | None = None) -> None:
        super().__init__(layer)
        self.seam, self.severed = seam, {} if severed is None else severed
        self.leaves: list[Any] = []
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.names = _names(self.layer, args, kwargs)
        given, spec = tree_flatten((args, kwargs))
        self.leaves = [self.severed.get(id(leaf), leaf) for leaf in given]
        for position in self.seam:
            tensor = self.leaves[position]
            self.severed[id(given[position])] = tensor.detach().requires_grad_(tensor.requires_grad)
        args, kwargs = tree_unflatten([self.severed.get(id(leaf), leaf) for leaf in given], spec)
        self.output = self.layer(*args, **kwargs)
        return self.output


def _names(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Of the leaves of a call, as the layer's forward calls its arguments."""
    known = list(signature(layer.forward).parameters)
    given = {name: each for name, each in zip(known, args, strict=False)} | kwargs
    return [keystr(path) for path, _ in tree_flatten_with_path(given)[0]]


def _record(model: PreTrainedModel, path: str, tokens: Tensor) -> list[_Seen]:
    """Every layer's call in the uncut model. Raises CutError if a layer is not called."""
    seen = [_Seen(layer) for layer in model.get_submodule(path)]  # type: ignore[union-attr]  # a ModuleList
    Opened(model, path).run(tokens, seen, next(model.parameters()), training=False)
    for number, each in enumerate(seen):
        if each.output is None:
            raise CutError(f"{path}.{number} of {type(model).__name__} is not called: it can't be cut there")
    return seen


def _calls(model: PreTrainedModel, path: str, recorded: list[_Seen], tokens: Tensor) -> list[Call]:
    """What of each call a later stage can't make itself: it has neither the tokens nor their embedding."""
    like = next(model.parameters())
    calls = [Call((0,), {}, _returned(model, path, recorded, number)) for number in range(len(recorded))]
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
                raise CutError(
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


def _returned(model: PreTrainedModel, path: str, recorded: list[_Seen], number: int) -> tuple[int, int] | None:
    """Of how many a layer returns a tuple, and the position of the hidden states; None: it returns just them."""
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
    return type(one) is type(other) and (one is other or not isinstance(one, int | float | str) or one == other)


def _refuse_what_is_made_later(
    model: PreTrainedModel, path: str, calls: list[Call], recorded: list[_Seen], layers: Sequence[range]
) -> None:
    """A layer inside a stage may need, besides hidden states, only what the first one was given, too, or what layers returned."""
    for own in layers[1:]:
        for number in own[1:]:
            made = {id(leaf) for leaf in tree_leaves([each.output for each in recorded[own.start : number]])}
            leaves = recorded[number].leaves
            known = {p for p in calls[number].carried if id(leaves[p]) in made} | calls[number].again.keys()
            lacking = [p for p in calls[number].carried[1:] if p not in known]
            if lacking:
                raise CutError(
                    f"{path}.{number} of {type(model).__name__} is given {recorded[number].names[lacking[0]]}, which "
                    "is made of tokens or of parameters before the layers: a later stage has neither"
                )


def _batch_and_time(model: PreTrainedModel, hidden: Tensor) -> tuple[int, int]:
    sizes = list(hidden.shape)
    if sizes.count(BATCH) != 1 or sizes.count(TIME) != 1:
        raise CutError(
            f"the hidden states of {type(model).__name__} have no dimension of batch and one of time: for "
            f"{BATCH} x {TIME} tokens they are {sizes}"
        )
    return sizes.index(BATCH), sizes.index(TIME)


def _owners(
    model: PreTrainedModel, path: str, tokens: Tensor, calls: Sequence[Call], layers: Sequence[range]
) -> dict[str, int]:
    """The stage that uses each parameter, by the graph; of one that none uses, the layer's, else stage 0.

    Raises CutError for one that several use.
    """
    seams = {own.start: calls[own.start].carried for own in layers[1:]}
    held = model.get_submodule(path)
    severed: dict[int, Tensor] = {}
    seen = [_Seen(layer, seams.get(i, ()), severed) for i, layer in enumerate(held)]  # type: ignore[arg-type]  # a ModuleList
    logits = Opened(model, path).run(tokens, seen, next(model.parameters()), training=False)
    ends = [[seen[start].leaves[p] for p in positions] for start, positions in seams.items()] + [[logits]]
    names = dict(model.named_parameters())
    stage_of_layer = {f"{path}.{i}": stage for stage, own in enumerate(layers) for i in own}
    users: dict[str, set[int]] = {name: set() for name in names}
    for name in names:
        if name.startswith(f"{path}."):
            users[name].add(stage_of_layer[".".join(name.split(".")[: path.count(".") + 2])])
    trained = [name for name, parameter in names.items() if parameter.requires_grad]
    for stage, outputs in enumerate(ends):
        sums = [each.sum() for each in outputs if each.requires_grad]
        leaves = [names[name] for name in trained]
        grads = torch.autograd.grad(sums, leaves, allow_unused=True, retain_graph=True)
        for name, grad in zip(trained, grads, strict=True):
            if grad is not None:
                users[name].add(stage)
    for name, stages in users.items():
        if len(stages) > 1:
            raise CutError(_shared(model, name, sorted(stages)))
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

    Raises CutError unless its names are those that the cut says.
    """
    model = build_on_meta(config)
    names = {name for name, _ in model.named_parameters()}
    if names != cut.owners.keys():
        other = min(names ^ cut.owners.keys())
        raise CutError(f"{other}: a small copy of the config has other parameters, and can't check the cut")
    inside = f"{cut.path}."
    own_layers = tuple(f"{inside}{number}." for number in cut.layers[index])
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_own(name: str) -> bool:
        if name in parameters:
            return cut.owners.get(name, index) == index
        return name.startswith(own_layers) or not name.startswith(inside)

    initialise(model, seed, is_own, cut.constants)
    return Stage(model, cut, index)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _compare(
    whole: PreTrainedModel,
    initial: Mapping[str, Tensor],
    config: PretrainedConfig,
    cut: Cut,
    tokens: Tensor,
    seed: int,
) -> None:
    """Raises CutError unless the stages in a row are the whole model."""
    stages = [build_stage(config, cut, index, seed).to(whole.dtype).eval() for index in range(len(cut.layers))]
    _compare_tensors(whole, initial, stages)
    logits = whole(input_ids=tokens, return_dict=True).logits
    output = _chained(stages, tokens)
    _refuse_difference(whole, "logits", output, logits)
    generator = torch.Generator().manual_seed(seed_of(seed, "gradient of logits"))
    gradient = torch.rand(logits.shape, generator=generator, dtype=logits.dtype) + 0.5
    whole.zero_grad()
    logits.backward(gradient)
    output.backward(gradient)
    found = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        _refuse_difference(whole, f"the gradient of {name}", found[name].grad, parameter.grad)
    with torch.no_grad():  # a second time, for models that change themselves
        logits, output = whole(input_ids=tokens, return_dict=True).logits, _chained(stages, tokens)
    _refuse_difference(whole, "a second call's logits", output, logits)


def _chained(stages: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    x: Any = tokens
    for stage in stages:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    logits: Tensor = x
    return logits


def _compare_tensors(
    whole: PreTrainedModel, initial: Mapping[str, Tensor], stages: Sequence[nn.Module]
) -> None:
    """Each parameter on exactly one stage, each buffer on one at least, all with the whole model's values."""
    expected = {name for name, _ in whole.named_parameters()}
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    if sorted(names) != sorted(expected):
        other = min(set(names) ^ expected, default=max(names, key=names.count))
        raise CutError(f"{other} of {type(whole).__name__} is not on exactly one stage")
    found = [(name, tensor) for stage in stages for name, tensor in _tensors(stage).items()]
    missing = initial.keys() - {name for name, _ in found}
    if missing:
        raise CutError(f"{min(missing)} of {type(whole).__name__} is on no stage")
    for name, tensor in found:
        _refuse_difference(whole, f"the initial value of {name}", tensor, initial[name])


def _refuse_difference(whole: nn.Module, what: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        is_same = (found is None or not found.any()) and (expected is None or not expected.any())
    else:
        one, other = found.detach().double(), expected.detach().double()
        scale = _RELATIVE.get(found.dtype, 0.0) * float(other.abs().max()) if other.numel() else 0.0
        is_same = one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=scale)
    if not is_same:
        raise CutError(
            f"{type(whole).__name__} can't be cut there: {what} is not the uncut model's in a small copy"
        )
