"""The whole model in one process: plain autograd, microbatch by microbatch.

The gradient that a right pipeline computes is a weighted sum over (part of the data, microbatch, term of the
loss). Mistakes of trainers are other weights: `gradients` takes any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.autograd import auxiliary_losses
from zbpp.devices import restored_generators, seed_generators
from zbpp.error_text import kind_of
from zbpp.parity_check.ranks import Facts, Sent, without_dropout
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.runtime.call.sizes import is_empty
from zbpp.runtime.restored import eval_mode, restored_buffers

Gradients = dict[str, Tensor | None]
Weight = Callable[[int, int, str], float]
"""(part, microbatch, term of the loss) -> the factor of the term's gradient."""

_MOST_SHOWN = 5
_LOSS = "loss"


class Part(NamedTuple):
    """The batch of some ranks. share: of all ranks. counts: of each microbatch, its tokens."""

    share: float
    microbatches: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]]
    counts: Sequence[float]


class Reference:
    """whole() -> the model. loss_fn(output, target) -> a scalar, or {term: scalar}, whose sum is the loss."""

    def __init__(
        self,
        whole: Callable[[], nn.Module],
        loss_fn: Callable[..., Any],
        device: torch.device,
        *,
        draws_dropout: bool,
    ) -> None:
        self._make, self._device, self._draws_dropout = whole, device, draws_dropout
        self._loss_fn = deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.is_double = True
        self.model = self._made()
        self.parts: list[Part] = []
        self.terms: dict[str, bool] = {}  # in the order in which the losses came; False: an auxiliary loss
        self._seeds: Sequence[Mapping[int, int]] = ()
        self._stage_of: dict[str, int] = {}
        self._entered, self._seed = -1, 0

    def _made(self) -> nn.Module:
        model = self._make()
        if not isinstance(model, nn.Module):
            raise ValueError(f"whole() returned a {type(model).__name__}: write whole=lambda: Model()")
        roots = [model, self._loss_fn] if isinstance(self._loss_fn, nn.Module) else [model]
        for each in roots:
            each.to(self._device, torch.float64) if self.is_double else each.to(self._device)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, given, name=name: self._enter(name))
        return model

    # ---- Names

    def places(self) -> dict[str, nn.Parameter]:
        """All parameters by name; a tied one under each of its names."""
        of_loss = self._loss_fn if isinstance(self._loss_fn, nn.Module) else nn.Module()
        found = dict(self.model.named_parameters(remove_duplicate=False))
        return found | {f"{_LOSS}.{name}": each for name, each in of_loss.named_parameters()}

    def check_names(self, sent: Sequence[Sequence[Sent]]) -> None:
        """Raise ValueError if the ranks' parameters are not those of the whole model."""
        places = self.places()
        wrong, found = [], set()
        for rank, each in enumerate(sent):
            for name, value in ((name, value) for names, value in each for name in names):
                if name not in places or value is None:
                    wrong.append(f"rank {rank} has {name}, whole() does not")
                    continue
                found.add(id(places[name]))
                if value.shape != places[name].shape:
                    shapes = f"{list(value.shape)} on rank {rank}, {list(places[name].shape)} in whole()"
                    wrong.append(f"{name} is {shapes}")
        wrong += [f"no rank has {name}" for name, each in places.items() if id(each) not in found]
        if wrong:
            more = f"; and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
            raise ValueError(
                f"the stages are not those of whole(): {'; '.join(wrong[:_MOST_SHOWN])}{more}. "
                "names=lambda stage, name: ... gives the name in the whole model of a name in a stage"
            )

    @torch.no_grad()
    def load(self, sent: Sequence[Sequence[Sent]]) -> None:
        """Take the ranks' weights and buffers; of copies the first one."""
        targets: dict[str, Tensor] = {**dict(self.model.named_buffers()), **self.places()}
        for name, value in ((n, value) for each in reversed(sent) for names, value in each for n in names):
            if name in targets and value is not None and targets[name].shape == value.shape:
                targets[name].copy_(value)

    # ---- Data

    def take(self, batches: Mapping[str, Any], facts: Sequence[Facts], number: int, tokens: Any) -> None:
        """Take the data. batches: of each part. number: of microbatches. tokens: see `parity`.

        Raises ValueError for an empty microbatch.
        """
        names = [each.part for each in facts]
        for name, batch in batches.items():
            pieces = into_microbatches("batch", batch, number)
            if any(map(is_empty, pieces)):
                raise ValueError(
                    f"microbatch {[*map(is_empty, pieces)].index(True)} of the batch is empty: give each rows"
                )
            microbatches = [_arguments(each) for each in pieces]
            counts = [float(tokens(target)) if tokens else 1.0 for _, _, target in microbatches]
            moved = [tree_map(self._moved, each) for each in microbatches]
            self.parts.append(Part(names.count(name) / len(names), moved, counts))
        self.begin(facts)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_cast = self.is_double and value.is_floating_point()
        return value.to(self._device, torch.float64 if is_cast else value.dtype)

    def begin(self, facts: Sequence[Facts]) -> None:
        """Take the random seeds of the next call."""
        by_part: dict[str, dict[int, int]] = {}
        claims: dict[str, set[int]] = {}
        for each in facts:
            by_part.setdefault(each.part, {}).update(each.seeds)
            for stage, names in each.modules.items():
                for name in names:
                    claims.setdefault(name, set()).add(stage)
        self._seeds = [*by_part.values()]
        # A container such as "layers" is in several stages, and says nothing.
        self._stage_of = {name: min(stages) for name, stages in claims.items() if len(stages) == 1}

    # ---- Running

    def gradients(self, weight: Weight, *, untied: bool = False) -> tuple[Gradients, list[list[float]]]:
        """The weighted gradient of every parameter, by name, and the losses by part and microbatch.

        untied: each place of a tied parameter has the gradient of its own uses.
        """
        with self._untied() if untied else nullcontext(), self._runs():
            places = self.places()
            for parameter in places.values():
                parameter.grad = None
            losses: list[list[float]] = [[] for _ in self.parts]
            for part, (_, microbatches, _) in enumerate(self.parts):
                for microbatch in range(len(microbatches)):
                    terms = self._forward(part, microbatch)
                    losses[part].append(_loss_of(terms))
                    weights = {name: weight(part, microbatch, name) for name in terms}
                    trained = [name for name, (value, _) in terms.items() if value.requires_grad]
                    total = sum(weights[name] * terms[name][0] for name in trained if weights[name])
                    if isinstance(total, Tensor):
                        total.backward()
            found = {name: each.grad for name, each in places.items()}
        for parameter in self.places().values():
            parameter.grad = None
        return found, losses

    def evaluate(self) -> list[list[float]]:
        """The losses of an evaluation."""
        with self._runs(), eval_mode([self.model, self._loss_fn]), torch.no_grad():
            return [
                [_loss_of(self._forward(part, microbatch)) for microbatch in range(len(each.microbatches))]
                for part, each in enumerate(self.parts)
            ]

    def prepare(
        self,
        weights: Sequence[Sequence[Sent]],
        buffers: Sequence[Sequence[Sent]],
        take: Callable[[], None],
    ) -> None:
        """Take weights and data in float64, or in the model's own dtypes if float64 does not run.

        Raises ValueError, with the module that draws random numbers, if two forwards differ.
        """
        for self.is_double in (True, False):
            self.model, self.parts = self._made(), []
            self.check_names(weights)
            self.load([*weights, *buffers])
            take()
            try:
                self._check_repeats()
                return
            except RuntimeError:
                if not self.is_double:
                    raise

    def _check_repeats(self) -> None:
        first, second = self._events(1), self._events(2)
        for (kind, name, values), (_, _, others) in zip(first, second, strict=False):
            if any(map(_differ, values, others)):
                # An input that differs was drawn by the module around.
                at = name if kind == "output" else name.rpartition(".")[0]
                where = (
                    f"{at} ({type(self.model.get_submodule(at)).__name__})" if at else "the model's forward"
                )
                raise ValueError(
                    f"two forwards of one microbatch differ: {where} draws random numbers; turn them off "
                    "for the check, or draw them in the stages of a zbpp.Pipeline by torch's generator"
                )

    def _events(self, seed: int) -> list[tuple[str, str, list[Tensor]]]:
        """What each module gets and returns in a forward, in order."""
        found: list[tuple[str, str, list[Tensor]]] = []

        def note(kind: str, name: str, values: Any) -> None:
            tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
            found.append((kind, name, [each.detach().clone() for each in tensors]))

        hooks = []
        for name, module in self.model.named_modules():
            before = lambda module, given, name=name: note("input", name, given)  # noqa: E731
            behind = lambda module, given, out, name=name: note("output", name, out)  # noqa: E731
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(behind)]
        try:
            with restored_buffers([self.model]), self._runs(), torch.no_grad():
                seed_generators(self._device, seed)
                self._forward(0, 0)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _forward(self, part: int, microbatch: int) -> dict[str, tuple[Tensor, bool]]:
        """The terms of the loss: {name: (value, whether the pipeline's losses contain it)}."""
        of_batch = self.parts[part].microbatches[microbatch]
        arguments, keywords, target = tree_map(_own, of_batch)
        self._entered, self._seed, self._part = -1, microbatch, part
        with auxiliary_losses() as auxiliary:
            loss = self._loss_fn(self.model(*arguments, **keywords), target)
        if isinstance(loss, tuple):  # (sum, count), see zbpp.stage_api.mean_over
            loss = loss[0] / max(float(loss[1]), 1.0)
        own = loss if isinstance(loss, Mapping) else {_LOSS: loss}
        terms = {name: (value, True) for name, value in own.items()}
        terms |= {name: (value, False) for name, value in auxiliary.items()}
        self.terms.update({name: is_in_loss for name, (_, is_in_loss) in terms.items()})
        return terms

    def _enter(self, name: str) -> None:
        """Seed as a Pipeline does when the forward enters the next stage; not in a recompute."""
        stage = self._stage_of.get(name, self._entered)
        if stage == self._entered or torch._C._current_graph_task_id() != -1:
            return
        self._entered = stage
        seed_generators(self._device, self._seeds[self._part][stage] + self._seed)

    @contextmanager
    def _runs(self) -> Iterator[None]:
        dtype = torch.get_default_dtype()
        dropout = nullcontext() if self._draws_dropout else without_dropout([self.model])
        with restored_generators(self._device), dropout:
            torch.set_default_dtype(torch.float64 if self.is_double else dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)

    @contextmanager
    def _untied(self) -> Iterator[None]:
        """Inside, each place of a tied parameter has a Parameter of its own."""
        seen: set[int] = set()
        changed = []
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    changed.append((module, name, parameter))
                seen.add(id(parameter))
        for module, name, parameter in changed:
            module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        try:
            yield
        finally:
            for module, name, parameter in changed:
                module._parameters[name] = parameter


def check_batch(batch: Any, where: str) -> None:
    """Raises ValueError unless a batch is a mapping, or a tuple or list with inputs and a target."""
    if not isinstance(batch, Mapping) and (not isinstance(batch, tuple | list) or len(batch) < 2):
        wrong = "has one value" if isinstance(batch, tuple | list) and batch else f"is {kind_of(batch)}"
        raise ValueError(f"batch{where} {wrong}: write (*inputs, target), or a dict with 'target'")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments and keywords of the model, and the target."""
    if isinstance(batch, Mapping):
        return (), {name: each for name, each in batch.items() if name != "target"}, batch.get("target")
    *arguments, target = batch
    return tuple(arguments), {}, target


def _own(value: Any) -> Any:
    """A copy: a model may change its input in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _loss_of(terms: Mapping[str, tuple[Tensor, bool]]) -> float:
    return sum(value.item() for value, is_in_loss in terms.values() if is_in_loss)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num())
