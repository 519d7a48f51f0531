"""A Hugging Face model whose sequences are divided over processes: by the library's registries of attention.

Attention is registered as "zbpp_context_sdpa" and "zbpp_context_eager". Both exchange heads for tokens
(zbpp/autograd/models/context.py), call the library's own function of that name, and exchange back. The masks
of these names are those of whole sequences (whole_masks.py). In slices the cache has exchanged the heads of
keys and values already (slices.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbpp.autograd.models.context import Context, refusal_of_heads
from zbpp.models.hf.cut import CutError
from zbpp.models.hf.whole_masks import whole_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Connect = Callable[[Context], None]

_PREFIX, _OWN = "zbpp_context_", ("sdpa", "eager")
_SIZES = ("num_attention_heads", "num_key_value_heads")


def hold_contexts(model: PreTrainedModel, connect: Connect | None) -> None:
    """Let each attention of a library's model exchange heads.

    connect: connects a Context to the processes that share sequences. Raises ValueError for attention that
    can't exchange heads, and for numbers of heads that so many processes can't share.
    """
    contexts = _hold(model)
    if connect is None:
        return
    for context in contexts:
        connect(context)
        for name, heads in context.heads.items():
            if refusal := refusal_of_heads(name, heads, context.num_processes):
                raise ValueError(refusal)


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
    if key.shape[2] == query.shape[2]:
        query, key, value = context.to_heads(query, key, value)
    else:  # keys and values of a slice, which are of all processes' tokens already
        (query,) = context.to_heads(query)
    output, weights = attend(
        module, query, key, value, attention_mask, **kwargs
    )  # [batch, time, heads, size]
    return context.to_tokens(output.transpose(1, 2)).transpose(1, 2), weights
