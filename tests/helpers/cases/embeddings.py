"""Cases: embeddings."""

import torch
from torch import nn

from helpers.split import Case

VOCABULARY = 11


def tokens(*shape):
    return lambda: torch.randint(VOCABULARY, shape)


def embedding(shape=()) -> Case:
    return Case(lambda: nn.Embedding(VOCABULARY, 4), tokens(*shape))


def embedding_with_padding(padding=0) -> Case:
    return Case(
        lambda: nn.Embedding(VOCABULARY, 4, padding_idx=padding),
        lambda: torch.arange(VOCABULARY).repeat(2, 1),
    )


def embedding_scaled_by_frequency() -> Case:
    return Case(lambda: nn.Embedding(VOCABULARY, 4, scale_grad_by_freq=True), tokens(2, 5))


def embedding_with_sparse_gradient() -> Case:
    return Case(lambda: nn.Embedding(VOCABULARY, 4, sparse=True), tokens(2, 5))


def embedding_with_max_norm() -> Case:
    return Case(lambda: nn.Embedding(VOCABULARY, 4, max_norm=1.0), tokens(2, 5), num_microbatches=1)


def embedding_bag() -> Case:
    return Case(lambda: nn.EmbeddingBag(VOCABULARY, 4), tokens(2, 5))
