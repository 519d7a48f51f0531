"""A Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases; with experts a Mixtral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbpp.models.layers import (
    Blueprint,
    DocumentStage,
    Head,
    last_stage,
    token_accuracy,
    token_loss,
    transformer_std,
)
from zbpp.models.llama_layer import LlamaSizes, default_intermediate
from zbpp.models.tensor_parallel import BlockPlan, parallelize
from zbpp.stage_api import by_last_stage, widens_itself

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# transformers' names of the modules: outside the layers, and inside one.
_LIBRARY_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts": "mlp.experts",
}
_EXPERTS = {"gate_up": "gate_up_proj", "down": "down_proj"}  # parameters of mlp.experts


class Llama:
    """A Llama by stages: int64 tokens [batch, time] -> [batch, time, hidden] -> logits [batch, time, vocab].

    `num_kv_heads`: key and value heads, each shared by num_heads / num_kv_heads queries; by default
    num_heads. `intermediate_size`: by default 8/3 hidden_size, rounded up to a multiple of 64.
    `sequence_parallel`: see `parallelize`.
    `tie_embeddings`: the head has the embedding's weight.
    `experts`: SwiGLUs of each layer (None: one, without a router), of which each token takes the
    `experts_per_token` that its router prefers; `balance_loss`: the weight of the loss that balances them.
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
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        sequence_length: int,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        sequence_parallel: bool = False,
        tie_embeddings: bool = False,
        experts: int | None = None,
        experts_per_token: int = 2,
        balance_loss: float = 0.01,
        head: str = "auto",
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        sizes = LlamaSizes(
            vocab_size=vocab_size,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            intermediate_size=(
                default_intermediate(hidden_size) if intermediate_size is None else intermediate_size
            ),
            sequence_length=sequence_length,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
            tie_embeddings=tie_embeddings,
            experts=experts,
            experts_per_token=experts_per_token,
            balance_loss=balance_loss,
        )
        self._sizes = sizes
        self._plan = BlockPlan(
            columns=("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
            rows=("attention.output", "mlp.down"),
            embedding="embedding",
            sequence_parallel=sequence_parallel,
            is_tied=tie_embeddings,
        )
        self._blueprint = Blueprint(
            first={"embedding": lambda: nn.Embedding(vocab_size, hidden_size)},
            layer=lambda number: sizes.block(),
            last={
                "norm": lambda: nn.RMSNorm(hidden_size, eps=norm_eps),
                "head": lambda: Head(hidden_size, vocab_size, keeps_logits=head != "recompute"),
            },
            last_cost=sizes.head_in_layers(),
            tied={"head.weight": "embedding.weight"} if tie_embeddings else {},
            num_layers=num_layers,
            layers_per_stage=layers_per_stage,
            std=transformer_std(num_layers),
            seed=seed,
            stage=DocumentStage,
            last_stage=last_stage(head),
        )

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """Stage `index` of `num_stages`. Raises ValueError if the layers can't be split that way."""
        return self._blueprint.build_stage(index, num_stages)

    def parallelize(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a stage over the ranks of a mesh with one dimension; see `tensor_parallel.parallelize`.

        Raises ValueError if the mesh's size does not divide num_heads, num_kv_heads and intermediate_size,
        and for a model with experts.
        """
        if self._sizes.experts is not None:
            raise ValueError(
                f"experts={self._sizes.experts} doesn't go with tensor-parallel stages: spread the experts "
                "over replicas (parallel.expert), and write parallel.tensor=1"
            )
        parallelize(stage, mesh, self._plan, self._sizes.divided())

    def tied(self) -> Mapping[str, str]:
        """The head's weight is the embedding's if `tie_embeddings`; see zbpp/stage_api.py."""
        return self._blueprint.tied

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each of `num_stages` stages gets; see `Blueprint.layer_counts`."""
        return self._blueprint.layer_counts(num_stages)

    def library_config(self) -> Any:
        """The config of transformers' Llama or Mixtral that computes the same, for export."""
        return self._sizes.library_config()

    def library_name(self, name: str) -> str:
        """What transformers' model calls the parameter of this name."""
        part, _, rest = name.partition(".")
        if not part.startswith("layer_"):
            return f"{_LIBRARY_NAMES[part]}.{rest}"
        module, _, leaf = rest.rpartition(".")
        leaf = _EXPERTS.get(leaf, leaf)
        return f"model.layers.{part.removeprefix('layer_')}.{_LIBRARY_NAMES[module]}.{leaf}"

    @by_last_stage
    @widens_itself
    def loss(self, output: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per token; logits [batch, time, vocab], target [batch, time]."""
        return token_loss(output, target)

    @widens_itself
    def metrics(self, output: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """accuracy: the share of positions whose target has the largest logit."""
        return {"accuracy": token_accuracy(output, target)}
