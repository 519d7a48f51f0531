"""What a layer does to one microbatch on one rank: FLOPs, memory traffic, held bytes.

F, B and W of a linear layer are one matrix product each, of equal size. Attention has no weights, so it has
no W. It is fused ("flash"): it skips the half of the scores that the causal mask hides, and computes the
scores again in B.

Between the matrix products, kernels such as norms and activation functions only move memory. Their traffic is
counted kernel by kernel: a kernel reads again what the one before it has written.
"""

from __future__ import annotations

from typing import NamedTuple

from zbpp.cluster.model_sizes import ModelSizes

# Bytes of a number with precision=mixed_bfloat16: in F and B; in gradients, masters and optimizer states.
COMPUTE, STORED = 2, 4
# Bytes of traffic for each logit, in float32 for some tokens at a time: F reads logits twice and writes log
# probabilities; B does so again, reads them and writes gradients.
_LOSS_IN_F, _LOSS_IN_B = 8, 14
_LOSS_CHUNK = 2**26


class Work(NamedTuple):
    """The work of one action. products: FLOPs of matrix products. traffic: bytes that other kernels move.

    weights: bytes of weights or gradients that the products read and write.
    """

    products: float = 0.0
    traffic: float = 0.0
    weights: float = 0.0


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

    def without_logits(self) -> Part:
        """The head, computed again in B: no logits stay from F until B."""
        again = Work(*(b + f for b, f in zip(self.b, self.f, strict=True)))
        saved, temporary = self.saved - self.gathered, self.temporary + self.gathered
        return self._replace(b=again, saved=saved, temporary=temporary)

    def w_at_once(self) -> Part:
        """With W at the end of B, so that nothing waits for W."""
        both = Work(*(b + w for b, w in zip(self.b, self.w, strict=True)))
        return self._replace(b=both, w=Work(), deferred=0.0)


def attention_flops(sizes: ModelSizes, tokens: float) -> float:
    """The FLOPs of attention's two products in F, without the half that the mask hides."""
    return 2.0 * sizes.query * sizes.sequence * tokens


def model_flops(sizes: ModelSizes, tokens: float) -> float:
    """The FLOPs of F, B and W of the model, as MFU counts them: no recomputation, half of the scores."""
    products = 2.0 * (sizes.num_layers * sizes.layer_matrices + sizes.hidden * sizes.vocab) * tokens
    return 3.0 * (products + sizes.num_layers * attention_flops(sizes, tokens))


def layer(sizes: ModelSizes, tokens: float, tensor: int) -> Part:
    """One layer."""
    matrices = sizes.layer_matrices / tensor
    product = 2.0 * matrices * tokens
    attention = attention_flops(sizes, tokens) / tensor
    forward, backward, weight = _traffic(sizes, tensor)
    read = matrices * COMPUTE
    wide = sizes.intermediate / tensor
    # What F keeps for each token: the inputs and outputs of both norms, which are whole on every rank;
    # queries, keys, values, attention's output and the MLP's numbers (gate, its activation, up and their
    # product; without a gate up and its activation), which tensor parallelism divides.
    in_parts = 2 * sizes.query + 2 * sizes.kv + (4 if sizes.is_gated else 2) * sizes.intermediate
    saved = (4 * sizes.hidden + in_parts / tensor) * COMPUTE + 4 * sizes.heads / tensor
    # What B keeps for W: the input and the output's gradient of each linear layer. Equal inputs are shared.
    deferred_in_parts = 2 * sizes.query + 2 * sizes.kv + (3 if sizes.is_gated else 2) * sizes.intermediate
    return Part(
        f=Work(product + attention, forward * tokens, read),
        b=Work(product + 2.5 * attention, backward * tokens, read),
        w=Work(product, weight * tokens, 2 * matrices * STORED),
        saved=saved * tokens,
        deferred=(4 * sizes.hidden + deferred_in_parts / tensor) * COMPUTE * tokens,
        temporary=2 * wide * COMPUTE * tokens,
        parameters=matrices + sizes.layer_vectors,
        largest=max(sizes.hidden * sizes.intermediate, sizes.hidden * sizes.query) / tensor,
        sums=(2, 2),
        buffers=4.0 * sizes.sequence * sizes.head_size if sizes.is_gated else 0.0,
    )


def _traffic(sizes: ModelSizes, tensor: int) -> tuple[float, float, float]:
    """Bytes of traffic in F, B and W of a layer for each token."""
    hidden, wide = sizes.hidden, sizes.intermediate / tensor
    heads = (sizes.query + sizes.kv) / tensor
    rotary = 2 * heads if sizes.is_gated else 0.0
    forward = 10 * hidden + (5 if sizes.is_gated else 2) * wide + rotary + 2 * heads
    backward = 12 * hidden + (8 if sizes.is_gated else 3) * wide + rotary + 4 * heads
    biases = (sizes.query + 2 * sizes.kv + sizes.intermediate) / tensor + 2 * hidden
    weight = biases if sizes.has_biases else 0.0
    return forward * COMPUTE, backward * COMPUTE, weight * COMPUTE


def embedding(sizes: ModelSizes, tokens: float, tensor: int) -> Part:
    """The embedding of tokens, and of positions."""
    moved = 2 * sizes.hidden * COMPUTE * tokens
    entries = sizes.vocab * sizes.hidden / tensor
    return Part(
        f=Work(traffic=moved),
        b=Work(),
        w=Work(traffic=moved),
        saved=8 * tokens,
        deferred=(8 + sizes.hidden * COMPUTE) * tokens,
        temporary=0.0,
        parameters=entries + sizes.positions * sizes.hidden,
        largest=entries,
        sums=(1, 0),
    )


def head(sizes: ModelSizes, tokens: float, tensor: int) -> Part:
    """The last norm, the head and the loss, which every rank computes from all logits.

    B overwrites logits with their gradient, but not logits that were gathered from tensor-parallel ranks. A
    tied head has a copy of the embedding's weight.
    """
    entries = sizes.vocab * sizes.hidden / tensor
    logits = sizes.vocab * tokens
    product, read = 2.0 * entries * tokens, entries * COMPUTE
    normed = sizes.hidden * COMPUTE * tokens
    return Part(
        f=Work(product, 2 * normed + _LOSS_IN_F * logits, read),
        b=Work(product, 3 * normed + _LOSS_IN_B * logits, read),
        w=Work(product, 0.0, 2 * entries * STORED),
        saved=2 * normed + COMPUTE * logits,
        deferred=normed + COMPUTE * logits / tensor,
        temporary=min(_LOSS_CHUNK, 4 * logits) + (COMPUTE * logits if tensor > 1 else 0.0),
        parameters=entries + sizes.hidden * (2 if sizes.has_biases else 1),
        largest=entries,
        sums=(0, 1),
        gathered=COMPUTE * logits,
    )
