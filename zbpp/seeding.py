"""A seed from numbers and names: randomness in zbpp depends on where a number is drawn, not on when.

Weights are seeded by (seed, parameter name), data by (seed, epoch): they don't depend on the cut, the rank or
the order of work. Dropout is seeded by (seed, step, stage, microbatch): it doesn't depend on the rank or the
order of work. It depends on the cut, since the runtime knows stages, not the layers in them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def restored_python_generators() -> Iterator[None]:
    """Random numbers that are drawn inside don't change those that Python and numpy draw afterwards."""
    states = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def seed_python_generators(seed: int) -> None:
    """Seed the random numbers that Python's and numpy's modules draw."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
