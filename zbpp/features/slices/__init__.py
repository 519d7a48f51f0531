"""Sequences in slices, and the keys and values that F's of a microbatch share: sequence_slices."""
