"""A seed from numbers and names: randomness in zbpp depends on where a number is drawn, not on when.

Weights are seeded by (seed, parameter name), data by (seed, epoch): they don't depend on the cut, the rank or
the order of work. Dropout is seeded by (seed, step, stage, microbatch): it doesn't depend on the rank or the
order of work. It depends on the cut, since the runtime knows stages, not the layers in them.
"""

from __future__ import annotations

from hashlib import blake2b


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
