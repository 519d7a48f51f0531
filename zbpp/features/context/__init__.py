"""Sequences that are divided over processes.

context          the feature
sequence_parts   what a call takes and gives where sequences are divided
"""
