"""Parts that the models share: a stage made of named layers, initial weights by seed, checks of sizes.

A stage is an `nn.Sequential` of named children in model order: `embedding` on stage 0, then one
child per layer, then `norm` and `head` on the last stage. A layer is named by its number in the whole
model (`layer_7`). The name has no dot, so that each layer is a direct child of its stage, as recompute needs
it. Names, and with them the initial weights, don't depend on the cut.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zbpp.autograd.models.context import Context
from zbpp.autograd.models.linear_cross_entropy import linear_cross_entropy, logits_cross_entropy
from zbpp.autograd.models.past import SequenceSlice
from zbpp.partition import split_layers
from zbpp.seeding import seed_of
from zbpp.stage_api import IGNORED, by_last_stage, has_hooks, mean_over_tokens, num_tokens, widens_itself

# The last matrix of each residual branch. It is initialised smaller, so that the sum doesn't grow with depth.
RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight", "mlp.experts.down")

StdRule = Callable[[str, torch.Size], float]
"""The standard deviation of a weight matrix, from its name and shape."""


@dataclass(kw_only=True, eq=False)
class StagedModel:
    """A model as functions that make its parts, in model order: `first` by name, the layers, `last` by name.

    last_cost: the cost of `last`, as a multiple of a layer's; `first` counts as nothing. ties: {name of a
    parameter: other name of the same one}; a stage with the first name alone has a copy. stage: the class of
    a stage, which gets its parts; last_stage: that of the last one, if it is another.
    """

    layer: Callable[[int], nn.Module]
    num_layers: int
    std: StdRule
    seed: int
    layers_per_stage: Sequence[int] | None = None
    first: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    last: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    last_cost: float = 0.0
    ties: Mapping[str, str] = field(default_factory=dict)
    stage: type[nn.Sequential] = nn.Sequential
    last_stage: type[nn.Sequential] | None = None

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """Stage `index` on the CPU with its initial weights; nothing of the others is allocated.

        Raises ValueError if `index` is out of range or the layers can't be split that way.
        """
        layers = self._split(num_stages)
        if not 0 <= index < num_stages:
            raise ValueError(
                f"stage {index} does not exist: with num_stages={num_stages} write 0 to {num_stages - 1}"
            )
        # On the meta device the modules' own initialisation costs nothing and draws no random numbers.
        with torch.device("meta"):
            parts = OrderedDict(self._parts(index, num_stages, layers[index]))
        is_last = index == num_stages - 1
        stage = ((is_last and self.last_stage) or self.stage)(parts)
        initialise(stage, self.seed, self.std, self.ties)
        return stage

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each stage gets. Raises ValueError if they can't be split that way."""
        return list(map(len, self._split(num_stages)))

    def tied(self) -> Mapping[str, str]:
        """See zbpp/stage_api.py."""
        return self.ties

    def _split(self, num_stages: int) -> list[range]:
        return split_layers(self.num_layers, num_stages, self.layers_per_stage, last_cost=self.last_cost)

    def _parts(self, index: int, num_stages: int, layers: range) -> Iterator[tuple[str, nn.Module]]:
        if index == 0:
            yield from ((name, make()) for name, make in self.first.items())
        yield from ((f"layer_{number}", self.layer(number)) for number in layers)
        if index == num_stages - 1:
            yield from ((name, make()) for name, make in self.last.items())


class TokenwiseStage(nn.Sequential):
    """A stage in which no token depends on another one: see zbpp/stage_api.py."""

    mixes_time = False


class LanguageModel(StagedModel):
    """A StagedModel whose output is logits [batch, time, vocab], for targets [batch, time]."""

    @by_last_stage
    @mean_over_tokens
    @widens_itself
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        return token_loss(output, target)

    @widens_itself
    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """accuracy: the share of positions whose target has the largest logit."""
        return {"accuracy": token_accuracy(output, target)}


def head_in_layers(
    *, layer_parameters: float, hidden_size: int, vocab_size: int, sequence_length: int
) -> float:
    """The vocabulary head's cost in units of a layer; layer_parameters: entries of a layer's matrices.

    A cost is the number of multiply-adds of the matrix products in one token's forward pass. A weight matrix
    costs the number of its entries. Causal attention costs twice `hidden_size` for each key that the token
    sees: on average half of the sequence. B and W together cost twice their F everywhere, so the ratio holds
    for a whole step. Norms, activations, softmax and the embedding count as nothing: they only move memory.
    """
    return hidden_size * vocab_size / (layer_parameters + hidden_size * sequence_length)


def initialise(module: nn.Module, seed: int, std: StdRule, tied: Mapping[str, str] | None = None) -> None:
    """Give the parameters of a module on the meta device initial values that depend on (seed, name) only.

    tied: {name: name of another parameter of the whole model}. The first one gets the other one's values. If
    the module has the other one, both are one Parameter.
    """
    made: dict[str, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        source = (tied or {}).get(name, name)
        if source not in made:
            values = initial_values(source, parameter.shape, seed, std).to(parameter.dtype)
            made[source] = nn.Parameter(values)
        setattr(module.get_submodule(owner), leaf, made[source])


def initial_values(name: str, shape: torch.Size, seed: int, std: StdRule) -> Tensor:
    """Biases are 0, norm scales 1, matrices normally distributed; float32, with a generator of their own."""
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if len(shape) == 1:
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator("cpu").manual_seed(seed_of(seed, name))
    return values.normal_(0.0, std(name, shape), generator=generator)


def transformer_std(num_layers: int) -> StdRule:
    """0.02 as in GPT-2; that times 1 / sqrt(2 num_layers) for the two residual outputs of each layer."""
    residual = 0.02 / math.sqrt(2 * num_layers)
    return lambda name, shape: residual if name.endswith(RESIDUAL_OUTPUTS) else 0.02


def fan_in_std(name: str, shape: torch.Size) -> float:
    """He's sqrt(2 / fan_in), which keeps the scale of activations through ReLU layers."""
    return math.sqrt(2 / shape[1])


class Block(nn.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    [batch, time, hidden] in and out. position_ids, mask and sequence_slice: see DocumentStage; None: one
    document a row, which comes whole.
    """

    takes_mask = True

    def __init__(
        self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor:
        given = {"position_ids": position_ids, "mask": mask, "sequence_slice": sequence_slice}
        given = {name: value for name, value in given.items() if value is not None}
        x = x + self.attention(self.attention_norm(x), **given)
        summed: Tensor = x + self.mlp(self.mlp_norm(x))
        return summed


def split_heads(x: Tensor, head_size: int) -> Tensor:
    """[batch, time, heads x head_size] -> [batch, head, time, head_size]: all heads, or those of one rank."""
    heads: Tensor = x.unflatten(-1, (-1, head_size))
    return heads.transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The reverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens in nats; logits [batch, time, vocab], target [batch, time].

    The target of a position is the token after it: labels come shifted. Computed in float32 at least,
    whatever the logits are; B may overwrite the logits. A target of -100 is left out; without another target
    the loss is 0.
    """
    return _mean(logits_cross_entropy(logits, target, ignore_index=IGNORED), target)


def _mean(losses: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that are targets; the others have the loss 0."""
    return losses.sum() / num_tokens(target).clamp(min=1)


HEADS = ("auto", "whole", "recompute")
"""How the last stage computes the loss.

auto: as `zbpp.linear_cross_entropy` does. recompute: with keep_logits=False. whole: the stage returns logits,
and the loss is a function of them.
"""


class Head(nn.Linear):
    """The last layer of a language model: hidden states [..., H] -> logits; with a target, losses.

    keeps_logits: as keep_logits of `zbpp.linear_cross_entropy`.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, keeps_logits: bool = True) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.keeps_logits = keeps_logits

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        if target is None:
            return super().forward(x)
        return linear_cross_entropy(
            x, self.weight, target, ignore_index=IGNORED, keep_logits=self.keeps_logits
        )


def head_loss(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """`token_loss` of the logits that a head makes of hidden states.

    A Head computes the losses itself, unless somebody has changed what it computes.
    """
    if not isinstance(head, Head) or _is_changed(head):
        return token_loss(head(hidden), target)
    # By keyword: a tensor-parallel plan lays out positional arguments as hidden states.
    return _mean(head(hidden, target=target), target)


def _is_changed(head: Head) -> bool:
    """Whether a head has got a bias, a forward of its own that is not zbpp's, or a hook."""
    forward = vars(head).get("forward")
    is_own = forward is not None and not type(forward).__module__.startswith("zbpp.")
    has_bias = head._parameters["bias"] is not None
    return has_bias or is_own or has_hooks(head)


def check_head(head: str) -> None:
    """Raises ValueError for a value that is not among HEADS."""
    if head not in HEADS:
        raise ValueError(f"head={head}: write one of {', '.join(HEADS)}")


def token_accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """The share of targets that have the largest logit; arguments as in `token_loss`."""
    num_right = (logits.argmax(dim=-1) == target).sum().double()  # no token is -100
    return num_right / num_tokens(target).clamp(min=1)


def check_positive(**sizes: int) -> None:
    """Raises ValueError naming the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be positive: write 1 or more")


def check_divides(whole: str, size: int, part: str, count: int) -> None:
    """Raises ValueError, with the nearest sizes that do, unless `count` divides `size`."""
    if size % count:
        lower, upper = size // count * count, -(-size // count) * count
        nearest = f"{whole}={upper}" if lower == 0 else f"{whole}={lower} or {upper}"
        raise ValueError(f"{whole}={size} is not divisible by {part}={count}: write {nearest}")


def check_length(time: int, sequence_length: int) -> None:
    """Raises ValueError if a sequence of `time` tokens is longer than the model's `sequence_length`."""
    if time > sequence_length:
        raise ValueError(
            f"a sequence of {time} tokens is longer than the model's sequence_length={sequence_length}: "
            f"build the model with sequence_length={time}, or give shorter sequences"
        )


# ----------------------------------------------------------------
# Several documents in one row: each token sees those of its own document only.
#
# The rows' `position_ids` [batch, time] say where a document begins: at 0. They pass from stage to stage
# beside the hidden states, so that ranks between the ends read no data; each stage makes its mask from them.
#
# Where sequences come in slices, a stage keeps earlier positions, as its attention keeps earlier keys.


class DocumentStage(nn.Sequential):
    """A stage of a transformer: tokens or hidden states, and `position_ids` where documents are told apart.

    Without positions and slices it is an nn.Sequential. With positions, blocks get them and a mask, the
    embedding gets them, and the stage returns (hidden states, position_ids), or the last one its output
    alone. sequence_slice: which tokens of the sequence these are; see zbpp/stage_api.py.
    """

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        head: bool = True,
        sequence_slice: SequenceSlice | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = input_ids
        is_plain = position_ids is None and sequence_slice is None
        positions = None if position_ids is None else self._whole(position_ids)
        mask = None if positions is None else document_mask(positions, sequence_slice)
        for name, module in self.named_children():
            if name == "head" and not head:
                continue
            if not is_plain and getattr(module, "takes_mask", False):
                x = module(x, positions, mask, sequence_slice)
            elif not is_plain and getattr(module, "takes_positions", False):
                x = module(x, position_ids, sequence_slice)
            else:
                x = module(x)
        return x if position_ids is None or "head" in self._modules else (x, position_ids)

    def _whole(self, position_ids: Tensor) -> Tensor:
        """The positions of all tokens of each sequence: other processes may have some of them."""
        context = next((each for each in self.modules() if isinstance(each, Context)), None)
        return position_ids if context is None else context.whole(position_ids)


class LastStage(DocumentStage):
    """The last stage, which computes the loss itself: see zbpp/stage_api.py."""

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """`token_loss` of the logits."""
        return head_loss(self.get_submodule("head"), hidden, target)


def last_stage(head: str) -> type[DocumentStage]:
    """The class of the last stage. head: one of HEADS. Raises ValueError for another value."""
    check_head(head)
    return DocumentStage if head == "whole" else LastStage


def document_mask(position_ids: Tensor, sequence_slice: SequenceSlice | None = None) -> Tensor:
    """Which keys a query sees, bool [batch, 1, query, key]: those of its document that are not after it.

    The queries are those of the slice, the keys those of all tokens so far.
    """
    seen = position_ids
    if sequence_slice is not None:
        seen = sequence_slice.whole("position_ids", position_ids.unsqueeze(-1)).squeeze(-1)
    documents = (seen == 0).cumsum(dim=-1)
    num_queries, num_keys = position_ids.shape[-1], seen.shape[-1]
    is_same = documents[:, None, -num_queries:, None] == documents[:, None, None, :]
    is_earlier = torch.ones(num_queries, num_keys, dtype=torch.bool, device=seen.device)
    return is_same & is_earlier.tril(num_keys - num_queries)
