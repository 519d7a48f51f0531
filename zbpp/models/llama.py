"""A Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases; with experts a Mixtral."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zbpp.models.experts import MixtureOfExperts
from zbpp.models.layers import (
    Block,
    DocumentStage,
    Head,
    LanguageModel,
    check_positive,
    head_in_layers,
    last_stage,
    transformer_std,
)
from zbpp.models.llama_layer import (
    Attention,
    Rotary,
    SwiGlu,
    check_experts,
    check_heads,
    default_intermediate,
)
from zbpp.models.tensor_parallel import BlockPlan, parallelize

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


class Llama(LanguageModel):
    """A Llama by stages: int64 tokens [batch, time] -> [batch, time, hidden] -> logits [batch, time, vocab].

    `num_kv_heads`: key and value heads, each shared by num_heads / num_kv_heads queries; by default
    num_heads. `intermediate_size`: by default 8/3 hidden_size, rounded up to a multiple of 64.
    `sequence_parallel`: see `parallelize`.
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
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if intermediate_size is None:
            intermediate_size = default_intermediate(hidden_size)
        check_positive(vocab_size=vocab_size, num_layers=num_layers, sequence_length=sequence_length)
        check_positive(intermediate_size=intermediate_size)
        if not 0 < rope_theta < math.inf:
            raise ValueError(f"rope_theta={rope_theta}: write a number above 0, such as 10000")
        check_heads(hidden_size, num_heads, num_kv_heads)
        if experts is not None:
            check_experts(experts, experts_per_token, balance_loss)
        self._experts = experts
        self._sharded = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "intermediate_size": intermediate_size,
        }
        self._library: dict[str, Any] = {
            "vocab_size": vocab_size,
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": intermediate_size,
            "max_position_embeddings": sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "rms_norm_eps": norm_eps,
            "tie_word_embeddings": tie_embeddings,
        }
        if experts is not None:
            self._library |= {
                "num_local_experts": experts,
                "num_experts_per_tok": experts_per_token,
                "router_aux_loss_coef": balance_loss,
            }
        self._plan = BlockPlan(
            columns=("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
            rows=("attention.output", "mlp.down"),
            embedding="embedding",
            sequence_parallel=sequence_parallel,
            is_tied=tie_embeddings,
        )

        def mlp() -> nn.Module:
            if experts is None:
                return SwiGlu(hidden_size, intermediate_size)
            return MixtureOfExperts(hidden_size, intermediate_size, experts, experts_per_token, balance_loss)

        def block(_: int) -> Block:
            rotary = Rotary(hidden_size // num_heads, sequence_length, rope_theta)
            return Block(
                attention_norm=nn.RMSNorm(hidden_size, eps=norm_eps),
                attention=Attention(hidden_size, num_heads, num_kv_heads, rotary),
                mlp_norm=nn.RMSNorm(hidden_size, eps=norm_eps),
                mlp=mlp(),
            )

        kv_size = hidden_size // num_heads * num_kv_heads
        num_mlps = 1 if experts is None else experts_per_token
        super().__init__(
            first={"embedding": lambda: nn.Embedding(vocab_size, hidden_size)},
            layer=block,
            last={
                "norm": lambda: nn.RMSNorm(hidden_size, eps=norm_eps),
                "head": lambda: Head(hidden_size, vocab_size, keeps_logits=head != "recompute"),
            },
            last_cost=head_in_layers(
                layer_parameters=hidden_size
                * (2 * hidden_size + 2 * kv_size + 3 * num_mlps * intermediate_size),
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                sequence_length=sequence_length,
            ),
            ties={"head.weight": "embedding.weight"} if tie_embeddings else {},
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

        Raises ValueError if the mesh's size does not divide num_heads, num_kv_heads and intermediate_size,
        and for a model with experts.
        """
        if self._experts is not None:
            raise ValueError(
                f"experts={self._experts} doesn't go with tensor-parallel stages: spread the experts over "
                "replicas (parallel.expert), and write parallel.tensor=1"
            )
        parallelize(stage, mesh, self._plan, self._sharded)

    def library_config(self) -> Any:
        """The config of transformers' Llama or Mixtral that computes the same, for export."""
        from transformers import LlamaConfig, MixtralConfig

        return (LlamaConfig if self._experts is None else MixtralConfig)(**self._library)

    def library_name(self, name: str) -> str:
        """What transformers' model calls the parameter of this name."""
        part, _, rest = name.partition(".")
        if not part.startswith("layer_"):
            return f"{_LIBRARY_NAMES[part]}.{rest}"
        module, _, leaf = rest.rpartition(".")
        leaf = _EXPERTS.get(leaf, leaf)
        return f"model.layers.{part.removeprefix('layer_')}.{_LIBRARY_NAMES[module]}.{leaf}"
