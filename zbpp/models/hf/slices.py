"""A library's model over slices of a sequence: its Cache API gives attention the keys of earlier slices.

The library computes positions and masks from the lengths that a cache reports. `SliceLayer` stands for the
cache of one layer while F of one slice runs: it reports the tokens before the slice, and its `update` returns
keys and values of all tokens that the slice may see, with gradients (zbpp/autograd/models/past.py).

A family may read its cache in another way than the known ones, or not at all. So `tried` runs the stages of a
small copy once whole and once in slices, and compares logits and gradients. Imported where slices are used:
transformers takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from zbpp.autograd.models.past import Past, SequenceSlice
from zbpp.models.hf.calls import BATCH, TIME
from zbpp.models.hf.check import build_stage, perturb
from zbpp.models.hf.config import text_config
from zbpp.models.hf.cut import Cut, CutError, Stage
from zbpp.models.hf.masks import Given, Kind, batches, kind_of, reason
from zbpp.models.hf.shrink import with_small_copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BOUNDS = (0, 4, 5, TIME)  # of the slices to try with: a token alone in a slice may go another way
WINDOW = 3  # tokens, in the trial: slides within a slice, and from one to the next
# Many library models compute norms in float32 in a float64 model, and slices sum in another order.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}

_PACKED = (
    "the library tells documents apart by position_ids only without a cache, and slices need one: give an "
    "attention_mask of four dimensions, [batch, 1, time, time], which keeps the documents apart"
)


class SliceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the library's
    """The cache of one layer for one slice. window: how many tokens a token sees; None: all before it."""

    def __init__(self, place: SequenceSlice, number: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the library's
        self.place, self.number, self.window = place, number, window
        self.is_sliding, self.is_initialized = window is not None, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the slice -> those of all tokens that it may see."""
        layer = f"layer {self.number}"
        return (
            self.place.whole((layer, "key"), key_states, self.window),
            self.place.whole((layer, "value"), value_states, self.window),
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


def cache_of(place: SequenceSlice, windows: Sequence[int | None]) -> Any:
    """The library's cache for F of one slice."""
    return Cache(layers=[SliceLayer(place, number, window) for number, window in enumerate(windows)])


def windows_of(config: PretrainedConfig) -> list[int | None]:
    """Per layer, how many tokens a token sees; None: all before it.

    Raises ValueError for layers whose cache is not of keys and values of all tokens or of a window.
    """
    text = text_config(config)
    is_chunked = getattr(text, "attention_chunk_size", None) is not None
    kinds = set(getattr(text, "layer_types", None) or ["chunked_attention"] * is_chunked)
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(_refusal(config, f"it has layers of type {', '.join(other)}"))
    windows: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(_refusal(config, f"the library's cache has a {type(layer).__name__}"))
        windows.append(getattr(layer, "sliding_window", None))
    return windows


def _refusal(config: PretrainedConfig, why: str) -> str:
    return (
        f"{config.model_type} can't be run in slices of a sequence, since {why}: write schedule.slices=1 "
        "(a Pipeline: a timetable without slices)"
    )


class Slices(NamedTuple):
    """What a stage knows of slices. refused: batches that can't be run in slices, and why."""

    windows: Sequence[int | None]
    refused: dict[Kind, str]


_tried: dict[tuple[Any, ...], Slices] = {}
"""By all that a trial depends on: all stages of a process, and ranks that are forks, share one."""


def tried(model: PreTrainedModel, cut: Cut) -> Slices:
    """Try slices on a small copy of a model. Raises ValueError if the model can't be run in slices."""
    config: Any = model.config
    if "past_key_values" not in signature(model.forward).parameters:
        raise ValueError(_refusal(config, "its forward takes no past_key_values"))
    windows = windows_of(config)
    key = (type(config), config.to_json_string(use_diff=False), config._attn_implementation, cut.layers)
    if key not in _tried:
        refused = with_small_copy(config, lambda small: _try(_with_short_window(small), cut))
        _tried[key] = Slices(windows, refused)
    return _tried[key]


def _with_short_window(config: PretrainedConfig) -> PretrainedConfig:
    """The config, with a window that the trial's short sequences notice."""
    text: Any = text_config(config)
    if getattr(text, "sliding_window", None) is not None:
        text.sliding_window = WINDOW
    return config


# ---- The trial


def _try(config: PretrainedConfig, cut: Cut) -> dict[Kind, str]:
    """Raises CutError unless slices compute what whole sequences do; returns the batches that fail."""
    stages = [build_stage(deepcopy(config), cut, index, seed=0) for index in range(len(cut.layers))]
    for stage in stages:
        perturb(stage, 0, {})
        stage.slices = Slices(windows_of(config), {})
    vocabulary = text_config(config).vocab_size
    tokens = torch.randint(vocabulary, (BATCH, TIME), generator=torch.Generator().manual_seed(0))
    dtype = _prepare(stages, tokens)
    expected, found = (_trained(stages, bounds, tokens) for bounds in (None, BOUNDS))
    largest = max(float(each.abs().max()) for each in expected.values() if each.numel())
    for name, one in expected.items():
        if not _is_close(found[name], one, 1e-3 * largest):
            raise CutError(_refusal(config, f"{name} of a small copy is not that of the whole sequence"))
    return _refused(stages, cut, tokens, dtype)


def _refused(stages: Sequence[Stage], cut: Cut, tokens: Tensor, dtype: torch.dtype) -> dict[Kind, str]:
    """The batches with mask or positions whose slices don't give the logits of the whole, and why."""
    refused = {(0, True): _PACKED}
    with torch.no_grad():
        for given in batches(tokens, dtype):
            kind = kind_of(given)
            if kind in cut.refused or kind in refused:
                continue
            try:
                whole, sliced = (
                    _of_real_tokens(torch.cat(_parts(stages, bounds, tokens, *given), dim=1), given)
                    for bounds in (None, BOUNDS)
                )
                if not _is_close(sliced, whole):
                    refused[kind] = "the logits of slices are not those of the whole sequence"
            except Exception as error:  # whatever the library's code may raise
                refused[kind] = reason(error)
    return refused


def _prepare(stages: Sequence[Stage], tokens: Tensor) -> torch.dtype:
    """Choose the stages' dtype and mode; returns the dtype.

    float64, for a model that runs in it. Training mode, for a model that draws no random numbers in it:
    dropout depends on the slices.
    """
    dtype = torch.float64
    with torch.no_grad(), torch.random.fork_rng([]):
        try:
            before = torch.get_rng_state()
            _parts([stage.train().to(dtype) for stage in stages], None, tokens)
        except Exception:  # whatever the library's code may raise
            dtype = torch.float32
            _parts([stage.to(dtype) for stage in stages], None, tokens)
        is_random = not torch.equal(before, torch.get_rng_state())
    for stage in stages:
        stage.train(not is_random)
    return dtype


def _parts(stages: Sequence[Stage], bounds: Sequence[int] | None, *batch: Tensor | None) -> list[Tensor]:
    """The logits of each slice of a batch: tokens, and mask and positions. bounds None: of the whole."""
    pasts = [None if bounds is None else Past(bounds) for _ in stages]
    found = []
    for index, (start, end) in enumerate(pairwise(bounds or (0, TIME))):
        message: Any = [
            each[:, start:end] if each is not None and each.dim() == 2 else each for each in batch
        ]
        for stage, past in zip(stages, pasts, strict=True):
            output = stage(*message, sequence_slice=None if past is None else past.at(index))
            message = output if isinstance(output, tuple) else (output,)
        found.append(message[0])
    return found


def _trained(stages: Sequence[Stage], bounds: Sequence[int] | None, tokens: Tensor) -> dict[str, Tensor]:
    """{what it is: the logits, and the gradient of each parameter}; B's descend in slices."""
    for stage in stages:
        stage.zero_grad()
    parts = _parts(stages, bounds, tokens)
    shape, dtype = (*tokens.shape, parts[0].shape[-1]), parts[0].dtype
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=dtype) + 0.5
    pairs = zip(parts, weights.split([part.shape[1] for part in parts], dim=1), strict=True)
    for part, weight in reversed([*pairs]):
        part.backward(weight)
    found = {"the output": torch.cat(parts, dim=1).detach()}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[f"the gradient of {name} on stage {number}"] = parameter.grad
    return found


def _of_real_tokens(logits: Tensor, given: Given) -> Tensor:
    """The logits, but 0 for padding: a token that sees nothing has the mean of all keys, or of a slice's."""
    mask, _ = given
    return logits if mask is None or mask.dim() != 2 else logits.masked_fill(mask[..., None] == 0, 0.0)


def _is_close(found: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    """least: the scale of a tensor whose values are smaller."""
    largest = float(expected.nan_to_num().abs().max())  # a row of padding may be NaN, in the whole, too
    scale = _TOLERANCE[expected.dtype] * max(largest, least)
    return torch.allclose(found, expected, rtol=0, atol=scale, equal_nan=True)
