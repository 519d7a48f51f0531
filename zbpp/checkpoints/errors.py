"""What can go wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that can't be written or loaded; the message says why, and what to do instead."""
