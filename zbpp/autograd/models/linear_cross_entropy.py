"""The cross-entropy of a language model's head, without logits in float32 between actions.

    x [T, H] --- product with the weight [V, H] ---> logits [T, V] ---> losses [T]

T tokens, V words. torch's cross_entropy keeps the logits in float32 from F to B, and makes their gradient dz
beside them. Here float32 numbers exist for some tokens at a time. There are two forms:

    keep_logits   F                                   B                             W
    True          logits, losses                      dz overwrites logits; dz @ w  dz.T @ x
    False         some logits at a time: losses, dx   dx times dy                   logits again; dz.T @ x

With keep_logits the product is an ordinary linear layer, and one Function computes the losses of its output.
Without keep_logits nothing of size [T, V] outlives an action. Then two Functions share the work, since the
backward of one can't know whether W computes its weight's gradient: `_WeightOfHead` leads to the weight
alone and has a rule, `_InputOfHead` above it leads to x.

If the weight is a DTensor, each rank has some words. With keep_logits the ranks exchange two numbers per
token in F, see `_Loss.joined`, and the product sums dx over the ranks in B. W communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zbpp.autograd.capture import Capture, HeldTensors, is_kept
from zbpp.autograd.collector import collector_of, refuse_create_graph
from zbpp.autograd.models.sharded import WordShard, is_on_mesh, replicated, word_shard
from zbpp.autograd.rules import add_product, rule

_CPU_CACHE = 2**22  # bytes: on a CPU one kernel after the other works on so many at a time


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    keep_logits: bool = True,
    chunk_mib: int = 64,
) -> Tensor:
    """The cross-entropy of each token's logits `x @ weight.T`, in nats; take their mean or sum for the loss.

    x: [..., H]; weight: [V, H], without a bias; target: [...], whole numbers below V, or ignore_index: such
    tokens have the loss 0. label_smoothing: as in torch's cross_entropy. z_loss: this times the square of
    logsumexp(logits) is added to each loss. Returns losses in the shape of target, in float32 at least.

    keep_logits: whether the logits stay from F to B, and their gradient from B to W, in the dtype of x. If
    not, F and W compute them, chunk_mib MiB in float32 at a time: 4 products instead of 3, and little
    memory. W then reads the weight, too. In 16 bits without keep_logits, the gradient of x is rounded twice.
    A backward with create_graph=True is refused.

    Raises ValueError for a target of another shape, or without whole numbers, and for options out of range.
    """
    if torch.compiler.is_compiling():
        from zbpp.autograd.compiled.dynamo import break_graph

        break_graph()
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as autocast treats linear
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _check_target("x", x, target)
    if not 0 <= label_smoothing <= 1 or chunk_mib < 1:
        raise ValueError(f"{label_smoothing=} is a share between 0 and 1, {chunk_mib=} a number from 1 on")
    loss = _Loss(ignore_index, label_smoothing, z_loss, chunk_mib * 2**20)
    tokens, labels = (x, target) if x.dim() == 2 else (x.flatten(0, -2), target.flatten())
    with torch.autocast(x.device.type, enabled=False):
        if keep_logits:
            losses = _losses(F.linear(tokens, weight), labels, loss)
        elif is_on_mesh(weight):
            raise ValueError("keep_logits=False goes with no DTensor as weight: write model.head=auto")
        else:
            wants_dx = x.requires_grad and torch.is_grad_enabled()
            losses, dx = _apply(_WeightOfHead, weight, tokens.detach(), labels, loss, wants_dx)
            if wants_dx:
                losses = _apply(_InputOfHead, losses, tokens, dx)
    return losses if x.dim() == 2 else losses.view(target.shape)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def logits_cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """`linear_cross_entropy` of logits [..., V] that a model has computed.

    B overwrites the logits with their gradient, unless something else holds their memory.
    """
    _check_target("the logits", logits, target)
    loss = _Loss(ignore_index, 0.0, 0.0, 2**26)
    return _losses(logits.flatten(0, -2), target.flatten(), loss).view(target.shape)


def _losses(logits: Tensor, target: Tensor, loss: _Loss) -> Tensor:
    """The losses of logits [T, V], which may be a DTensor."""
    if not is_on_mesh(logits):
        return _apply(_LossesOfLogits, logits, target, loss)
    local, shard = word_shard(logits)
    if shard and loss.smoothing:
        raise ValueError("label_smoothing goes with no logits that are sharded along the words")
    return replicated(_apply(_LossesOfLogits, local, target, loss._replace(shard=shard)), logits)


def _check_target(name: str, x: Tensor, target: Tensor) -> None:
    if x.dim() < 2 or target.shape != x.shape[:-1]:
        raise ValueError(
            f"target has shape {[*target.shape]}, {name} {[*x.shape]}: give one target for each token, in "
            "the shape that remains without the last dimension"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}: give the number of each token's word")


def _num_holders(tensor: Tensor) -> int:
    """How many tensors, and autograd's saved tensors, hold this tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_HOLDERS_OF_NEW = _num_holders(torch.empty(1))


def _is_last_holder(logits: Tensor) -> bool:
    """Whether nobody else can read this memory, so that it may be overwritten.

    Another holder is a hook, a metric that keeps the logits, or another node of the graph.
    """
    return logits.is_contiguous() and _num_holders(logits) == _HOLDERS_OF_NEW


class _Loss(NamedTuple):
    """The options of `linear_cross_entropy`. chunk: the bytes of logits that a chunk of tokens may have.

    shard: the words whose logits there are; None: all.
    """

    ignored: int
    smoothing: float
    z_loss: float
    chunk: int
    shard: WordShard | None = None

    def labels(self, target: Tensor, num_words: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each token a word among those here, whether it is ignored, whether its target is not here.

        All are [T, 1]. num_words: of those here.
        """
        target = target[:, None]
        is_ignored = target == self.ignored
        if self.shard is None:
            return target.masked_fill(is_ignored, 0), is_ignored, is_ignored
        target = target - self.shard.first
        is_elsewhere = is_ignored | (target < 0) | (target >= num_words)
        return target.masked_fill(is_elsewhere, 0), is_ignored, is_elsewhere

    def chunks(self, num_words: int, *of_tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tensors [T, ...], some tokens at a time, each time with memory for logits [., V]."""
        first = of_tokens[0]
        dtype = _precise(first)
        rows = max(1, self.chunk // (num_words * dtype.itemsize))
        memory = first.new_empty(min(rows, len(first)), num_words, dtype=dtype)
        if rows >= len(first):
            yield memory, *of_tokens
            return
        for parts in zip(*[each.split(rows) for each in of_tokens], strict=True):
            yield memory[: len(parts[0])], *parts

    def products(self, weight: Tensor, *of_tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """`chunks`, with the logits between the memory and the tensors, the first of which is x."""
        buffer = None
        for memory, x, *others in self.chunks(len(weight), *of_tokens):
            buffer = x.new_empty(memory.shape) if buffer is None else buffer
            yield memory, torch.mm(x, weight.T, out=buffer[: len(x)]), x, *others

    def forward(self, memory: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The losses without z_loss, and logsumexp of the logits; both [T, 1]."""
        torch.log_softmax(logits, -1, dtype=memory.dtype, out=memory)
        picked = memory.gather(1, labels)
        lse = logits.gather(1, labels) - picked
        losses = picked.neg_()
        return losses.lerp_(-memory.mean(1, keepdim=True), self.smoothing) if self.smoothing else losses, lse

    def for_b(
        self, losses: Tensor, lse: Tensor, is_ignored: Tensor, is_elsewhere: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The losses over the words of all ranks, and two columns for `backward`: `at_target` and the scale.

        The scale is for losses whose gradient is 1.
        """
        scale = torch.ones_like(losses)
        if self.shard is not None:
            losses = losses.masked_fill(is_elsewhere, torch.inf)  # one rank has the target
            lses, all_losses = self.shard.gather(torch.cat([lse, losses], 1)).split(1, -1)
            total = lses.logsumexp(0)
            losses = (all_losses + (total - lses)).amin(0)
            scale, lse = (lse - total).exp_().clamp_(min=1e-30), total
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
            scale.mul_(1 + 2 * self.z_loss * lse)
        at_target = (-1 / scale).masked_fill_(is_elsewhere, 0)
        return losses.masked_fill(is_ignored, 0), at_target, scale.masked_fill_(is_ignored, 0)

    def backward(
        self, memory: Tensor, logits: Tensor, dz: Tensor, labels: Tensor, at_target: Tensor, scale: Tensor
    ) -> None:
        """Write (softmax + at_target at the target) * scale to dz, which may be the logits.

        In 16 bits only the result is rounded: softmax - 1 of a token that is nearly sure would be 0.
        """
        torch.softmax(logits, -1, dtype=memory.dtype, out=memory)
        if self.smoothing:
            memory.add_(at_target * (self.smoothing / logits.shape[1]))
            at_target = at_target * (1 - self.smoothing)
        torch.mul(memory.scatter_add_(1, labels, at_target), scale, out=dz)


def _precise(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _cat(rows: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The columns of several chunks of tokens, joined."""
    rows = [*rows]
    return [*rows[0]] if len(rows) == 1 else [*map(torch.cat, zip(*rows, strict=True))]


class _LossesOfLogits(torch.autograd.Function):
    """keep_logits: (logits [T, V], target [T]) -> losses [T]."""

    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, loss: _Loss) -> Tensor:
        if logits.device.type == "cpu":
            loss = loss._replace(chunk=min(loss.chunk, _CPU_CACHE))
        num_words = logits.shape[1]
        labels, *masks = loss.labels(target, num_words)
        columns = _cat(loss.forward(*each) for each in loss.chunks(num_words, logits, labels))
        losses, *for_b = loss.for_b(*columns, *masks)
        ctx.loss = loss
        # Detached: a tensor of the graph's own, beside which each other holder counts.
        ctx.save_for_backward(logits.detach(), labels, *for_b)
        return losses[:, 0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        logits, labels, at_target, scale = ctx.saved_tensors
        scale = scale * dy[:, None]
        collector = collector_of(ctx)
        may_overwrite = collector is not None and not collector.keep and _is_last_holder(logits)
        dz = logits if may_overwrite else torch.empty_like(logits)
        if collector is not None:
            collector.large.append(dz)
        for each in ctx.loss.chunks(logits.shape[1], logits, dz, labels, at_target, scale):
            ctx.loss.backward(*each)
        return dz, None, None


class _WeightOfHead(torch.autograd.Function):
    """Without keep_logits: (weight, x, target) -> (losses [T], gradient of their sum with respect to x)."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, target: Tensor, loss: _Loss, wants_dx: bool
    ) -> tuple[Tensor, Tensor]:
        labels, *masks = loss.labels(target, len(weight))
        dx = torch.empty_like(x) if wants_dx else x.new_empty(len(x), 0)
        found = []
        for memory, logits, _, some_labels, *some_masks, some_dx in loss.products(
            weight, x, labels, *masks, dx
        ):
            columns = loss.for_b(*loss.forward(memory, logits, some_labels), *some_masks)
            if wants_dx:
                loss.backward(memory, logits, logits, some_labels, *columns[1:])
                torch.mm(logits, weight, out=some_dx)
            found.append(columns)
        losses, *for_b = _cat(found)
        ctx.loss = loss
        ctx.save_for_backward(weight, x, labels, *for_b)
        ctx.mark_non_differentiable(dx)
        ctx.set_materialize_grads(False)  # dx has none
        return losses[:, 0], dx

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        weight, *held = ctx.saved_tensors
        gradient = torch.empty_like(weight)
        _AddHeadGradient(ctx.loss)(gradient, (weight.detach(), *held), dy, True)
        return gradient, None, None, None, None


@rule("_WeightOfHeadBackward", weights=(0,))
def _weight_of_head(node: Any, operand: int) -> Capture | None:
    if not all(map(is_kept, node._raw_saved_tensors)):
        return None
    held = tuple([each.detach() for each in node.saved_tensors])
    return Capture(held, _AddHeadGradient(node.loss))


class _AddHeadGradient:
    """Computes logits and dz again, some tokens at a time, and adds dz.T @ x."""

    def __init__(self, loss: _Loss) -> None:
        self.loss = loss

    def __call__(self, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
        weight, x, labels, at_target, scale = held
        columns = labels, at_target, scale * dy[:, None]
        for memory, logits, some_x, *some_columns in self.loss.products(weight, x, *columns):
            self.loss.backward(memory, logits, logits, *some_columns)
            add_product(target, logits.T, some_x, fresh)
            fresh = False


class _InputOfHead(torch.autograd.Function):
    """Without keep_logits: the losses, with their gradient with respect to x."""

    changes_no_gradient = True

    @staticmethod
    def forward(ctx: Any, losses: Tensor, x: Tensor, dx: Tensor) -> Tensor:
        ctx.save_for_backward(dx)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        (dx,) = ctx.saved_tensors
        return dy, (dx * dy[:, None]).to(dx.dtype), None
