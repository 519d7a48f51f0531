"""Where tensors are fake, as in a prediction of memory: stages need no values, but a trial on a copy does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory: not on the meta device, nor in a FakeTensorMode."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def no_fake_mode() -> AbstractContextManager[object]:
    """Within the block tensors are real, whatever mode is active outside."""
    return unset_fake_temporarily()


def made_as_of_real_tensors(tokens: Tensor) -> AbstractContextManager[Any]:
    """Within the block the library makes masks of fake tensors as it does of real ones.

    It would ask them for no values, and make masks that real tensors don't need. Where fake tensors have no
    values, this raises an error.
    """
    from transformers.utils import import_utils

    if not isinstance(tokens, FakeTensor):
        return nullcontext()
    return patch.object(import_utils, "is_fake_tensor", lambda _: False)
