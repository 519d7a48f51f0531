"""The Llama that several parts run, its stages and its tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zbpp.benchmark.gpu.settings import Settings
from zbpp.models.llama import Llama
from zbpp.schedule import Timetable

_VOCABULARY = 256


def llama(num_layers: int, hidden: int, settings: Settings) -> Llama:
    """A Llama with heads of 64 channels."""
    return Llama(
        vocab_size=_VOCABULARY,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=max(1, hidden // 64),
        sequence_length=_length(settings),
    )


def stages_of(model: Llama, timetable: Timetable, settings: Settings) -> dict[int, nn.Module]:
    """All stages of a model, on the device."""
    return {
        index: model.build_stage(index, timetable.num_stages).to(settings.torch_device, settings.dtype)
        for index in range(timetable.num_stages)
    }


def tokens(num_rows: int, settings: Settings) -> Tensor:
    """Rows of `llama`'s tokens on the device, each one longer than a sequence: inputs and targets."""
    shape = num_rows, _length(settings) + 1
    drawn = torch.randint(_VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(settings.torch_device)


def _length(settings: Settings) -> int:
    return 16 if settings.is_small else 512
