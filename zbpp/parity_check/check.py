"""zbpp.parity: the order of the comparisons. Every rank runs it; the first rank judges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.features.reductions.norm import clip_grad_norm_
from zbpp.parity_check.judge import Judge
from zbpp.parity_check.ranks import Held, Naming, Ranks, Stages, digest_of, on_host, without_dropout
from zbpp.parity_check.reference import Reference, check_batch
from zbpp.parity_check.report import Report
from zbpp.stage_api import mark_of

_NUM_UPDATES = 3


def parity(
    step: Callable[[Any], Any],
    stages: Stages,
    *,
    whole: Callable[[], nn.Module],
    batch: Any,
    loss_fn: Callable[..., Any],
    num_microbatches: int | None = None,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
    clip: float | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    clip_grad_norm: Callable[[float], Any] | None = None,
    update: Callable[[], Any] | None = None,
    zero_grad: Callable[[], Any] | None = None,
    tokens: Callable[[Any], float] | None = None,
    names: Naming | None = None,
    tolerance: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Report:
    """Compare a trainer with plain autograd over the whole model in one process. Collective over `group`.

    Compared are the losses and gradients of two steps in a row, the norm, the gradients after clipping, the
    weights after one and after three updates, and an evaluation between. The first comparison that fails is
    explained by known mistakes (faults.py), and ends the check. The weights are then those after the
    last update.

    step(batch): the trainer's forward and backward. Leaves each parameter's gradient in `.grad` (or in
    `main_grad`). Returns the microbatches' losses or, as one number, their mean on the ranks that know them,
    and [] or None elsewhere. A Pipeline's losses may be weighted, see `zbpp.stage_api.mean_over`.
    stages: what this rank trains: a Pipeline, {stage index: module}, torch's PipelineStages, or one module.
    whole: makes the whole model, on the first rank alone. It gets the ranks' weights. Its requires_grad says
    what is frozen. It runs in float64 where it can.
    batch: (*inputs, target), or {"target": ..., the model's keywords}. Every rank is given what its step
    takes; ranks of different replicas may be given different rows.
    loss_fn(output, target): the mean loss of a microbatch, a scalar or {name: scalar}, which are summed; or
    (sum, count).
    num_microbatches: of each batch; None: the Pipeline's.
    optimizer(parameters): makes an optimizer; None: no update is compared. update(): the trainer's own
    update; None: that of `optimizer` over the rank's parameters.
    clip: the largest norm. clip_grad_norm(clip): the trainer's own clipping, which may return the norm; None:
    `zbpp.clip_grad_norm_` for a Pipeline.
    evaluate(batch): the trainer's evaluation, with losses as of step. zero_grad(): called before each step;
    None: gradients are dropped.
    tokens(target): how many tokens of a microbatch count in the mean; None: what a loss_fn that is marked by
    `zbpp.stage_api.mean_over` counts; without a mark each microbatch counts the same.
    names(stage index, name in the stage): the name in the whole model; None: they are equal.
    tolerance: relative to a tensor's largest number; None: 1e-9 for float64, 2e-4 for float32, else 5e-2.

    Dropout draws the Pipeline's numbers on both sides; with another trainer dropout is off, and the report
    says so. The first rank holds the whole model in float64 and all ranks' gradients.

    Raises ValueError, on all ranks, for stages that are not those of whole(), for a rank without a batch, and
    for a model that draws other random numbers, with the name of the module.
    """
    held, ranks = Held(stages, names), Ranks(group)
    tokens = tokens or mark_of(loss_fn, "num_targets")
    pipeline = held.pipeline
    if pipeline is not None:
        num_microbatches = num_microbatches or pipeline.timetable.num_microbatches
        clip_grad_norm = clip_grad_norm or (lambda limit: clip_grad_norm_(pipeline, limit))
    wrong = [
        ("num_microbatches", num_microbatches is None, "into how many microbatches step cuts a batch"),
        ("clip_grad_norm", clip is not None and clip_grad_norm is None, "the trainer's own clipping"),
        ("optimizer", update is not None and optimizer is None, "the optimizer for the whole model"),
    ]
    for name, is_missing, what in wrong:
        if is_missing:
            raise ValueError(f"{name} is missing: pass {name}=..., {what}")
    with ExitStack() as stack:
        has_dropout = pipeline is None and stack.enter_context(without_dropout([*held.modules.values()]))
        check = _Check(ranks, held, step, batch, evaluate, zero_grad or held.zero_grad)
        check.begin(whole, loss_fn, num_microbatches or 1, tokens, tolerance, optimizer, has_dropout)
        if update is None and optimizer is not None:
            update = optimizer(held.parameters()).step
        return check.run(clip, clip_grad_norm, update)


class _Check:
    """One rank of a check."""

    def __init__(
        self,
        ranks: Ranks,
        held: Held,
        step: Callable[[Any], Any],
        batch: Any,
        evaluate: Callable[[Any], Any] | None,
        zero_grad: Callable[[], Any],
    ) -> None:
        self._ranks, self._held = ranks, held
        self._step, self._batch, self._evaluate, self._zero_grad = step, batch, evaluate, zero_grad
        self._part = "" if batch is None else digest_of(batch)
        self._made: Judge | None = None  # on the first rank

    def begin(
        self,
        whole: Callable[[], nn.Module],
        loss_fn: Callable[..., Any],
        number: int,
        tokens: Any,
        tolerance: float | None,
        optimizer: Any,
        has_dropout: bool,
    ) -> None:
        """Make the reference, with the ranks' weights and batches."""
        gather = self._ranks.gather
        facts = gather(self._held.facts(self._part))
        weights, buffers = gather(self._held.weights()), gather(self._held.buffers())
        batches = gather((on_host(self._batch), has_dropout))

        def make() -> None:
            missing = [str(rank) for rank, (each, _) in enumerate(batches) if each is None]
            if missing:
                raise ValueError(
                    f"batch is None on rank {', '.join(missing)}: give every rank the batch of its step"
                )
            for rank, (batch, _) in enumerate(batches):
                check_batch(batch, f" on rank {rank}")
            by_part: dict[str, Any] = {}
            for each, (batch, _) in zip(facts, batches, strict=True):
                by_part.setdefault(each.part, batch)
            reference = self._reference(whole, loss_fn)
            reference.prepare(weights, buffers, lambda: reference.take(by_part, facts, number, tokens))
            dtypes = {each.value.dtype for of_rank in weights for each in of_rank if each.value is not None}
            dtype = min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
            self._made = judge = Judge(reference, dtype, tolerance, optimizer)
            if any(each for _, each in batches):
                judge.report.notes.append("dropout is off: the trainer's random numbers are not known")
            if not reference.is_double:
                judge.report.notes.append("the whole model does not run in float64: it ran as it is made")

        self._ranks.on_first(make)

    def _reference(self, whole: Callable[[], nn.Module], loss_fn: Callable[..., Any]) -> Reference:
        parameters = self._held.parameters()
        device = parameters[0].device if parameters else torch.device("cpu")
        return Reference(whole, loss_fn, device, draws_dropout=self._held.pipeline is not None)

    def run(
        self,
        clip: float | None,
        clip_grad_norm: Callable[[float], Any] | None,
        update: Callable[[], Any] | None,
    ) -> Report:
        """All comparisons, until one fails."""
        all(self._comparisons(clip, clip_grad_norm, update))  # the first that fails is the last one
        return self._ranks.on_first(lambda: self._judge.end(_NUM_UPDATES if update else 0))

    @property
    def _judge(self) -> Judge:
        assert self._made is not None  # this is the first rank
        return self._made

    def _comparisons(
        self,
        clip: float | None,
        clip_grad_norm: Callable[[float], Any] | None,
        update: Callable[[], Any] | None,
    ) -> Iterator[bool]:
        yield from self._one_step("step 0")
        yield from self._one_step("step 0 again")
        for number in range(_NUM_UPDATES if update else 1):
            name = f"step {number}"
            if number:
                yield from self._one_step(name)
            if clip is not None and clip_grad_norm is not None:
                yield self._clip(name, clip, clip_grad_norm)
            if update is not None:
                yield self._update(name, update)
            if self._evaluate is not None and number == 0:
                yield self._evaluation(self._evaluate)

    def _one_step(self, name: str) -> Iterator[bool]:
        gather, held = self._ranks.gather, self._held
        facts, weights, buffers = (
            gather(held.facts(self._part)),
            gather(held.weights()),
            gather(held.buffers()),
        )
        yield self._ranks.on_first(lambda: self._judge.state(weights, buffers))
        self._zero_grad()
        losses, sent = gather(_losses_of(self._step(self._batch))), gather(held.gradients())
        yield self._ranks.on_first(lambda: self._judge.gradients(name, facts, losses, sent))

    def _clip(self, name: str, clip: float, clip_grad_norm: Callable[[float], Any]) -> bool:
        gather, held = self._ranks.gather, self._held
        before = gather(held.gradients())
        norm = clip_grad_norm(clip)
        norms, after = gather(None if norm is None else float(norm)), gather(held.gradients())
        return self._ranks.on_first(lambda: self._judge.clipping(name, clip, norms, before, after))

    def _update(self, name: str, update: Callable[[], Any]) -> bool:
        gradients = self._ranks.gather(self._held.gradients())
        update()
        weights = self._ranks.gather(self._held.weights())
        return self._ranks.on_first(lambda: self._judge.update(name, gradients, weights))

    def _evaluation(self, evaluate: Callable[[Any], Any]) -> bool:
        gather, held = self._ranks.gather, self._held
        facts, weights, buffers = (
            gather(held.facts(self._part)),
            gather(held.weights()),
            gather(held.buffers()),
        )
        losses = gather(_losses_of(evaluate(self._batch)))

        def compare() -> bool:
            self._judge.state(weights, buffers)
            return self._judge.evaluation(facts, losses)

        return self._ranks.on_first(compare)


def _losses_of(returned: Any) -> Sequence[float]:
    leaves = [each for each in tree_leaves(returned) if each is not None]
    tensors = [each.detach().double().flatten() for each in leaves if isinstance(each, Tensor)]
    if len(tensors) == len(leaves):
        return torch.cat(tensors).tolist() if tensors else []
    return [*map(float, leaves)]
