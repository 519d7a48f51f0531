"""Calls callbacks, and says whose mistake an error is: which callback's, on which rank, at which key.

A callback may add values that JSON can hold to the metrics of a step. A tensor with one element becomes a
number. A callback must not change an entry of zbpp or of another callback: readers of the metrics would take
a changed loss for the run's own.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zbpp.error_text import kind_of
from zbpp.job.errors import CommunicationError
from zbpp.training.callbacks import Callback
from zbpp.training.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


class CallbackError(ValueError):
    """A mistake in a user's callback."""


def call_each(trainer: Trainer, method: str, *args: Any) -> None:
    """Call this method of each callback of the trainer."""
    for callback in trainer.callbacks:
        with _named(callback, method, trainer):
            getattr(callback, method)(trainer, *args)


def after_step(trainer: Trainer, step: int, known: list[Metrics]) -> None:
    """Call `after_step` of each callback, and check what it has added. Raises CallbackError."""
    for callback in trainer.callbacks:
        before = [(metrics, dict(metrics)) for metrics in known]
        with _named(callback, "after_step", trainer):
            callback.after_step(trainer, step, known)
        for metrics, old in before:
            _check(type(callback).__name__, metrics, old)


def _check(name: str, metrics: Metrics, old: Metrics) -> None:
    """Refuse a changed entry and one that can't be written; make numbers of tensors with one element."""
    for key, value in old.items():
        if key not in metrics or metrics[key] is not value:
            raise CallbackError(
                f"callback {name} {'changes' if key in metrics else 'removes'} {key!r} in the metrics of "
                f"step {old.get('step')}, which was there before: leave it, and add a key of the callback's "
                f"own, such as metrics['{name.lower()}_{key}']"
            )
    for key in [key for key in metrics if key not in old]:
        metrics[key] = _as_number(metrics[key])
        _check_value(name, key, metrics[key])


def _as_number(value: Any) -> Any:
    """The number in a tensor, or in an array of numpy's, with one element; other values as they are."""
    shape = getattr(value, "shape", None)
    is_single = isinstance(shape, tuple) and all(size == 1 for size in shape)
    return value.item() if is_single and hasattr(value, "item") else value


def _check_value(name: str, key: Any, value: Any) -> None:
    if isinstance(value, float):
        return  # NaN and infinity are written as texts
    try:
        json.dumps({key: value}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        shape = getattr(value, "shape", None)
        kind = kind_of(value) + (f" of shape {list(shape)}" if shape is not None else "")
        raise CallbackError(
            f"callback {name} sets {key!r} in the metrics to {kind}, which metrics.jsonl can't hold "
            f"({error}): write a number, a text, or a tensor with one element"
        ) from None


@contextmanager
def _named(callback: Callback, method: str, trainer: Trainer) -> Iterator[None]:
    """Turn the failure of a collective in a user's callback into an error that names the callback."""
    try:
        yield
    except RuntimeError as error:
        if type(callback).__module__.startswith("zbpp.") or not _is_of_torchs_communication(error):
            raise
        rank, size = dist.get_rank(), dist.get_world_size()
        step = trainer.next_step + (method == "before_step")
        where = f"{type(callback).__name__}.{method}{_line(error)} of step {step}"
        raise _told(CommunicationError.at(f"rank {rank}, in a collective in {where}", error), size) from error


def _told(error: CommunicationError, size: int) -> Exception:
    """The error itself if a connection broke (a rank died); after a timeout, the user's likely mistake."""
    if not error.is_late:
        return error
    return CallbackError(
        f"{error}. Callbacks are called on all ranks (0 to {size - 1}): all of them have to make the same "
        "collective calls, also where only one rank uses the result"
    )


def _is_of_torchs_communication(error: RuntimeError) -> bool:
    is_of_group = isinstance(error, dist.DistError) or "gloo" in str(error)
    return is_of_group and dist.is_initialized() and not isinstance(error, CommunicationError)


def _line(error: BaseException) -> str:
    """` (my_file.py:80)`: the line of the callback's method in which the error arose."""
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if Path(each.filename) != Path(__file__)]
    return f" ({Path(own[0].filename).name}:{own[0].lineno})" if own else ""
