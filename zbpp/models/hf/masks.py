"""Attention masks and positions of a batch. Stage 0 is given them, and each stage sends them to the next.

    attention_mask   [batch, time], 1 for real tokens, 0 for padding; or [batch, 1, time, time], which is
                     added to the attention scores: 0, or the lowest number of its dtype
    position_ids     [batch, time]; where they start again at 0 and there is no mask, a new document begins,
                     and the library's masks keep documents apart

Not every family takes all of these, and some take positions without keeping documents apart. So each kind of
batch is tried on the small copy of the model (check.py), and a stage refuses a kind that failed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from zbpp.autograd.models.past import SequenceSlice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = ("attention_mask", "position_ids")
Given = tuple[Tensor | None, Tensor | None]  # the values of NAMES
NONE: Given = (None, None)
Kind = tuple[int, bool]
"""(dimensions of the mask, 0 without one; whether there are positions)"""
_FIND = "find_packed_sequence_indices"  # of transformers.masking_utils
_IS_TRACING = "is_tracing"  # there: whether a tensor's values can't be read


def kind_of(given: Given) -> Kind:
    """The kind of a batch with this mask and these positions."""
    mask, positions = given
    return 0 if mask is None else mask.dim(), positions is not None


def keywords(given: Given) -> dict[str, Tensor]:
    """The mask and positions that are not None, by name."""
    return {name: value for name, value in zip(NAMES, given, strict=True) if value is not None}


def merged(received: tuple[Any, ...], given: Given) -> Given:
    """The mask and positions that a stage uses.

    received: mask and positions that came with the stage's inputs, or (). given: those that this rank passed
    by keyword. Raises ValueError for a stage that was given some while stage 0 was given none.
    """
    if not received:
        if named := ", ".join(keywords(given)):
            raise ValueError(f"{named} came without what stage 0 sends: pass the same on stage 0's rank")
        return NONE
    return received[0], received[1]


def as_one_document(*, asked: bool) -> AbstractContextManager[Any]:
    """Within the block the library takes each row for one document, if asked.

    It would look for documents in the values of positions, and the host would wait for the device. A forward
    that is compiled does not look.
    """
    if not asked or torch.compiler.is_compiling():
        return nullcontext()
    return _finding_documents(lambda positions: None)


def made_without_reading(given: Given) -> AbstractContextManager[Any]:
    """Within the block the library makes masks without a look at the values of those given on a device.

    It would look whether a mask is needed at all, and the host would wait for the device.
    """
    if all(each is None or each.device.type == "cpu" for each in given) or torch.compiler.is_compiling():
        return nullcontext()
    from transformers import masking_utils

    return patch.object(masking_utils, _IS_TRACING, lambda _: True)


def _finding_documents(find: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[Any]:
    """Within the block the library finds documents with this function of positions [batch, time].

    A version of the library whose own function has another name goes on calling that one.
    """
    from transformers import masking_utils

    return patch.object(masking_utils, _FIND, find, create=True)


def in_dtype(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of numbers in the dtype of attention's queries, which kernels ask for; none becomes -inf."""
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype)


def own_part(given: Given, place: SequenceSlice | None) -> Given:
    """The mask and positions of a slice: the runtime has cut what has the time as its second dimension."""
    mask, positions = given
    if (
        place is not None
        and mask is not None
        and mask.dim() == 4
        and mask.shape[2] != place.end - place.start
    ):
        mask = mask[:, :, place.start : place.end, : place.end]
    return mask, positions


def seen_by(given: Given, place: SequenceSlice | None) -> Given:
    """What the library takes for a slice: a mask of padding has all tokens so far."""
    mask, positions = given
    if place is not None and mask is not None and mask.dim() == 2:
        mask = place.whole("attention_mask", mask.unsqueeze(-1)).squeeze(-1)
    return mask, positions


def refuse(kind: Kind, refused: Mapping[Kind, str], model: str) -> None:
    """Raises ValueError for a kind of batch that the family can't be cut with."""
    if kind not in _KINDS:
        raise ValueError(
            f"attention_mask has {kind[0]} dimensions: give [batch, time] or [batch, 1, time, time]"
        )
    if kind in refused:
        raise ValueError(f"{model} can't be trained with {_KINDS[kind]}: {refused[kind]}")


_KINDS = {
    (2, False): "an attention_mask",
    (0, True): "position_ids",
    (2, True): "an attention_mask and position_ids",
    (4, False): "a mask of four dimensions",
    (4, True): "a mask of four dimensions and position_ids",
}


# ---- The trial


def refused_kinds(
    whole: PreTrainedModel,
    run: Callable[..., Tensor],
    tokens: Tensor,
    is_equal: Callable[[Tensor, Tensor], bool],
) -> dict[Kind, str]:
    """{kind of batch: why it is refused}, by trying each kind on a small model.

    whole: the uncut model. run(tokens, mask, positions): the logits of its stages, one after the other.
    """
    refused: dict[Kind, str] = {}
    with torch.no_grad():
        for given in batches(tokens, whole.dtype):
            kind = kind_of(given)
            try:
                expected = whole(input_ids=tokens, **keywords(given), return_dict=True).logits
                if not is_equal(run(tokens, *given), expected):
                    refused[kind] = "the stages' logits are not the uncut model's"
                elif kind in ((0, True), (4, True)) and not _keeps_apart(whole, tokens, expected, is_equal):
                    refused[kind] = (
                        "two documents in a row do not give the logits that each gives alone: write one "
                        "document a row"
                    )
            except Exception as error:  # whatever the library's code may raise
                refused[kind] = reason(error)
    return refused


def is_one_document(whole: PreTrainedModel, tokens: Tensor, padding: int) -> bool:
    """Whether the library takes each row for one document where it is given tokens alone, even with padding.

    It looks for documents in positions, which a family may compute from the tokens.
    """
    from transformers import masking_utils

    own, found = getattr(masking_utils, _FIND, None), list[Tensor | None]()

    def find(positions: Tensor) -> Tensor | None:
        assert own is not None  # the library has called it
        found.append(own(positions))
        return found[-1]

    padded = tokens.clone()
    padded[0, :3] = padded[1, 4:6] = padded[2, -4:] = padding
    with torch.no_grad(), _finding_documents(find):
        whole(input_ids=padded, return_dict=True)
    return all(each is None for each in found)


def reason(error: Exception) -> str:
    """An error of the library's code, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _lengths(tokens: Tensor) -> tuple[int, int]:
    """Return the lengths of the two documents in each row."""
    time = tokens.shape[1]
    return time // 2, time - time // 2


def batches(tokens: Tensor, dtype: torch.dtype) -> Iterator[Given]:
    """A batch of each kind: a row padded at the left, one at the right; or two documents in each row."""
    lengths = _lengths(tokens)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    mask[1, -4:] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand_as(tokens).contiguous()
    document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    allowed = (document[:, None] == document).tril()
    blocks = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    blocks = blocks.expand(len(tokens), 1, -1, -1).contiguous()
    yield mask, None
    yield None, positions
    yield mask, counted
    yield blocks, None
    yield blocks, positions


def _keeps_apart(
    whole: PreTrainedModel,
    tokens: Tensor,
    packed: Tensor,
    is_equal: Callable[[Tensor, Tensor], bool],
) -> bool:
    """Whether two documents in one row get the logits from the uncut model that each gets alone.

    In float32: for other lengths, softmax and norms, which many models compute in it, round differently.
    """
    lengths = _lengths(tokens)
    alone = [whole(input_ids=each, return_dict=True).logits for each in tokens.split(lengths, dim=1)]
    pairs = zip(packed.split(lengths, dim=1), alone, strict=True)
    return all(is_equal(one.float(), other.float()) for one, other in pairs)
