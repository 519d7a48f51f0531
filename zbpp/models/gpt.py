"""A GPT: learned positions, LayerNorm before each branch, GELU, causal attention, a head that may be tied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.past import SequenceSlice
from zbpp.models.attention import causal_attention
from zbpp.models.layers import (
    Block,
    DocumentStage,
    Head,
    LanguageModel,
    check_divides,
    check_length,
    check_positive,
    head_in_layers,
    last_stage,
    merge_heads,
    split_heads,
    transformer_std,
)
from zbpp.models.tensor_parallel import BlockPlan, parallelize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Gpt(LanguageModel):
    """A GPT by stages: int64 tokens [batch, time] -> [batch, time, hidden] -> logits [batch, time, vocab].

    `dropout` is a probability: after the embedding, in attention, and after each residual branch. Which
    numbers are dropped depends on the cut, not on the schedule. `sequence_parallel`: see `parallelize`.
    `tie_embeddings`: the head has the embedding's weight. `head`: see HEADS in layers.py.
    `layers_per_stage`: how many layers each stage gets; by default the heaviest stage, with the head counted,
    is as light as possible. Initial weights depend on `seed` and on their names only. Raises ValueError for
    sizes that don't fit each other, and when a stage gets a sequence longer than `sequence_length`.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        sequence_length: int,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        tie_embeddings: bool = False,
        head: str = "auto",
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        check_positive(vocab_size=vocab_size, num_layers=num_layers, sequence_length=sequence_length)
        check_positive(hidden_size=hidden_size, num_heads=num_heads)
        check_divides("hidden_size", hidden_size, "num_heads", num_heads)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} is not a probability below 1: write 0.0 to 0.9")
        self._sharded, self._dropout = {"num_heads": num_heads}, dropout
        self._plan = BlockPlan(
            columns=("attention.query_key_value", "mlp.up"),
            rows=("attention.output", "mlp.down"),
            embedding="embedding.token",
            sequence_parallel=sequence_parallel,
            is_tied=tie_embeddings,
        )
        super().__init__(
            first={"embedding": lambda: Embedding(vocab_size, hidden_size, sequence_length, dropout)},
            layer=lambda number: gpt_block(hidden_size, num_heads, dropout),
            last={
                "norm": lambda: nn.LayerNorm(hidden_size),
                "head": lambda: Head(hidden_size, vocab_size, keeps_logits=head != "recompute"),
            },
            last_cost=head_in_layers(
                layer_parameters=12 * hidden_size**2,  # q, k, v, output; up and down, four times as wide
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                sequence_length=sequence_length,
            ),
            ties={"head.weight": "embedding.token.weight"} if tie_embeddings else {},
            num_layers=num_layers,
            layers_per_stage=layers_per_stage,
            std=transformer_std(num_layers),
            seed=seed,
            stage=DocumentStage,
            last_stage=last_stage(head),
        )

    def keeps_documents_apart(self, num_stages: int) -> bool:
        """See zbpp/stage_api.py. Tensor-parallel ranks that cut sequences can't."""
        return not self._plan.sequence_parallel

    def parallelize(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a stage over the ranks of a mesh with one dimension; see `tensor_parallel.parallelize`.

        Raises ValueError if the mesh's size does not divide num_heads, and for a model with dropout.
        """
        if self._dropout > 0 and mesh.size() > 1:
            raise ValueError(
                f"dropout={self._dropout} doesn't go with tensor-parallel stages, whose ranks would drop "
                "different numbers than one process: write model.dropout=0 or parallel.tensor=1"
            )
        parallelize(stage, mesh, self._plan, self._sharded)


class Embedding(nn.Module):
    """Tokens [batch, time] -> token plus position embeddings [batch, time, hidden].

    position_ids [batch, time]: by default each row's tokens from 0 on, or from where the slice starts.
    """

    takes_positions = True

    def __init__(self, vocab_size: int, hidden_size: int, sequence_length: int, dropout: float) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.token = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(sequence_length, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.context = Context()

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor:
        start, time = 0 if sequence_slice is None else sequence_slice.start, tokens.shape[1]
        if position_ids is None:  # a row of several documents may be longer than each of them
            check_length(start + time * self.context.num_processes, self.sequence_length)
            position_ids = start + self.context.positions(time, tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(position_ids))
        return embedded


class Attention(nn.Module):
    """Causal self-attention, [batch, time, hidden] in and out; one projection for q, k and v.

    Its rows are ordered by head: q, k and v of head 0, then those of head 1. So a rank's shard of them holds
    whole heads.
    mask: which keys a query sees; None: all that are not after it. position_ids: ignored, since the embedding
    has added the positions. sequence_slice: see DocumentStage.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.context = Context(num_heads=num_heads)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor:
        heads = split_heads(self.query_key_value(x), 3 * self.head_size)
        query, key, value = self.context.to_heads(heads)[0].chunk(3, dim=-1)
        if sequence_slice is not None:
            key = sequence_slice.whole((self, "key"), key)
            value = sequence_slice.whole((self, "value"), value)
        mixed = causal_attention(query, key, value, mask, self.dropout.p if self.training else 0.0)
        projected: Tensor = self.dropout(self.output(merge_heads(self.context.to_tokens(mixed))))
        return projected


class FeedForward(nn.Module):
    """Linear to 4 hidden, GELU, Linear back."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.dropout(self.down(F.gelu(self.up(x))))
        return projected


def gpt_block(hidden_size: int, num_heads: int, dropout: float) -> Block:
    """One layer of a GPT."""
    return Block(
        attention_norm=nn.LayerNorm(hidden_size),
        attention=Attention(hidden_size, num_heads, dropout),
        mlp_norm=nn.LayerNorm(hidden_size),
        mlp=FeedForward(hidden_size, dropout),
    )
