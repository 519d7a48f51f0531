"""What a layer does to one microbatch on one rank: FLOPs, memory traffic, held bytes.

F, B and W of a linear layer are one matrix product each, of equal size. Attention has no weights, so it has
no W. Fused attention ("flash") skips the half of the scores that the causal mask hides, and computes the
scores again in B; "plain" attention computes all of them, writes them to memory and keeps them.

Between the matrix products, kernels such as norms and activation functions only move memory. Their traffic is
counted kernel by kernel: a kernel reads again what the one before it has written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zbpp.cluster.model_sizes import ModelSizes

_LOSS_IN_F, _LOSS_IN_B = 18, 12  # bytes of traffic for each logit: it is widened to float32
_PLAIN_IN_F, _PLAIN_IN_B = 6, 8  # passes over the scores: product, mask and softmax, dropout, product
_PLAIN_SAVED = 5  # bytes for each score: softmax, dropout's mask and its output


class Work(NamedTuple):
    """The work of one action. products: FLOPs of matrix products. traffic: bytes that other kernels move.

    weights: bytes of weights or gradients that the products read and write.
    """

    products: float = 0.0
    traffic: float = 0.0
    weights: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(own + times * more for own, more in zip(self, other, strict=True)))


class Part(NamedTuple):
    """A layer, the embedding or the head, for one microbatch on one rank of `tensor` ranks.

    saved, deferred: bytes held from F until B, and from B until W. temporary: the most bytes that an action
    needs besides. parameters: their number on this rank. largest: the entries of its largest matrix. sums:
    how many all-reduces of [tokens, hidden] F and B take. buffers: bytes held all the time. gathered: the
    bytes of its output that F gathers from all tensor-parallel ranks.
    """

    f: Work
    b: Work
    w: Work
    saved: float
    deferred: float
    temporary: float
    parameters: float
    largest: float
    sums: tuple[int, int] = (0, 0)
    buffers: float = 0.0
    gathered: float = 0.0


@dataclass(frozen=True)
class Kernels:
    """How a run computes. bytes_: of a number in F and B; gradient: bytes of a number in a gradient.

    is_fused: fused attention. is_sequence_parallel: each tensor-parallel rank computes norms for a part of
    the tokens. is_lean: B computes the norms' outputs and the MLP's activation function again.
    """

    bytes_: int = 2
    gradient: int = 4
    is_fused: bool = True
    is_sequence_parallel: bool = False
    is_lean: bool = False

    def norm_parts(self, tensor: int) -> int:
        """Among how many ranks the tokens are divided outside a layer's matrix products."""
        return tensor if self.is_sequence_parallel else 1


def attention_flops(sizes: ModelSizes, tokens: float, *, is_causal: bool) -> float:
    """The FLOPs of attention's two products in F; causal: without the half that the mask hides."""
    whole = 4.0 * sizes.query * sizes.sequence * tokens
    return whole / 2 if is_causal else whole


def model_flops(sizes: ModelSizes, tokens: float) -> float:
    """The FLOPs of F, B and W of the model, as MFU counts them: no recomputation, half of the scores."""
    products = 2.0 * (sizes.num_layers * sizes.layer_matrices + sizes.hidden * sizes.vocab) * tokens
    return 3.0 * (products + sizes.num_layers * attention_flops(sizes, tokens, is_causal=True))


def layer(sizes: ModelSizes, tokens: float, tensor: int, kernels: Kernels) -> Part:
    """One layer."""
    matrices = sizes.layer_matrices / tensor
    product = 2.0 * matrices * tokens
    attention = attention_flops(sizes, tokens, is_causal=kernels.is_fused) / tensor
    again = 0.5 if kernels.is_fused else 0.0
    forward, backward, weight = _traffic(sizes, tensor, kernels)
    read = matrices * kernels.bytes_
    scores = sizes.heads * (4 if kernels.is_fused else _PLAIN_SAVED * sizes.sequence) / tensor
    wide = sizes.intermediate / tensor
    return Part(
        f=Work(product + attention, forward * tokens, read),
        b=Work(product + (2 + again) * attention, backward * tokens, read),
        w=Work(product, weight * tokens, 2 * matrices * kernels.gradient),
        saved=(_saved(sizes, tensor, kernels) * kernels.bytes_ + scores) * tokens,
        deferred=_deferred(sizes, tensor) * kernels.bytes_ * tokens,
        temporary=2 * wide * kernels.bytes_ * tokens,
        parameters=matrices + sizes.layer_vectors,
        largest=max(sizes.hidden * sizes.intermediate, sizes.hidden * sizes.query) / tensor,
        sums=(2, 2),
        buffers=4.0 * sizes.sequence * sizes.head_size if sizes.is_gated else 0.0,
    )


def _saved(sizes: ModelSizes, tensor: int, kernels: Kernels) -> float:
    """The numbers that F of a layer keeps for each token.

    The inputs of both norms are whole on every rank, or divided by sequence parallelism. Their outputs, which
    the next products take, are whole. Tensor parallelism divides queries, keys, values, attention's output,
    and the MLP's numbers (gate, its activation, up, their product; without a gate up and its activation).
    Lean kernels keep inputs only: those of the norms, and gate and up, or up.
    """
    normed = 0 if kernels.is_lean else 2 * sizes.hidden
    mlp = (4 if sizes.is_gated else 2) // (2 if kernels.is_lean else 1) * sizes.intermediate
    in_parts = 2 * sizes.query + 2 * sizes.kv + mlp
    return 2 * sizes.hidden / kernels.norm_parts(tensor) + normed + in_parts / tensor


def _deferred(sizes: ModelSizes, tensor: int) -> float:
    """The numbers that B of a layer keeps for W: the input and the output's gradient of each linear layer.

    Linear layers with the same input share it.
    """
    mlp = (3 if sizes.is_gated else 2) * sizes.intermediate
    return 4 * sizes.hidden + (2 * sizes.query + 2 * sizes.kv + mlp) / tensor


def _traffic(sizes: ModelSizes, tensor: int, kernels: Kernels) -> tuple[float, float, float]:
    """Bytes of traffic in F, B and W of a layer for each token."""
    hidden, wide = sizes.hidden / kernels.norm_parts(tensor), sizes.intermediate / tensor
    heads = (sizes.query + sizes.kv) / tensor
    rotary = 2 * heads if sizes.is_gated else 0.0
    scores = sizes.heads * sizes.sequence / tensor
    fused_f, fused_b = 2 * heads, 4 * heads
    attention_f = fused_f if kernels.is_fused else _PLAIN_IN_F * scores
    attention_b = fused_b if kernels.is_fused else _PLAIN_IN_B * scores
    forward = 4 * hidden + 6 * hidden + (5 if sizes.is_gated else 2) * wide + rotary + attention_f
    backward = 6 * hidden + 6 * hidden + (8 if sizes.is_gated else 3) * wide + rotary + attention_b
    if kernels.is_lean:  # two norms, and the MLP's activation function in one kernel
        backward += 4 * hidden + (3 if sizes.is_gated else 2) * wide
    biases = (sizes.query + 2 * sizes.kv + sizes.intermediate) / tensor + 2 * hidden
    weight = biases if sizes.has_biases else 0.0
    bytes_ = kernels.bytes_
    return forward * bytes_, backward * bytes_, weight * bytes_


def embedding(sizes: ModelSizes, tokens: float, tensor: int, kernels: Kernels) -> Part:
    """The embedding of tokens, and of positions."""
    moved = 2 * sizes.hidden * kernels.bytes_ * tokens
    entries = sizes.vocab * sizes.hidden / tensor
    return Part(
        f=Work(traffic=moved),
        b=Work(),
        w=Work(traffic=moved),
        saved=8 * tokens,
        deferred=(8 + sizes.hidden * kernels.bytes_) * tokens,
        temporary=0.0,
        parameters=entries + sizes.positions * sizes.hidden,
        largest=entries,
        sums=(1, 0),
    )


def head(sizes: ModelSizes, tokens: float, tensor: int, kernels: Kernels) -> Part:
    """The last norm, the head and the loss, which every rank computes from all logits.

    A tied head has a copy of the embedding's weight.
    """
    entries = sizes.vocab * sizes.hidden / tensor
    logits = sizes.vocab * tokens
    product, read = 2.0 * entries * tokens, entries * kernels.bytes_
    normed = sizes.hidden * kernels.bytes_ * tokens
    return Part(
        f=Work(product, 2 * normed + _LOSS_IN_F * logits, read),
        b=Work(product, 3 * normed + _LOSS_IN_B * logits, read),
        w=Work(product, 0.0, 2 * entries * kernels.gradient),
        saved=2 * normed + 4 * logits,
        deferred=normed + kernels.bytes_ * logits / tensor,
        temporary=(kernels.bytes_ + 4) * logits,
        parameters=entries + sizes.hidden * (2 if sizes.has_biases else 1),
        largest=entries,
        sums=(0, 1),
        gathered=kernels.bytes_ * logits,
    )
