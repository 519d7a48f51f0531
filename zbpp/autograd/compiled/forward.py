"""`compile_stage`: a module whose F, B and W run compiled, and what becomes of what can't be compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbpp.autograd.compiled.inductor import (
    Backend,
    CaptureError,
    capture,
    check_compiler,
    check_torch,
    has_compiled,
)
from zbpp.autograd.compiled.planning import program_of
from zbpp.autograd.compiled.program import Program, run
from zbpp.autograd.compiled.sharing import (
    plain_attributes,
    plain_values,
    signature,
    structure_of,
    text_of,
)
from zbpp.autograd.explain import NOT_COMPILED

_log = logging.getLogger(__name__)

Programs = dict[Hashable, Program]


def compile_stage(
    module: nn.Module,
    *,
    whole: bool = True,
    backend: Backend = "inductor",
    budget: float = 1.0,
    name: str = "stage",
    programs: Programs | None = None,
    say: Callable[[str], None] = _log.info,
) -> None:
    """From now on the module's forward, and both halves of its split backward, run compiled.

    whole: as one; else each of its layers by itself, those with the same graphs compiled once. backend:
    "eager" runs the three graphs as they are. budget: how much of what F would keep for B it may keep,
    from 1 down to 0; the rest is computed again in B. programs: those made so far, to be shared. say: is
    told what is being compiled.

    Compilation happens in the first F, and again for inputs of another shape, or where a number or string
    in a module's attributes has changed; without gradients (evaluation) the module runs as it is. Results
    are those of the eager split to rounding, random numbers are drawn as there. What can't be compiled stays
    eager: of a stage the layers are tried, one by one, and each that fails is named in one line of the log,
    with the reason, which `explain` shows, too. What torch.compile was asked to compile is left to it.
    A plain backward() works, but as with `zbpp.checkpoint` torch.autograd.grad finds no parameters.
    Raises ValueError for a budget out of range, RuntimeError without a suitable torch or C++ compiler.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget={budget} is a share of the memory that F keeps: write 0 to 1")
    check_torch()
    if backend == "inductor" and any(each.device.type == "cpu" for each in module.parameters()):
        check_compiler()
    make = _Maker(backend, budget, {} if programs is None else programs, say)
    if whole or has_compiled(module):
        _compile(module, name, make)
    else:
        _compile_layers(module, f"{name} ", make)


def _compile(module: nn.Module, name: str, make: _Maker) -> None:
    if has_compiled(module):
        _leave(module.parameters(), name, "it stays eager", "torch.compile has it already")
    else:
        module.forward = _Forward(module, name, make)


def _compile_layers(module: nn.Module, prefix: str, make: _Maker) -> None:
    for name, layer in _layers(module):
        if not isinstance(layer.forward, _Forward):
            _compile(layer, prefix + name, make)


def _leave(parameters: Iterable[nn.Parameter], name: str, what: str, reason: str) -> None:
    """Say, in the log and for `explain`, why these stay eager."""
    _log.warning("%s is not compiled, %s: %s", name, what, reason)
    for parameter in parameters:
        setattr(parameter, NOT_COMPILED, reason)


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children that consist of several modules themselves: compiling a single one gains nothing."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", layer) for inner, layer in _layers(child))
        elif any(True for _ in child.children()):
            yield name, child


class _Maker(NamedTuple):
    """Makes programs, and keeps them by the structure of their modules and by their graphs."""

    backend: Backend
    budget: float
    programs: Programs
    say: Callable[[str], None]

    def make(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Hashable
    ) -> Program:
        """call: what else the graphs depend on."""
        key = self.backend, self.budget, structure_of(module), call
        if key not in self.programs:
            self.programs[key] = self._compile(name, module, args, kwargs)
        return self.programs[key]

    def _compile(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program:
        start = time.perf_counter()
        self.say(f"{name}: compiling")
        joint = capture(module, args, kwargs, self.budget)
        key = self.backend, text_of(joint)
        if key not in self.programs:
            self.programs[key] = program_of(joint, self.backend)
        self.say(f"{name}: compiled in {time.perf_counter() - start:.1f} s")
        return self.programs[key]


class _Bound(NamedTuple):
    """A program, and where a module keeps the tensors that it needs."""

    program: Program
    slots: list[tuple[dict[str, Any], str]]


class _Forward:
    """Takes the place of a module's forward."""

    def __init__(self, module: nn.Module, name: str, maker: _Maker) -> None:
        self.module, self.name, self.maker = module, name, maker
        self.before = module.__dict__.get("forward")
        self.eager: Callable[..., Any] = module.forward
        self.modules = list(module.modules())
        self.parameters = [(each._parameters, name) for each in self.modules for name in each._parameters]
        self.constants = plain_attributes(self.modules)
        self.values = plain_values(self.constants)
        self.bound: dict[Any, _Bound | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        key = self._key(leaves, spec)
        self._forget_if_changed()
        if key not in self.bound:
            self.bound[key] = self._bind(args, kwargs, key)
        bound = self.bound[key]
        if bound is None:
            return self.eager(*args, **kwargs)
        outputs = run(bound.program, [place[name] for place, name in bound.slots], leaves)
        return tree_unflatten(outputs, bound.program.structure)

    def _key(self, leaves: list[Any], spec: Any) -> Hashable:
        return (
            tuple(map(signature, leaves)),
            spec,
            tuple([module.training for module in self.modules]),
            tuple([(p.requires_grad, p.dtype) for d, n in self.parameters if (p := d[n]) is not None]),
            tuple(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
            ),
        )

    def _forget_if_changed(self) -> None:
        """Programs have the modules' numbers in them: a dropout's p, say."""
        values = plain_values(self.constants)
        if values != self.values:
            self.values = values
            self.bound = {key: bound for key, bound in self.bound.items() if bound is None}

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> _Bound | None:
        try:
            with self._as_before():
                _refuse_hooks(self.module)
                program = self.maker.make(self.name, self.module, args, kwargs, key)
        except CaptureError as error:
            self._retreat(str(error))
            return None
        return _Bound(program, [_slot(self.module, name) for name in program.tensors])

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Its own forward in its place."""
        now = vars(self.module).pop("forward")  # this, or what has been put around it
        if self.before is not None:
            self.module.forward = self.before
        try:
            yield
        finally:
            self.module.forward = now

    def _retreat(self, reason: str) -> None:
        """Eager from now on, but for its layers."""
        layers = [layer for _, layer in _layers(self.module) if not isinstance(layer.forward, _Forward)]
        what = "its layers are, each by itself" if layers else "it stays eager"
        others = {id(parameter) for layer in layers for parameter in layer.parameters()}
        own = [parameter for parameter in self.module.parameters() if id(parameter) not in others]
        _leave(own, self.name, what, reason)
        _compile_layers(self.module, f"{self.name} ", self.maker)


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a parameter or buffer: the tensor in it may be replaced."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf


def _refuse_hooks(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks:
            raise CaptureError(f"hooks on {name or 'the module itself'}, which would run at compilation only")
