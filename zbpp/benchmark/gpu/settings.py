"""What each part is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """device: "cuda" or "cpu". is_small: sizes that a CPU does in seconds. seconds: the part's time."""

    device: str = "cuda"
    is_small: bool = False
    seconds: float = 60.0
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """The seconds that the part has left."""
        return self.seconds - (time.monotonic() - self.begun)

    @property
    def torch_device(self) -> torch.device:
        """The device with its number, as tensors report it."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where sizes are small."""
        return torch.float32 if self.is_small else torch.bfloat16

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()
