"""What a transformer's head costs beside its layers, from its sizes alone: no torch, a laptop can ask.

Counted are multiply-adds of one token's forward pass in matrix products: for each matrix the number of
its entries; for causal attention `hidden_size` per key, twice, half of the sequence being seen on
average. B and W together take twice that everywhere, so the ratio holds for a whole step. Norms,
activations, softmax and the embedding only move memory: they count as nothing.
"""

from __future__ import annotations


def head_in_layers(
    *, layer_parameters: float, hidden_size: int, vocab_size: int, sequence_length: int
) -> float:
    """The vocabulary head's cost in units of a layer; layer_parameters: entries of a layer's matrices."""
    return hidden_size * vocab_size / (layer_parameters + hidden_size * sequence_length)
