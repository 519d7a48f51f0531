"""A library's model over slices of a sequence: its Cache API gives attention the keys of earlier slices.

The library computes positions and masks from the lengths that a cache reports. `SliceLayer` stands for the
cache of one layer while F of one slice runs: it reports the tokens before the slice, and its `update` returns
keys and values of all tokens that the slice may see, with gradients (zbpp/autograd/models/past.py).

Where processes share sequences, `update` exchanges heads for tokens first: a Past has all tokens of a slice,
and some heads. Imported where slices are used: transformers takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.hf.config import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class SliceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the library's
    """The cache of one layer for one slice.

    window: how many tokens a token sees; None: all before it. context: of an attention, where processes share
    sequences.
    """

    def __init__(
        self, place: SequenceSlice, number: int, window: int | None, context: Context | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the library's
        self.place, self.number, self.window, self.context = place, number, window, context
        self.is_sliding, self.is_initialized = window is not None, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of this process's tokens -> those of all tokens that the slice may see."""
        key, value = key_states, value_states
        if self.context is not None:
            key, value = self.context.to_heads(key, value)
        layer = f"layer {self.number}"
        return (
            self.place.whole((layer, "key"), key, self.window),
            self.place.whole((layer, "value"), value, self.window),
        )

    def get_seq_length(self) -> int:
        """How many tokens there are before the slice."""
        return self.place.start

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """How many keys the slice may see, and the position of the first one."""
        first = self.place.first(self.window)
        return self.place.end - first, first

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0


def cache_of(place: SequenceSlice, windows: Sequence[int | None], context: Context | None) -> Any:
    """The library's cache for F of one slice."""
    return Cache(layers=[SliceLayer(place, *each, context) for each in enumerate(windows)])


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Per layer, how many tokens a token sees; None: all before it.

    Raises ValueError for a model without a cache, and for layers whose cache is not of keys and values of all
    tokens or of a window.
    """
    config: Any = model.config
    if "past_key_values" not in signature(model.forward).parameters:
        raise ValueError(refusal(config, "its forward takes no past_key_values"))
    text = text_config(config)
    is_chunked = getattr(text, "attention_chunk_size", None) is not None
    kinds = set(getattr(text, "layer_types", None) or ["chunked_attention"] * is_chunked)
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(refusal(config, f"it has layers of type {', '.join(other)}"))
    windows: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(refusal(config, f"the library's cache has a {type(layer).__name__}"))
        windows.append(getattr(layer, "sliding_window", None))
    return windows


def refusal(config: PretrainedConfig, why: str) -> str:
    """The error for a family that can't be run in slices."""
    return (
        f"{config.model_type} can't be run in slices of a sequence, since {why}: write schedule.slices=1 "
        "(a Pipeline: a timetable without slices)"
    )
