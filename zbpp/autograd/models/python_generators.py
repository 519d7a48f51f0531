"""Python's and numpy's random generators, restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy


@contextmanager
def restored_python_generators() -> Iterator[None]:
    """Random numbers that are drawn inside don't change those that Python and numpy draw afterwards."""
    states = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
