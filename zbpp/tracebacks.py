"""Tracebacks as a user reads them: his own lines, from his call to his module or his loss, and the error.

    File "tower.py", line 24, in <module>                the user's call
      losses = pipeline.step(x, target=y)
    File "tower.py", line 13, in loss                    zbpp's frames between the two are gone
      return nn.functional.cross_entropy(output, target)

All frames stay if zbpp's code fails without a `raise`: that is a bug of zbpp's. With
ZBPP_TRACEBACK=1 in the environment all frames of all errors stay.
"""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from zbpp.error_text import chain_of

_OWN = str(Path(__file__).parent) + os.sep
_CALLS_OF_MODULES = os.path.join("torch", "nn", "modules", "module.py")  # two frames for each nested module

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def wants_traceback() -> bool:
    """Whether the user wants to see where an error was noticed: ZBPP_TRACEBACK=1 in the environment."""
    return bool(os.environ.get("ZBPP_TRACEBACK"))


def hiding_own_frames(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A decorator of what users call: errors leave it without zbpp's frames, and without those of causes."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return call


def hide_own_frames(error: BaseException) -> None:
    """Take zbpp's frames from the traceback of an error, and from those of its causes; see above."""
    if not wants_traceback():
        for each in chain_of(error):
            each.__traceback__ = _without_own(each.__traceback__)


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    frames = [*_frames(traceback)]
    if not frames or (_is_in(frames[-1], _OWN) and not _raises(frames[-1])):
        return traceback
    kept = None
    for each in reversed(frames):
        if not (_is_in(each, _OWN) or _is_in(each, _CALLS_OF_MODULES)):
            each.tb_next, kept = kept, each
    return kept


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_in(frame: TracebackType, place: str) -> bool:
    """Whether the frame's file is `place`, or in that folder."""
    file = frame.tb_frame.f_code.co_filename
    return file.startswith(place) if place == _OWN else file.endswith(place)


def _raises(frame: TracebackType) -> bool:
    """Whether the frame's line is a `raise`."""
    line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    return line.lstrip().startswith("raise ")
