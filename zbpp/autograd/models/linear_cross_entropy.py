"""The cross-entropy of a language model's head, without logits in float32 between actions.

    x [T, H] --- product with the weight [V, H] ---> logits [T, V] ---> losses [T]

T tokens, V words. torch's cross_entropy keeps the logits in float32 from F to B, and makes their gradient dz
beside them. Here float32 numbers exist for some tokens at a time. There are two forms:

    keep_logits   F                                   B                             W
    True          logits, losses                      dz overwrites logits; dz @ w  dz.T @ x
    False         some logits at a time: losses, dx   dx times dy                   logits again; dz.T @ x

If the weight is a DTensor, each rank has the logits of some words. The ranks exchange two numbers per token
in F, and sum dx in B. W communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zbpp.autograd.adding import add_or_copy, add_product
from zbpp.autograd.capture import Capture, HeldTensors, is_kept
from zbpp.autograd.collector import collector_of, refuse_create_graph
from zbpp.autograd.models.loss_kernels import (
    compiled,
    has_kernels,
    losses_and_lse,
    whole_waves,
    write_gradient,
)
from zbpp.autograd.models.sharded import (
    WordShard,
    is_on_mesh,
    local_part,
    on_each_rank,
    replicated,
    word_shard,
)
from zbpp.autograd.rules import rule

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
    chunk_mib: float = 64,
) -> Tensor:
    """The cross-entropy of each token's logits `x @ weight.T`, in nats; take their mean or sum for the loss.

    x: [..., H]; weight: [V, H], without a bias; target: [...], whole numbers below V, or ignore_index: such
    tokens have the loss 0. label_smoothing: as in torch's cross_entropy. z_loss: this times the square of
    logsumexp(logits) is added to each loss. Returns losses in the shape of target, in float32 at least.

    keep_logits: whether the logits stay from F to B, and their gradient from B to W, in the dtype of x. If
    not, F and W compute them, chunk_mib MiB in float32 at a time (on a GPU at least a token for each
    multiprocessor): 4 products instead of 3, and little memory. W then reads the weight, too. In 16 bits
    without keep_logits, the gradient of x is rounded twice, and W sums the weight's gradient in float32
    memory of the weight's shape, unless the weight has a main_grad. A backward with create_graph=True is
    refused.

    weight may be a DTensor. If it is sharded along the words, label_smoothing is refused; else
    keep_logits=False is. Raises ValueError for what is refused, for a target of another shape, and on a CPU
    for a target that is no word. On a GPU such a target fails in a kernel; where words are sharded, its loss
    is infinite.
    """
    if torch.compiler.is_compiling():
        from zbpp.autograd.compiled.dynamo import break_graph

        break_graph()
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as autocast treats linear
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _check_target("x", x, target)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=}: give a share between 0 and 1")
    if not chunk_mib > 0:
        raise ValueError(f"{chunk_mib=}: give MiB above 0, such as 64 or 0.5")
    loss = _Loss(ignore_index, label_smoothing, z_loss, int(chunk_mib * 2**20))
    tokens, labels = x.flatten(0, -2), target.flatten()
    with torch.autocast(x.device.type, enabled=False):
        if keep_logits:
            losses = _of_logits(F.linear(tokens, weight), labels, loss)
        else:
            losses = _of_product(tokens, weight, labels, loss)
    return losses if target.dim() == 1 else losses.view(target.shape)


def logits_cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """`linear_cross_entropy` of logits [..., V] that a model has computed.

    B overwrites the logits with their gradient, unless something else holds their memory.
    """
    _check_target("the logits", logits, target)
    loss = _Loss(ignore_index)
    return _of_logits(logits.flatten(0, -2), target.flatten(), loss).view(target.shape)


def _check_target(name: str, x: Tensor, target: Tensor) -> None:
    if x.dim() < 2 or target.shape != x.shape[:-1]:
        raise ValueError(
            f"target has shape {[*target.shape]}, {name} {[*x.shape]}: give one target for each token, in "
            "the shape that remains without the last dimension"
        )


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _rows(number: int, *of_tokens: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """So many rows of each tensor [T, ...] at a time."""
    if number >= len(of_tokens[0]):
        return (of_tokens,)
    return zip(*[each.split(number) for each in of_tokens], strict=True)


# ---- The loss of some logits, and its gradient


class _Loss(NamedTuple):
    """The options of `linear_cross_entropy`. chunk: the bytes of float32 logits that may exist at a time.

    shard: the words whose logits there are; None: all.
    """

    ignored: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int = 2**26
    shard: WordShard | None = None

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Five columns [T, 1]: the losses, and what `backward` needs for losses whose gradient is 1."""
        labels = target[:, None]
        is_ignored = is_elsewhere = labels == self.ignored
        if self.shard is not None:
            labels = labels - self.shard.first
            is_elsewhere = is_ignored | (labels < 0) | (labels >= logits.shape[1])
        labels = labels.masked_fill(is_elsewhere, 0)
        try:
            losses, lse = self._losses_and_lse(logits, labels)
        except RuntimeError as error:  # on a CPU: on a GPU the kernel fails, and no wait is made to say why
            if "out of bounds" not in str(error):
                raise
            raise ValueError(self._not_among(labels, logits.shape[1])) from None
        own_lse, scale = lse, torch.ones_like(losses)
        if self.shard is not None:
            losses, lse, scale = _over_ranks(self.shard, losses.masked_fill(is_elsewhere, torch.inf), lse)
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
            scale = scale * (1 + 2 * self.z_loss * lse)
        at_target = (-1 / scale).masked_fill_(is_elsewhere, 0)
        scale = scale.masked_fill_(is_ignored, 0)
        return losses.masked_fill(is_ignored, 0), labels, at_target, scale, own_lse

    def _not_among(self, labels: Tensor, num_words: int) -> str:
        """A message for labels of which one is no word."""
        wrong = labels[(labels < 0) | (labels >= num_words)][0].item()
        return (
            f"a target is {wrong}, and the logits are of {num_words} words: write 0 to {num_words - 1}, or "
            f"{self.ignored} for a token that is left out"
        )

    def _losses_and_lse(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The losses and the logsumexp of each token over the words that there are, [T, 1]."""
        if has_kernels(logits):
            found: tuple[Tensor, Tensor] = compiled(losses_and_lse)(logits, labels, self.smoothing)
            return found
        losses, lse = logits.new_empty((2, *labels.shape), dtype=_precise(logits))
        for memory, z, some_labels, some_losses, some_lse in self._some(logits, labels, losses, lse):
            torch.log_softmax(z, -1, dtype=memory.dtype, out=memory)
            at_label = memory.gather(1, some_labels)
            torch.sub(z.gather(1, some_labels), at_label, out=some_lse)
            torch.neg(at_label, out=some_losses)
            if self.smoothing:
                some_losses.lerp_(-memory.mean(1, keepdim=True), self.smoothing)
        return losses, lse

    def backward(self, logits: Tensor, dz: Tensor, *columns: Tensor) -> None:
        """Write (softmax + at_target at the label) * scale to dz, which may be the logits.

        In 16 bits only the result is rounded: softmax - 1 of a token that is nearly sure would be 0.
        """
        if has_kernels(logits):
            compiled(write_gradient)(logits, dz, *columns, self.smoothing)
            return
        for memory, z, some_dz, labels, at_target, scale, _ in self._some(logits, dz, *columns):
            torch.softmax(z, -1, dtype=memory.dtype, out=memory)
            if self.smoothing:
                memory.add_(at_target * (self.smoothing / z.shape[1]))
                at_target = at_target * (1 - self.smoothing)
            torch.mul(memory.scatter_add_(1, labels, at_target), scale, out=some_dz)

    def _some(self, logits: Tensor, *of_tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Some rows of all these at a time, behind memory for the logits of these rows in float32."""
        dtype, (num_tokens, num_words) = _precise(logits), logits.shape
        most = min(self.chunk, _CPU_CACHE) if logits.device.type == "cpu" else self.chunk
        number = max(1, most // (num_words * dtype.itemsize))
        number = min(num_tokens, whole_waves(number, logits.device))
        memory = logits.new_empty(number, num_words, dtype=dtype)
        if isinstance(logits, FakeTensor):  # a prediction of memory: later rows take what the first ones take
            logits, of_tokens = logits[:number], tuple([each[:number] for each in of_tokens])
        for rows in _rows(number, logits, *of_tokens):
            yield memory[: len(rows[0])], *rows


def _over_ranks(shard: WordShard, losses: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and logsumexp over the words of all ranks; the share of this rank's words in the softmax.

    losses: infinite but on the one rank that has the target.
    """
    all_lse, all_losses = shard.gather(torch.cat([lse, losses], 1)).split(1, -1)
    total = all_lse.logsumexp(0)
    return (all_losses + (total - all_lse)).amin(0), total, (lse - total).exp_().clamp_(min=1e-30)


def _precise(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


# ---- keep_logits=True: a linear layer, and a Function of its output


def _of_logits(logits: Any, target: Tensor, loss: _Loss) -> Tensor:
    """The losses of logits [T, V], which may be a DTensor."""
    if not is_on_mesh(logits):
        return _apply(_LossesOfLogits, logits, target, loss)
    shard = word_shard(logits, 1)
    if shard and loss.smoothing:
        raise ValueError("label_smoothing goes with no logits that are sharded along the words")
    local = logits.to_local() if shard else on_each_rank(logits)
    return replicated(_apply(_LossesOfLogits, local, target, loss._replace(shard=shard)), logits)


class _LossesOfLogits(torch.autograd.Function):
    """(logits [T, V], target [T]) -> losses [T]."""

    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, loss: _Loss) -> Tensor:
        losses, *for_b = loss.forward(logits, target)
        ctx.loss = loss
        # Detached, so that the graph holds a tensor of its own: `_is_last_holder` counts all others.
        ctx.save_for_backward(logits.detach(), *for_b)
        return losses[:, 0].clone()  # no view: FSDP2 warns of modules that return one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        logits, labels, at_target, scale, lse = ctx.saved_tensors
        collector = collector_of(ctx)
        may_overwrite = collector is not None and not collector.keep and _is_last_holder(logits)
        dz = logits if may_overwrite else torch.empty_like(logits)
        if collector is not None:
            collector.large.append(dz)
        ctx.loss.backward(logits, dz, labels, at_target, scale * dy.unsqueeze(1), lse)
        return dz, None, None


def _num_holders(tensor: Tensor) -> int:
    """How many tensors, and autograd's saved tensors, hold this tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_HOLDERS_OF_NEW = _num_holders(torch.empty(1))


def _is_last_holder(logits: Tensor) -> bool:
    """Whether nobody else can read this memory, so that it may be overwritten.

    Another holder is a hook, a metric that keeps the logits, or another node of the graph.
    """
    return logits.is_contiguous() and _num_holders(logits) == _HOLDERS_OF_NEW


# ---- keep_logits=False: a Function of the weight alone, and one of x above it
#
# The backward of a single Function could not know whether W computes the weight's gradient.


def _of_product(x: Tensor, weight: Tensor, target: Tensor, loss: _Loss) -> Tensor:
    """The losses of logits x @ weight.T, which no action leaves to another one. Both may be DTensors."""
    if is_on_mesh(weight):
        shard = word_shard(weight, 0)
        if shard is None or loss.smoothing:
            raise ValueError(
                "keep_logits=False goes with a DTensor if it is sharded along the words, and without "
                "label_smoothing: write keep_logits=True, for a model model.head=auto"
            )
        loss, local = loss._replace(shard=shard), on_each_rank(x, sums_gradient=shard)
        return replicated(_of_product(local, local_part(weight), target, loss), weight)
    wants_dx = x.requires_grad and torch.is_grad_enabled()
    losses, dx = _apply(_WeightOfHead, weight, x.detach(), target, loss, wants_dx)
    return _apply(_InputOfHead, losses, x, dx) if wants_dx else losses


class _WeightOfHead(torch.autograd.Function):
    """(weight, x, target) -> (losses [T], gradient of their sum with respect to x, empty unless wanted)."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, target: Tensor, loss: _Loss, wants_dx: bool
    ) -> tuple[Tensor, Tensor]:
        dx = torch.empty_like(x) if wants_dx else x.new_empty(len(x), 0)
        found = []
        for logits, _, some_target, some_dx in _products(loss, weight, x, target, dx):
            columns = loss.forward(logits, some_target)
            if wants_dx:
                loss.backward(logits, logits, *columns[1:])
                torch.mm(logits, weight, out=some_dx)
            found.append(columns)
        losses, *for_w = map(torch.cat, zip(*found, strict=True))
        ctx.loss = loss
        ctx.save_for_backward(weight, x, *for_w)
        ctx.mark_non_differentiable(dx)
        ctx.set_materialize_grads(False)  # dx has none
        return losses[:, 0].clone(), dx

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        weight, *held = ctx.saved_tensors
        gradient = torch.empty_like(weight)
        _add_gradient(ctx.loss, gradient, (weight.detach(), *held), dy, True)
        return gradient, None, None, None, None


def _products(loss: _Loss, weight: Tensor, x: Tensor, *of_tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The logits of some tokens at a time, with these tokens' rows of x and of the other tensors [T, ...].

    All logits are in the same memory. All ranks that share the words take as many tokens at a time.
    """
    number = _tokens_at_a_time(loss, weight, x)
    memory = x.new_empty(number, len(weight))
    for some_x, *others in _rows(number, x, *of_tokens):
        yield torch.mm(some_x, weight.T, out=memory[: len(some_x)]), some_x, *others


def _tokens_at_a_time(loss: _Loss, weight: Tensor, x: Tensor) -> int:
    num_words = len(weight) if loss.shard is None else loss.shard.most
    number = max(1, loss.chunk // (num_words * _precise(x).itemsize))
    return min(len(x), whole_waves(number, x.device))


def _add_gradient(loss: _Loss, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    """Compute logits and dz again, some tokens at a time, and add dz.T @ x.

    Like the product of all tokens, the sum is rounded once: the terms are added in float32.
    """
    weight, x, labels, at_target, scale, lse = held
    columns = labels, at_target, scale * dy[:, None], lse
    is_exact = target.dtype == _precise(target) or _tokens_at_a_time(loss, weight, x) >= len(x)
    total = target if is_exact else torch.empty_like(target, dtype=_precise(target))
    is_empty = fresh or not is_exact
    for logits, some_x, *some_columns in _products(loss, weight, x, *columns):
        loss.backward(logits, logits, *some_columns)
        add_product(total, logits.T, some_x, is_empty)
        is_empty = False
    if not is_exact:
        add_or_copy(target, total, fresh)


@rule("_WeightOfHeadBackward", weights=(0,))
def _weight_of_head(node: Any, operand: int) -> Capture | None:
    if not all(map(is_kept, node._raw_saved_tensors)):
        return None
    held = tuple([each.detach() for each in node.saved_tensors])
    return Capture(held, partial(_add_gradient, node.loss))


class _InputOfHead(torch.autograd.Function):
    """The losses as they are, with their gradient with respect to x."""

    changes_no_gradient = True

    @staticmethod
    def forward(ctx: Any, losses: Tensor, x: Tensor, dx: Tensor) -> Tensor:
        ctx.save_for_backward(dx)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy", "write torch's cross_entropy in")
        (dx,) = ctx.saved_tensors
        return dy, (dx * dy[:, None]).to(dx.dtype), None
