"""What a transformer's head costs beside its layers, from its sizes alone. Needs no torch.

Costs are the multiply-adds of the matrix products in one token's forward pass: for each matrix the number of
its entries; for causal attention twice `hidden_size` for each key, where a token sees half of the sequence on
average. B and W together take twice as much everywhere, so the ratio holds for a whole step. Norms,
activations, softmax and the embedding count as nothing: they only move memory.
"""

from __future__ import annotations


def head_in_layers(
    *, layer_parameters: float, hidden_size: int, vocab_size: int, sequence_length: int
) -> float:
    """The vocabulary head's cost in units of a layer; layer_parameters: entries of a layer's matrices."""
    return hidden_size * vocab_size / (layer_parameters + hidden_size * sequence_length)
