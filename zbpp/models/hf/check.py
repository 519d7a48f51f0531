"""The check of a cut: the stages of a small copy must give the logits and gradients of the uncut copy.

`find_cut` finds the cut on the small copy and checks it there. A model that does not pass is refused with the
module and the reason. So a family that nobody has tried is never cut wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from zbpp.closeness import is_close
from zbpp.models.hf.build import build_stage
from zbpp.models.hf.calls import (
    BATCH,
    TIME,
    batch_and_time,
    calls_of,
    list_of_layers,
    owners_of,
    record,
)
from zbpp.models.hf.cut import Cut, CutError, LibraryError, layers_at
from zbpp.models.hf.init import constants_of, initialise, perturb
from zbpp.models.hf.labels import shift_of
from zbpp.models.hf.masks import Kind, is_one_document, refused_kinds
from zbpp.models.hf.shrink import build_on_meta, with_small_copy
from zbpp.models.hf.ties import aliases_of, names_of, summed_gradients
from zbpp.models.layers import token_loss
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Relative tolerances: stages and uncut model run the same kernels in the same order.
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-6}


def find_cut(config: PretrainedConfig, split: Callable[[int], Sequence[range]], seed: int) -> Cut:
    """How the model is cut into stages. split: number of layers -> the layers of each stage.

    Raises ValueError that names the module and says why the model can't be cut there.
    """

    def find(small: PretrainedConfig) -> Cut:
        try:
            return _find_cut(small, split, seed, torch.float64)
        except LibraryError:  # some models run in float32 only
            return _find_cut(small, split, seed, torch.float32)

    return with_small_copy(config, find)


def _find_cut(
    config: PretrainedConfig, split: Callable[[int], Sequence[range]], seed: int, dtype: torch.dtype
) -> Cut:
    constants = constants_of(config)
    whole = build_on_meta(config)
    initialise(whole, seed, lambda name: True, constants)
    whole.eval()  # type: ignore[no-untyped-call]  # the library's
    whole.to(dtype)  # type: ignore[arg-type]  # the library's
    initial = {name: value.detach().clone() for name, value in _tensors(whole).items()}
    perturb(whole, seed, aliases_of(whole))
    text = config.get_text_config(decoder=True)
    padding: Any = getattr(text, "pad_token_id", None)
    token = int(padding == 0)
    tokens = torch.randint(text.vocab_size, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))
    path = list_of_layers(whole, tokens)
    layers = split(len(layers_at(whole, path)))
    if len(layers) > 1:
        _refuse_skipped_layers(whole)
    recorded, logits = record(whole, path, tokens)
    calls = calls_of(whole, path, recorded, torch.full_like(tokens, token))
    hidden = recorded[0].leaves[calls[0].carried[0]]
    owners = owners_of(whole, path, tokens, calls, layers)
    head = head_of(whole, tokens)
    sizes = batch_and_time(whole, hidden)
    shift = shift_of(whole, tokens, logits.detach())
    one = is_one_document(whole, tokens, padding if padding in range(text.vocab_size) else token)
    cut = Cut(path, tuple(layers), owners, calls, sizes, token, *head, shift, one, constants, {}, {})
    refused = _compare(whole, initial, config, cut, tokens, seed)
    return cut._replace(refused=refused)


def _refuse_skipped_layers(model: PreTrainedModel) -> None:
    """Raises CutError for a model that skips layers at random in training: each stage would skip others."""
    share = next((each.layerdrop for each in model.modules() if getattr(each, "layerdrop", None)), 0)
    if share:
        known = (name for name, value in model.config.to_dict().items() if value == share)
        name = next((each for each in known if each.endswith("layerdrop")), "layerdrop")
        raise CutError(
            f"{type(model).__name__} skips layers at random in training ({name}={share}), and stages can't "
            f"agree on which: write config.{name}=0 (of a folder: overrides.{name}=0), or train one stage"
        )


def head_of(model: PreTrainedModel, tokens: Tensor) -> tuple[str, str]:
    """(name of the linear layer whose product with hidden states the logits are, ""), or ("", why not)."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the library's
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return "", "its head is no linear layer without bias"
    calls: list[tuple[Any, ...]] = []
    handle = head.register_forward_hook(lambda module, args, output: calls.append(args))
    with torch.no_grad():
        logits = model(input_ids=tokens, return_dict=True).logits
    handle.remove()
    if len(calls) != 1 or len(calls[0]) != 1:
        return "", "it calls its head several times, or with several arguments"
    product = nn.functional.linear(calls[0][0], head.weight)
    if product.shape != logits.shape or not torch.equal(product.to(logits.dtype), logits):
        return "", "its logits are not what its head returns: scaled, capped or cut"
    return next(name for name, module in model.named_modules() if module is head), ""


def _compare(
    whole: PreTrainedModel,
    initial: Mapping[str, Tensor],
    config: PretrainedConfig,
    cut: Cut,
    tokens: Tensor,
    seed: int,
) -> dict[Kind, str]:
    """Raises CutError unless the stages, one after the other, compute what the whole model does.

    Returns the kinds of batches with masks or positions for which they don't.
    """
    made = [build_stage(deepcopy(config), cut, index, seed) for index in range(len(cut.layers))]
    stages = [stage.to(whole.dtype).eval() for stage in made]
    _compare_tensors(whole, initial, stages)
    for stage in stages:
        perturb(stage, seed, aliases_of(whole))
    logits = whole(input_ids=tokens, return_dict=True).logits
    (output,) = _chained(stages, tokens)
    _refuse_difference(whole, "logits", output, logits)
    generator = torch.Generator().manual_seed(seed_of(seed, "gradient of logits"))
    gradient = torch.rand(logits.shape, generator=generator, dtype=logits.dtype) + 0.5
    whole.zero_grad()
    logits.backward(gradient)
    output.backward(gradient)
    found = summed_gradients(stages, aliases_of(whole))
    for name, parameter in whole.named_parameters():
        _refuse_difference(whole, f"the gradient of {name}", found.get(name), parameter.grad)
    for training in (False, True):
        _compare_calls(whole, stages, [tokens.flip(0), tokens], training=training)
    for module in (whole, *stages):
        module.train(False)
    _compare_own_loss(whole, stages, tokens, logits.detach())
    return refused_kinds(whole, lambda *batch: _output(stages, batch), tokens, _is_close)


def _compare_own_loss(whole: PreTrainedModel, stages: Sequence[Any], tokens: Tensor, logits: Tensor) -> None:
    """Raises CutError if the last stage's own loss is not the loss of the logits."""
    if hasattr(stages[-1], "loss"):
        with torch.no_grad():
            *before, last = stages
            (message,) = _messages(before, tokens)
            # Some models round their logits, which the last stage's own loss does not.
            found = last.loss(last(*message, head=False), tokens).to(logits.dtype)
            _refuse_difference(whole, "the loss", found, token_loss(logits, tokens))


def _compare_calls(
    whole: PreTrainedModel, stages: Sequence[nn.Module], batches: list[Tensor], *, training: bool
) -> None:
    """Compare two batches in turns: a layer may pass on more than it returns, such as an attribute.

    In training mode a model that draws random numbers is not compared: dropout depends on the cut.
    """
    for module in (whole, *stages):
        module.train(training)
    with torch.no_grad(), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        expected = [whole(input_ids=tokens, return_dict=True).logits for tokens in batches]
        if not torch.equal(before, torch.get_rng_state()):
            return
        for output, logits in zip(_chained(stages, *batches), expected, strict=True):
            mode = "in training" if training else "in evaluation"
            _refuse_difference(whole, f"logits of a second call {mode}", output, logits)


def _output(stages: Sequence[nn.Module], batch: Any) -> Tensor:
    """The logits of a batch with its mask and positions."""
    for stage in stages:
        batch = stage(*batch)
        batch = batch if isinstance(batch, tuple) else (batch,)
    (logits,) = batch
    return cast(Tensor, logits)


def _chained(stages: Sequence[nn.Module], *batches: Tensor) -> list[Tensor]:
    """The logits of each batch. Every stage runs all batches before the next stage runs any."""
    return [logits for (logits,) in _messages(stages, *batches)]


def _messages(stages: Sequence[nn.Module], *batches: Tensor) -> list[Any]:
    """What the last of these stages returns for each batch."""
    messages: list[Any] = [(tokens,) for tokens in batches]
    for stage in stages:
        outputs = [stage(*message) for message in messages]
        messages = [output if isinstance(output, tuple) else (output,) for output in outputs]
    return messages


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


def _compare_tensors(
    whole: PreTrainedModel, initial: Mapping[str, Tensor], stages: Sequence[nn.Module]
) -> None:
    """Raises CutError unless every parameter is on exactly one stage and every buffer on at least one.

    This holds for each name of a tied parameter. The values must be the whole model's.
    """
    expected = set(names_of(whole))
    names = [name for stage in stages for name in names_of(stage)]
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
        is_same = _is_close(found, expected)
    if not is_same:
        raise CutError(
            f"{type(whole).__name__} can't be cut there: {what} is not the uncut model's, in a small copy"
        )


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether the values are equal up to the rounding of their dtype."""
    return is_close(found, expected, _RELATIVE.get(found.dtype, 0.0))
