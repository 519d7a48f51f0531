"""A Hugging Face model whose sequences are divided over processes: by the library's registries of attention.

Attention is registered as "zbpp_context_sdpa" and "zbpp_context_eager". Both exchange heads for tokens
(zbpp/autograd/models/context.py), call the library's own function of that name, and exchange back. The masks
of these names are those of whole sequences (whole_masks.py).

A family may mix tokens elsewhere, or read heads from a config. So each is tried on a small copy, on the
processes that share sequences: logits and gradients must be those of the copy alone.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.autograd.models.context import Context, refusal_of_heads
from zbpp.models.hf.calls import BATCH
from zbpp.models.hf.cut import CutError
from zbpp.models.hf.init import constants_of, initialise
from zbpp.models.hf.masks import Kind, refused_kinds
from zbpp.models.hf.shrink import build_on_meta, with_small_copy
from zbpp.models.hf.whole_masks import whole_mask, whole_sequences

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

Connect = Callable[[Context], None]

_PREFIX, _OWN = "zbpp_context_", ("sdpa", "eager")
_SIZES = ("num_attention_heads", "num_key_value_heads")
_ALONE = "write parallel.context=1"
_TOLERANCE = 1e-5  # many norms compute in float32 in a float64 model


def hold_contexts(model: PreTrainedModel, connect: Connect | None) -> dict[Kind, str]:
    """Let each attention of a library's model exchange heads; returns the kinds of batches that are refused.

    connect: connects a Context to the processes that share sequences, on which a small copy is tried, once
    for a config. None: nothing is tried. Raises ValueError, on all of them, for a family that fails.
    """
    contexts = _hold(model)
    if connect is None:
        return {}
    for context in contexts:
        connect(context)
    num = contexts[0].num_processes
    for name, heads in contexts[0].heads.items():
        if refusal := refusal_of_heads(name, heads, num):
            raise ValueError(refusal)
    config: Any = model.config
    key = config.to_json_string(use_diff=False), num
    if key not in _tried:
        start = time.perf_counter()
        _tried[key] = with_small_copy(config, lambda small: _try_out(small, connect))
        seconds = time.perf_counter() - start
        _log.info("%s, context=%d: tried on a small copy, %.1f s", config.model_type, num, seconds)
    return _tried[key]


_tried: dict[tuple[str, int], dict[Kind, str]] = {}


def _hold(model: PreTrainedModel) -> list[Context]:
    """Give each attention a Context, and the model the registered functions. Raises CutError."""
    kind = type(model).__name__
    found = [module for module in model.modules() if _is_attention(module)]
    if not found:
        raise CutError(f"{kind} has no attention that calls a registered function: write parallel.context=1")
    _register()
    configs: dict[int, Any] = {}
    for module in model.modules():  # configs of their own: other models have the same ones
        config: Any = getattr(module, "config", None)
        own = str(getattr(config, "_attn_implementation", ""))
        if config is None or own.startswith(_PREFIX):
            continue
        if module in found and own not in _OWN:
            raise CutError(
                f"{kind} attends by {own}, which was not tried with divided sequences: write "
                f"attn_implementation={' or '.join(_OWN)}"
            )
        if id(config) not in configs:
            configs[id(config)] = copy(config)
            if own in _OWN:
                configs[id(config)]._attn_implementation_internal = _PREFIX + own
        module.config = configs[id(config)]
    for module in found:
        if not hasattr(module, "zbpp_context"):
            sizes = {name: getattr(module.config, name, None) for name in _SIZES}
            heads = {name: size for name, size in sizes.items() if isinstance(size, int)}
            module.zbpp_context = Context(**heads)
    return [module.zbpp_context for module in found]  # type: ignore[misc]  # a Context each


def _is_attention(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for own in _OWN:
        AttentionInterface.register(_PREFIX + own, _attention)
        AttentionMaskInterface.register(_PREFIX + own, partial(whole_mask, own))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The library's own attention, of all tokens and some heads. Arguments and result are the library's."""
    known = inspect.unwrap(type(module).forward).__globals__
    own = module.config._attn_implementation.removeprefix(_PREFIX)
    attend = known["ALL_ATTENTION_FUNCTIONS"].get_interface(own, known.get("eager_attention_forward"))
    context: Context = module.zbpp_context
    heads = context.to_heads(query, key, value)
    output, weights = attend(module, *heads, attention_mask, **kwargs)  # [batch, time, heads, size]
    return context.to_tokens(output.transpose(1, 2)).transpose(1, 2), weights


# ---- The trial


def _try_out(config: PretrainedConfig, connect: Connect) -> dict[Kind, str]:
    """Raises CutError unless a small copy whose sequences are divided computes what it does alone.

    Returns the kinds of batches for which it does not.
    """
    whole = build_on_meta(config)
    initialise(whole, 0, lambda name: True, constants_of(config))
    whole.eval().to(torch.float64)  # type: ignore[no-untyped-call]  # the library's
    divided = deepcopy(whole)
    contexts = _hold(divided)
    for each in contexts:
        connect(each)
    context = contexts[0]
    generator = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocabulary, (BATCH, 6 * context.num_processes), generator=generator)

    def run(tokens: Tensor, *given: Tensor | None) -> Tensor:
        mine = _part(context, tokens)
        part = tuple([each if each is None or each.dim() == 4 else _part(context, each) for each in given])
        with whole_sequences(context, mine, part) as options:  # type: ignore[arg-type]  # mask, positions
            logits: Tensor = divided(input_ids=mine, **options, return_dict=True).logits
        return logits

    kind = type(whole).__name__
    expected, found = whole(input_ids=tokens, return_dict=True).logits, run(tokens, None, None)
    weights = torch.rand(expected.shape, generator=generator, dtype=expected.dtype) + 0.5
    expected.backward(weights)
    found.backward(_part(context, weights))
    if not _is_close(context.whole(found), expected, 0):
        raise CutError(f"{kind} can't divide sequences: logits of a small copy differ; {_ALONE}")
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    largest = max(float(each.abs().max()) for each in grads.values() if each is not None and each.numel())
    for name, parameter in divided.named_parameters():
        zeros = torch.zeros_like(parameter)
        own, alone = (zeros if each is None else each for each in (parameter.grad, grads[name]))
        summed = context.whole(own.reshape(1, -1)).view(context.num_processes, -1).sum(0)
        if not _is_close(summed, alone.flatten(), 1e-3 * largest):
            raise CutError(
                f"{kind} can't divide sequences: the gradient of {name} of a small copy differs; {_ALONE}"
            )

    def run_whole(*batch: Any) -> Tensor:
        return context.whole(run(*batch))

    return refused_kinds(whole, run_whole, tokens, lambda one, other: _is_close(one, other, 0))


def _part(context: Context, x: Tensor) -> Tensor:
    return x.chunk(context.num_processes, dim=1)[context.index].contiguous()


def _is_close(found: Tensor, expected: Tensor, least_scale: float) -> bool:
    one, other = found.detach().double(), expected.detach().double()
    scale = max(float(other.nan_to_num().abs().max()), least_scale) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)
