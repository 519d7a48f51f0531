"""Links through host memory on the CPU: the class that CUDA stages on gloo use, with plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zbpp.runtime.processes import groups


def through_host_memory(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """For `run_ranks`: call function(rank, *args) while every new link goes through host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "needs_host_link", lambda group, device: True)
        return function(rank, *args)
