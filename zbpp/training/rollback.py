"""Takes back an optimizer's step, to the last bit, by copies.

Before the step, everything that the step may change is copied: parameters, `optimizer.state`, the options in
`optimizer.param_groups`, and the state of torch's random number generator on the CPU. Each step copies into
the same memory, so it allocates nothing once the optimizer has all its states.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.mesh import local_of

_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)

_CHECKED_ONCE = ("_need_device_dtype_check_for_fused",)
"""Attributes by which torch's optimizers remember that the first step has checked the weights."""


class Rollback(Protocol):
    """Takes back the last step of an optimizer: by copies, or by computing it backwards (inverse.py)."""

    def keep(self, scaled: list[Tensor], *, steps: bool = True) -> None:
        """Called before the step. scaled: the gradients that the caller will scale in place before it.

        steps: whether a step follows; otherwise nothing changes a gradient.
        """

    def after_step(self, *, has_stepped: bool) -> None:
        """Called after `keep` and the step, if there was one. Raises ValueError if it can't be taken back."""

    def undone(self) -> Any:
        """A context that begins by taking back the step and the scaling; within it the caller may redo both.

        The optimizer's options (a learning rate) have the values of `keep` within the context. Afterwards the
        options that the caller changed after the step are in force again.
        """

    def forget(self) -> None:
        """Free the copies, since post-validation goes off."""

    def tensors(self) -> list[Tensor]:
        """The copies."""


class Copies:
    """Copies of tensors: `take` copies all of them, `give_back` restores all of them.

    A DTensor is copied as far as this process holds it.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor and its copy

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors, and drop the copies of others."""
        before, self._copies = self._copies, {}
        for tensor in tensors:
            local = local_of(tensor.detach())
            _, copy = before.get(id(tensor), (None, None))
            if copy is None or not _are_alike(copy, local):
                copy = torch.empty_like(local)
            self._copies[id(tensor)] = tensor, copy
        for originals, copies in self._lists():
            torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the tensors the values that they had at the last `take`."""
        for originals, copies in self._lists():
            torch._foreach_copy_(originals, copies)

    @property
    def num_bytes(self) -> int:
        """The memory of the copies."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, copy in self._copies.values()]

    def _lists(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """(tensors, copies) for each device and dtype: _foreach_copy_ is fast if these agree in a list."""
        lists: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copy in self._copies.values():
            originals, copies = lists.setdefault((copy.device, copy.dtype), ([], []))
            originals.append(local_of(tensor.detach()))
            copies.append(copy)
        yield from lists.values()


class ExactRollback:
    """The Rollback by copies. Raises ValueError for an optimizer whose step can't be taken back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refusal = refusal_of(optimizer)
        if refusal:
            raise ValueError(refusal)
        self._optimizer, self._copies = optimizer, Copies()
        self._options = Options(optimizer)
        self._restore_state: Callable[[], Any] = _nothing
        self._generator: Tensor | None = None
        self._gradients: list[tuple[Tensor, int]] = []
        # Whether the step changes gradients in place. Few optimizers do so; the first step shows it.
        self._changes_gradients = True

    @property
    def num_bytes(self) -> int:
        """The memory of the copies."""
        return self._copies.num_bytes

    def keep(self, scaled: list[Tensor], *, steps: bool = True) -> None:
        """Copy all tensors that the step may change, and remember the other values."""
        parameters = parameters_of(self._optimizer)
        tensors: list[Tensor] = list(parameters)
        self._restore_state = snapshot(self._optimizer.state, tensors)
        self._options.keep(tensors)
        self._generator = torch.get_rng_state()
        gradients = [local_of(each) for each in map(total_of, parameters) if each is not None]
        if steps:
            tensors += gradients if self._changes_gradients else scaled
        self._gradients = [] if scaled else [(each, each._version) for each in gradients]
        self._copies.take(tensors)

    def after_step(self, *, has_stepped: bool) -> None:
        """Look at what the step has changed."""
        self._options.after_step()
        if self._gradients and has_stepped:
            self._changes_gradients = any(each._version != version for each, version in self._gradients)
        self._gradients = []  # hold no reference: the next step drops these gradients
        snapshot(self._optimizer.state, [])  # raises ValueError for a state that the next `keep` can't copy

    @contextmanager
    def undone(self) -> Iterator[None]:
        """See Rollback."""
        generator = torch.get_rng_state()
        self._restore_state()
        with self._options.before_step():
            self._copies.give_back()
            assert self._generator is not None  # `keep` came before
            torch.set_rng_state(self._generator)
            try:
                yield
            finally:
                torch.set_rng_state(generator)

    def tensors(self) -> list[Tensor]:
        """See Rollback."""
        return self._copies.tensors()

    def forget(self) -> None:
        """Free the copies."""
        self._copies, self._restore_state, self._gradients = Copies(), _nothing, []


class Options:
    """The options of an optimizer's groups before and after a step. Some optimizers count steps in them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._restore: list[Callable[[], Any]] = []
        self._after: list[dict[str, Any]] = []
        self._parameters: list[list[int]] = []  # for each group, the ids of its parameters

    def keep(self, tensors: list[Tensor]) -> None:
        """Remember the options. Adds the tensors among them to `tensors`, which the caller copies."""
        groups = self._optimizer.param_groups
        self._restore = [snapshot(_options(group), tensors) for group in groups]
        self._parameters = [list(map(id, group["params"])) for group in groups]

    def after_step(self) -> None:
        """Remember the options as they are after the step."""
        self._after = [_copied(group) for group in self._optimizer.param_groups]

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Within this context the options are those of `keep`.

        Afterwards the options that were changed since `after_step` (a learning rate) have their new values.
        """
        groups, added = self._optimizer.param_groups, self._take_out_added()
        later = [_changes(group, after) for group, after in zip(groups, self._after, strict=True)]
        for group, restore in zip(groups, self._restore, strict=True):
            restored = restore()
            for name in set(_options(group)) - set(restored):
                del group[name]
            group.update(restored)
        try:
            yield
        finally:
            groups.extend(added)
            for group, changes in zip(groups, later, strict=False):  # without the added groups
                for name, value in changes.items():
                    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    def _take_out_added(self) -> list[dict[str, Any]]:
        """Remove from the optimizer the groups that add_param_group has added since the step; return them."""
        groups, kept = self._optimizer.param_groups, self._parameters
        if any(list(map(id, group["params"])) != ids for group, ids in zip(groups, kept, strict=False)) or (
            len(groups) < len(kept)
        ):
            raise RuntimeError(
                "the optimizer's groups got other parameters between an update and the gate of the next "
                "step: call settle() of PostValidation before you change them, or use add_param_group"
            )
        added = groups[len(kept) :]
        del groups[len(kept) :]
        return added


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def snapshot(value: Any, tensors: list[Tensor]) -> Callable[[], Any]:
    """A function that restores a nest of dicts, lists and tuples to its present content.

    The function returns the nest. It does not restore the values of tensors: `snapshot` adds the tensors to
    `tensors`, and the caller copies them. Raises ValueError for an object of another type, whose changes
    can't be restored.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return lambda: value
    if isinstance(value, dict):
        items = {key: snapshot(each, tensors) for key, each in value.items()}
        return lambda: _refilled(value, {key: restore() for key, restore in items.items()})
    if isinstance(value, list):
        entries = [snapshot(each, tensors) for each in value]
        return lambda: _refilled(value, [restore() for restore in entries])
    if type(value) is tuple:
        parts = [snapshot(each, tensors) for each in value]
        return lambda: tuple(restore() for restore in parts)
    if isinstance(value, _CONSTANTS) or inspect.isroutine(value):
        return lambda: value
    raise ValueError(
        f"the optimizer keeps an object of type {type(value).__name__} in its state, and post-validation can "
        "copy only tensors, numbers, and dicts, lists and tuples of them: write optimizer.validation=before, "
        "or keep tensors"
    )


def refusal_of(optimizer: torch.optim.Optimizer) -> str:
    """Why a step of this optimizer can't be taken back; "" if it can.

    A twin of the optimizer makes a step on one small parameter per group, with gradients of zero. The step
    shows which states and attributes the optimizer keeps.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{name}.step needs a closure, and a pipeline has none: use another optimizer"
    try:
        snapshot(optimizer.state, [])
        for group in optimizer.param_groups:
            snapshot(_options(group), [])
    except ValueError as error:
        return f"{name}: {error}"
    twin = _twin(optimizer)
    before = dict(vars(twin))
    try:
        twin.step()
    except Exception as error:
        if _is_torchs(twin):
            return (
                f"{name} can't make a step with these options and weights ({type(error).__name__}: {error}): "
                "make it with other options, such as torch's defaults"
            )
        return ""  # the optimizer needs more than this; `after_step` looks at the state after each real step
    try:
        snapshot(twin.state, [])
    except ValueError as error:
        return f"{name}: {error}"
    changed = [
        key for key, value in vars(twin).items() if value is not before.get(key) and key not in _CHECKED_ONCE
    ]
    if changed:
        return (
            f"{name} changes its attributes {', '.join(changed)} in step, which post-validation can't take "
            "back: write optimizer.validation=before, or keep them in optimizer.state"
        )
    return ""


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's own and takes gradients of zeros, which SparseAdam does not."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return type(optimizer).__module__.startswith("torch.optim.") and not is_sparse


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the same options over one small parameter per group, without hooks and states."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # the wrapper of a learning-rate scheduler, bound to the optimizer itself
    vars(twin).pop("_optimizer_step_pre_hooks", None)
    vars(twin).pop("_optimizer_step_post_hooks", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**_copied(group), "params": _small(group["params"])} for group in optimizer.param_groups
    ]
    return twin


def _small(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """For each dtype and device a parameter like the smallest trainable one, with a gradient of zeros."""
    likes: dict[Any, Tensor] = {}
    for each in sorted(parameters, key=lambda each: -each.numel()):
        if each.requires_grad:  # a frozen one may be of integers; an optimizer leaves it alone
            likes[each.dtype, each.device] = local_of(each.detach())
    made = [nn.Parameter(torch.zeros_like(like)) for like in likes.values()]
    for each in made:
        each.grad = torch.zeros_like(each)
    return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group; tensors among them are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in _options(group).items()
    }


def _changes(group: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that differ from `after`."""
    return {name: value for name, value in _copied(group).items() if _differ(value, after.get(name))}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return one is not other and bool(one != other)


def _refilled(container: Any, content: Any) -> Any:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)
    return container


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _nothing() -> None:
    pass
