"""The trial of sequences in parts: stages of a small copy must compute what they do for whole sequences.

Sequences come in slices, or divided over processes, or both. Then attention gets the keys of earlier slices
from a cache of the library's (slices.py), and exchanges heads for tokens (context.py). A family may read its
cache in another way than the known ones, mix tokens elsewhere, or read heads from its config. So `try_parts`
compares logits and gradients of a small copy before the first step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import Past
from zbpp.closeness import is_close, largest
from zbpp.models.hf.build import build_stage
from zbpp.models.hf.calls import BATCH
from zbpp.models.hf.config import text_config
from zbpp.models.hf.cut import Cut, CutError
from zbpp.models.hf.init import perturb
from zbpp.models.hf.masks import Given, Kind, batches, kind_of, reason
from zbpp.models.hf.shrink import with_small_copy
from zbpp.models.hf.slices import refusal
from zbpp.models.hf.stage import Stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

BOUNDS = (0, 2, 3, 6)  # of slices, in tokens per process: a token alone in a slice may go another way
WINDOW = 3  # tokens: slides within a slice, and from one to the next
# Many library models compute norms in float32 in a float64 model, and parts sum in another order.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}

_PACKED = (
    "the library tells documents apart by position_ids only without a cache, and slices need one: give an "
    "attention_mask of four dimensions, [batch, 1, time, time], which keeps the documents apart"
)


class Parts(NamedTuple):
    """In which parts a process gets sequences.

    is_sliced: whether they come in slices. context: is connected to the processes that share each sequence;
    None: they are not divided.
    """

    is_sliced: bool
    context: Context | None = None

    @property
    def num_processes(self) -> int:
        return 1 if self.context is None else self.context.num_processes

    def bounds(self, time: int) -> Sequence[int]:
        """Where the slices of the trial's sequences begin, and the sequences' end, which is `time`."""
        return [each * self.num_processes for each in BOUNDS] if self.is_sliced else (0, time)

    def own(self, x: Tensor) -> Tensor:
        """Tokens of a slice, dimension 1 -> this process's part of them."""
        if self.context is None:
            return x
        return x.chunk(self.num_processes, dim=1)[self.context.index].contiguous()

    def whole(self, x: Tensor) -> Tensor:
        """The reverse of `own`."""
        return x if self.context is None else self.context.whole(x)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.context is None:
            return x
        return self.whole(x.reshape(1, -1)).view(self.num_processes, *x.shape).sum(0)


def try_parts(config: PretrainedConfig, cut: Cut, parts: Parts) -> None:
    """Try parts on a small copy, once for a cut, and note in `cut` which batches can't come in them.

    Collective over the processes that share sequences. Raises ValueError, on all of them, if stages don't
    compute what they do for whole sequences.
    """
    key = parts.is_sliced, parts.num_processes
    if key not in cut.refused_in_parts:
        start = time.perf_counter()
        cut.refused_in_parts[key] = with_small_copy(config, lambda small: _try(small, cut, parts))
        seconds, how = time.perf_counter() - start, "in slices" if parts.is_sliced else "whole"
        text = "%s, sequences %s, context=%d: tried on a small copy, %.1f s"
        _log.info(text, config.model_type, how, parts.num_processes, seconds)


def _refusal(config: PretrainedConfig, parts: Parts, what: str) -> str:
    why = f"{what} of a small copy is not that of the whole sequence"
    if parts.context is None:
        return refusal(config, why)
    how, instead = "with divided sequences", "parallel.context=1"
    if parts.is_sliced:
        how, instead = "in slices of divided sequences", f"schedule.slices=1 or {instead}"
    return f"{config.model_type} can't be run {how}, since {why}: write {instead}"


def _try(config: PretrainedConfig, cut: Cut, parts: Parts) -> dict[Kind, str]:
    """Raises CutError if parts don't give what whole sequences do. Returns the batches that fail, and why."""
    stages = _stages(config, cut)
    shape, vocabulary = (BATCH, BOUNDS[-1] * parts.num_processes), text_config(config).vocab_size
    tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    dtype = _prepare(stages, tokens)
    refused = {(0, True): _PACKED} if parts.is_sliced else {}
    given = [each for each in batches(tokens, dtype) if kind_of(each) not in {**cut.refused, **refused}]
    whole = Parts(is_sliced=False)
    expected = _trained(stages, whole, tokens)
    expected_logits = [_logits(stages, whole, tokens, each) for each in given]
    for stage in stages:
        _take(stage, parts)
    found = _trained(stages, parts, tokens)
    least = 1e-3 * largest(expected.values())
    for name, one in expected.items():
        if not is_close(found[name], one, _TOLERANCE[one.dtype], least=least):
            raise CutError(_refusal(config, parts, name))
    for each, logits in zip(given, expected_logits, strict=True):
        try:
            if not is_close(_logits(stages, parts, tokens, each), logits, _TOLERANCE[logits.dtype]):
                refused[kind_of(each)] = "the logits of parts are not those of the whole sequence"
        except Exception as error:  # whatever the library's code may raise
            refused[kind_of(each)] = reason(error)
    return refused


def _stages(config: PretrainedConfig, cut: Cut) -> list[Stage]:
    """The stages of a small copy, whose window the trial's short sequences notice."""
    text: Any = text_config(config)
    if getattr(text, "sliding_window", None) is not None:
        text.sliding_window = WINDOW
    stages = [build_stage(deepcopy(config), cut, index, seed=0) for index in range(len(cut.layers))]
    for stage in stages:
        perturb(stage, 0, {})
    return stages


def _prepare(stages: Sequence[Stage], tokens: Tensor) -> torch.dtype:
    """Choose the stages' dtype and mode; returns the dtype.

    float64, for a model that runs in it. Training mode, for a model that draws no random numbers in it:
    dropout depends on the parts.
    """
    whole, dtype = Parts(is_sliced=False), torch.float64
    with torch.no_grad(), torch.random.fork_rng([]):
        try:
            before = torch.get_rng_state()
            _run([stage.train().to(dtype) for stage in stages], whole, tokens)
        except Exception:  # whatever the library's code may raise
            dtype = torch.float32
            _run([stage.to(dtype) for stage in stages], whole, tokens)
        is_random = not torch.equal(before, torch.get_rng_state())
    for stage in stages:
        stage.train(not is_random)
    return dtype


def _take(stage: Stage, parts: Parts) -> None:
    """Let a stage get its sequences in these parts."""
    if parts.is_sliced:
        stage.check_slices()
    if (context := parts.context) is not None:
        stage.hold_contexts(context.connect)


def _run(stages: Sequence[Stage], parts: Parts, tokens: Tensor, *given: Tensor | None) -> list[Tensor]:
    """The logits of this process's part of each slice of a batch. given: its mask and positions."""
    bounds = parts.bounds(tokens.shape[1])
    pasts = [Past(bounds) if parts.is_sliced else None for _ in stages]
    found = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        message: Any = [
            parts.own(each[:, start:end]) if each is not None and each.dim() == 2 else each
            for each in (tokens, *given)
        ]
        for stage, past in zip(stages, pasts, strict=True):
            output = stage(*message, sequence_slice=None if past is None else past.at(index))
            message = output if isinstance(output, tuple) else (output,)
        found.append(message[0])
    return found


def _trained(stages: Sequence[Stage], parts: Parts, tokens: Tensor) -> dict[str, Tensor]:
    """{what it is: the logits, and the gradient of each parameter}; B's descend in slices."""
    for stage in stages:
        stage.zero_grad()
    logits = _run(stages, parts, tokens)
    shape, dtype = (*tokens.shape, logits[0].shape[-1]), logits[0].dtype
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=dtype) + 0.5
    spans = pairwise(parts.bounds(tokens.shape[1]))
    for part, (start, end) in reversed([*zip(logits, spans, strict=True)]):
        part.backward(parts.own(weights[:, start:end]))
    found = {"the output": _joined(parts, logits)}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[f"the gradient of {name} on stage {number}"] = parts.sum(grad)
    return found


@torch.no_grad()
def _logits(stages: Sequence[Stage], parts: Parts, tokens: Tensor, given: Given) -> Tensor:
    """The logits of a batch with mask or positions.

    0 for padding: a token that sees nothing has the mean of all keys, or of a slice's.
    """
    logits, (mask, _) = _joined(parts, _run(stages, parts, tokens, *given)), given
    return logits if mask is None or mask.dim() != 2 else logits.masked_fill(mask[..., None] == 0, 0.0)


def _joined(parts: Parts, logits: Sequence[Tensor]) -> Tensor:
    return torch.cat([parts.whole(each.detach()) for each in logits], dim=1)
