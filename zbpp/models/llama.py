"""A Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.models.documents import DocumentStage
from zbpp.models.flops import head_in_layers
from zbpp.models.layers import (
    Block,
    Blueprint,
    check_divides,
    check_length,
    check_positive,
    merge_heads,
    split_heads,
    token_accuracy,
    token_loss,
    transformer_std,
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
}


class Llama:
    """A Llama by stages: int64 tokens [batch, time] -> [batch, time, hidden] -> logits [batch, time, vocab].

    `num_kv_heads`: key and value heads, each shared by num_heads / num_kv_heads queries; by default
    num_heads. `intermediate_size`: by default 8/3 hidden_size, rounded up to a multiple of 64.
    `sequence_parallel`: see `parallelize`.
    `tie_embeddings`: the head has the embedding's weight.
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
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        inner = default_intermediate(hidden_size) if intermediate_size is None else intermediate_size
        check_positive(vocab_size=vocab_size, num_layers=num_layers, sequence_length=sequence_length)
        check_positive(intermediate_size=inner)
        if not 0 < rope_theta < math.inf:
            raise ValueError(f"rope_theta={rope_theta}: write a number above 0, such as 10000")
        check_heads(hidden_size, num_heads, kv_heads)

        kv_size = hidden_size // num_heads * kv_heads

        def layer(number: int) -> Block:
            rotary = Rotary(hidden_size // num_heads, sequence_length, rope_theta)
            return Block(
                attention_norm=nn.RMSNorm(hidden_size, eps=norm_eps),
                attention=Attention(hidden_size, num_heads, kv_heads, rotary),
                mlp_norm=nn.RMSNorm(hidden_size, eps=norm_eps),
                mlp=SwiGlu(hidden_size, inner),
            )

        self._library: dict[str, Any] = {
            "vocab_size": vocab_size,
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            "max_position_embeddings": sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "rms_norm_eps": norm_eps,
            "tie_word_embeddings": tie_embeddings,
        }
        self._sharded = {"num_heads": num_heads, "num_kv_heads": kv_heads, "intermediate_size": inner}
        self._plan = BlockPlan(
            columns=("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
            rows=("attention.output", "mlp.down"),
            embedding="embedding",
            sequence_parallel=sequence_parallel,
            is_tied=tie_embeddings,
        )
        self._blueprint = Blueprint(
            first={"embedding": lambda: nn.Embedding(vocab_size, hidden_size)},
            layer=layer,
            last={
                "norm": lambda: nn.RMSNorm(hidden_size, eps=norm_eps),
                "head": lambda: nn.Linear(hidden_size, vocab_size, bias=False),
            },
            last_cost=head_in_layers(
                layer_parameters=hidden_size * (2 * hidden_size + 2 * kv_size + 3 * inner),
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                sequence_length=sequence_length,
            ),
            tied={"head.weight": "embedding.weight"} if tie_embeddings else {},
            num_layers=num_layers,
            layers_per_stage=layers_per_stage,
            std=transformer_std(num_layers),
            seed=seed,
            stage=DocumentStage,
        )

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """Stage `index` of `num_stages`. Raises ValueError if the layers can't be split that way."""
        return self._blueprint.build_stage(index, num_stages)

    def parallelize(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a stage over the ranks of a mesh with one dimension; see `tensor_parallel.parallelize`.

        Raises ValueError if the mesh's size does not divide num_heads, num_kv_heads and intermediate_size.
        """
        parallelize(stage, mesh, self._plan, self._sharded)

    def tied(self) -> Mapping[str, str]:
        """The head's weight is the embedding's if `tie_embeddings`; see zbpp/stage_api.py."""
        return self._blueprint.tied

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each of `num_stages` stages gets; see `Blueprint.layer_counts`."""
        return self._blueprint.layer_counts(num_stages)

    def library_config(self) -> Any:
        """The config of transformers' LlamaForCausalLM that computes the same, for export."""
        from transformers import LlamaConfig

        return LlamaConfig(**self._library)

    def library_name(self, name: str) -> str:
        """What LlamaForCausalLM calls the parameter of this name."""
        part, _, rest = name.partition(".")
        if not part.startswith("layer_"):
            return f"{_LIBRARY_NAMES[part]}.{rest}"
        module, _, leaf = rest.rpartition(".")
        return f"model.layers.{part.removeprefix('layer_')}.{_LIBRARY_NAMES[module]}.{leaf}"

    def loss(self, output: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per token; logits [batch, time, vocab], target [batch, time]."""
        return token_loss(output, target)

    def metrics(self, output: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """accuracy: the share of positions whose target has the largest logit."""
        return {"accuracy": token_accuracy(output, target)}


class Rotary(nn.Module):
    """Rotates each pair of numbers (i, i + d/2) of a head by the angle position x theta^(-2i/d).

    [batch, head, time, d] in and out. The pairs are those of Hugging Face's Llama. position_ids [batch,
    time]: by default from 0 on.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, sequence_length: int, theta: float) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        # float64 until the table is made: at position 10,000 a float32 angle is off by 1e-3.
        # On the CPU: stages are built under torch.device("meta"), where tensors have no values.
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size
        positions = torch.arange(sequence_length, dtype=torch.float64, device="cpu")
        angles = positions[:, None] * theta**-exponents
        # Not in the state dict: the tables follow from the model's sizes.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        time = x.shape[-2]
        check_length(time, self.sequence_length)
        if position_ids is None:
            cos, sin = self.cos[:time], self.sin[:time]
        else:
            cos, sin = self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, [batch, time, hidden] in and out.

    position_ids and mask: see documents.py; None: one document a row.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        kv_size = hidden_size // num_heads * num_kv_heads
        self.head_size = hidden_size // num_heads
        self.is_grouped = num_kv_heads != num_heads
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, kv_size, bias=False)
        self.value = nn.Linear(hidden_size, kv_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        query = self.rotary(split_heads(self.query(x), self.head_size), position_ids)
        key = self.rotary(split_heads(self.key(x), self.head_size), position_ids)
        value = split_heads(self.value(x), self.head_size)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        projected: Tensor = self.output(merge_heads(mixed))
        return projected


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


def default_intermediate(hidden_size: int) -> int:
    """8/3 hidden_size, rounded up to a multiple of 64: its three matrices are as large as a GPT's two."""
    return -(-8 * hidden_size // (3 * 64)) * 64


def check_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless all heads have the same even size and are shared evenly by the kv heads."""
    check_positive(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_divides("hidden_size", hidden_size, "num_heads", num_heads)
    check_divides("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    head_size = hidden_size // num_heads
    if head_size % 2:
        raise ValueError(
            f"hidden_size={hidden_size} with num_heads={num_heads} gives heads of {head_size} numbers, and "
            f"rotary positions need an even size: write hidden_size={(head_size + 1) * num_heads}"
        )
