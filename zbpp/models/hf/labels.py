"""The rule for targets of a Hugging Face model: which name of a target means what.

    labels          what they mean to transformers. Nearly every causal model shifts them in its forward: the
                    target of a position is the next position's label. Those that are decoders of a model
                    with an encoder (BartForCausalLM, say) take each position's own label
    shift_labels    shifted already: each position has its own target. So they are to transformers
    target          the same, by zbpp's name

A target of -100 is left out under every name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.models.layers import token_loss
from zbpp.stage_api import IGNORED, TargetNames

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RELATIVE = 1e-4  # the library computes its loss in float32


def target_names_of(model: PreTrainedModel, shift: int | None) -> TargetNames:
    """See zbpp/stage_api.py. shift: what `shift_of` has found for a small copy of the model."""

    def target_of(labels: Tensor) -> Tensor:
        if shift is None:
            raise ValueError(
                f"{type(model).__name__} computes a loss of its own from labels, which zbpp does not: write "
                "target= (in a batch: target) with the token after each position as its target"
            )
        return shifted(labels, shift)

    return {"labels": target_of, "shift_labels": lambda target: target}


def shifted(labels: Tensor, shift: int = 1) -> Tensor:
    """For each position the label of the position `shift` later, -100 behind the end: labels [..., time]."""
    return nn.functional.pad(labels[..., shift:], (0, shift), value=IGNORED)


@torch.no_grad()
def shift_of(model: PreTrainedModel, tokens: Tensor, logits: Tensor) -> int | None:
    """By how many positions the library's loss shifts labels: 1 or 0; None if it computes another loss.

    logits: those of the tokens, int64 [batch, time].
    """
    labels = tokens.clone()
    labels[0, : labels.shape[1] // 2] = IGNORED
    whole: Any = model
    library = logging.getLogger("transformers")  # says of some families that it guesses their kind of loss
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        loss = whole(input_ids=tokens, labels=labels, return_dict=True).loss
    except Exception:  # whatever the library's code may raise: it takes no labels, or other ones
        return None
    finally:
        library.setLevel(level)
    for shift in (1, 0):
        expected = token_loss(logits, shifted(labels, shift))
        if loss is not None and torch.allclose(loss.to(expected), expected, rtol=_RELATIVE, atol=0):
            return shift
    return None
