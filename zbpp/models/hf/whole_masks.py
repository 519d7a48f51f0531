"""Masks and positions of whole sequences, for a library's model that is given a part of each.

The library makes masks of the tokens that it is given. The function that is registered here makes them for
whole sequences instead, by the library's own function, from the padding and the documents of all processes.
Positions are always given, since a part does not begin at 0. In slices all this holds for a slice: a mask
then has the queries of the whole slice, and the keys that the cache reports (slices.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.hf.masks import Given, keywords, seen_by


class _Whole(NamedTuple):
    """What masks are made of: the lengths of whole sequences, their padding mask, and their documents."""

    lengths: dict[str, int]
    padding: Tensor | None
    documents: Tensor | None


_whole: ContextVar[_Whole] = ContextVar("whole sequences")  # set while the library makes masks


@contextmanager
def whole_sequences(
    context: Context | None, tokens: Tensor, given: Given, place: SequenceSlice | None
) -> Iterator[dict[str, Tensor]]:
    """Within the block masks are those of whole sequences; yields the mask and positions for the model.

    context: of one of the model's attentions; None: the sequences come whole. tokens and given: the part of
    the batch that this process has, its mask and its positions. place: the slice that they are a part of.
    """
    if context is None or context.transfer is None:
        yield keywords(seen_by(given, place))
        return
    from transformers.masking_utils import find_packed_sequence_indices

    (mask, positions), time = given, tokens.shape[1]
    padding = documents = None
    if mask is not None and mask.dim() == 2:
        padding, _ = seen_by((context.whole(mask).bool(), None), place)
    if positions is not None and mask is None:
        documents = find_packed_sequence_indices(context.whole(positions))
    if mask is None:  # so that the library looks for no documents in a part
        mask = torch.ones_like(tokens)
    if positions is None:
        start = 0 if place is None else place.start
        positions = start + context.positions(time, tokens.device).unsqueeze(0)
    lengths = {"q_length": time * context.num_processes}
    if place is None:
        lengths["kv_length"] = lengths["q_length"]
    before = _whole.set(_Whole(lengths, padding, documents))
    try:
        yield {"attention_mask": mask, "position_ids": positions}
    finally:
        _whole.reset(before)


def whole_mask(own: str, /, **kwargs: Any) -> Any:
    """The library's mask of whole sequences. own: the library's name of the kind of mask; kwargs: its own."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        and_masks,
        packed_sequence_mask_function,
    )

    whole = _whole.get()
    kwargs |= {**whole.lengths, "attention_mask": whole.padding}
    if whole.documents is not None:
        same = packed_sequence_mask_function(whole.documents)
        kwargs["mask_function"] = and_masks(kwargs["mask_function"], same)
        kwargs["allow_is_causal_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS[own](**kwargs)
