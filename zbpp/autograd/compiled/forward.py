"""`compile_stage`: a module whose F, B and W run compiled, and what becomes of what can't be compiled."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbpp.autograd.compiled import dynamo, inductor, joint
from zbpp.autograd.compiled.dynamo import Call, CaptureError, Guards, has_compiled
from zbpp.autograd.compiled.inductor import Backend, check_compiler, quiet
from zbpp.autograd.compiled.joint import capture
from zbpp.autograd.compiled.planning import program_of
from zbpp.autograd.compiled.program import Program, run
from zbpp.autograd.compiled.sharing import signature, structure_of, text_of
from zbpp.autograd.explain import NOT_COMPILED

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """A program, and for which calls it holds."""

    guards: Guards
    program: Program


Programs = dict[Hashable, list[Known]]  # by the structure of modules, and by the text of graphs


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

    Compilation happens in the first F, and again for inputs of another shape, or where something has changed
    that the Python code depends on: an attribute, a submodule, a hook, a global, autocast (Dynamo's guards
    are asked at each F). Without gradients (evaluation) the module runs as it is. Results are those of the
    eager split to rounding, random numbers are drawn as there. What can't be compiled stays eager: of a stage
    the layers are tried, one by one, and each that fails is named in one line of the log, with the reason,
    which `explain` shows, too. What torch.compile was asked to compile is left to it.
    A plain backward() works, but as with `zbpp.checkpoint` torch.autograd.grad finds no parameters.
    Raises ValueError for a budget out of range, RuntimeError without a suitable torch or C++ compiler.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget={budget} is a share of the memory that F keeps: write 0 to 1")
    _check_torch()
    if backend == "inductor" and any(each.device.type == "cpu" for each in module.parameters()):
        check_compiler()
    make = _Maker(backend, budget, {} if programs is None else programs, say)
    if whole or has_compiled(module):
        _compile(module, name, make)
    else:
        _compile_layers(module, f"{name} ", make)


def _check_torch() -> None:
    for module, name in (dynamo.NEEDED, joint.NEEDED, inductor.NEEDED):
        try:
            with quiet():
                getattr(import_module(module), name)
        except (ImportError, AttributeError):
            raise RuntimeError(
                f"compiled stages need torch's {name}, which torch {torch.__version__} does not have: "
                "install another (2.11 to 2.15 have it), or write compile=none"
            ) from None


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
        self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Known:
        leaves, spec = tree_flatten((args, kwargs))
        key = self.backend, self.budget, call.code, structure_of(module), spec, *map(signature, leaves)
        known = self.programs.setdefault(key, [])
        variables = call.variables(args, kwargs) if known else {}
        for each in known:
            if each.guards.hold(variables):
                return each
        known.append(self._compile(name, module, call, args, kwargs))
        return known[-1]

    def _compile(
        self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Known:
        start = time.perf_counter()
        self.say(f"{name}: compiling")
        graphs, guards = capture(module, call, args, kwargs, self.budget)
        key = self.backend, text_of(graphs)
        if key not in self.programs:
            self.programs[key] = [Known(guards, program_of(graphs, self.backend))]
        self.say(f"{name}: compiled in {time.perf_counter() - start:.1f} s")
        return Known(guards, self.programs[key][0].program)


class _Bound(NamedTuple):
    """A program, when it holds, and what finds the tensors that it needs in a module."""

    guards: Guards
    program: Program
    tensors_of: Callable[[nn.Module], tuple[Tensor, ...]]


class _Forward:
    """Takes the place of a module's forward."""

    def __init__(self, module: nn.Module, name: str, maker: _Maker) -> None:
        self.module, self.name, self.maker = module, name, maker
        self.before = module.__dict__.get("forward")
        self.call: Call | None = None
        self.bound: dict[Hashable, list[_Bound] | None] = {}  # None: eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        bound = self._bound((spec, *map(signature, leaves)), args, kwargs)
        if bound is None:
            return self.eager(*args, **kwargs)
        outputs = run(bound.program, bound.tensors_of(self.module), leaves)
        return tree_unflatten(outputs, bound.program.structure)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        """Copy the module, too, and share the programs: the copy is bound to them at its first call."""
        other = copy.copy(self)
        other.module, other.before = copy.deepcopy((self.module, self.before), memo)
        other.bound = {}
        return other

    def _bound(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound | None:
        """The latest that holds; what the module depends on may have changed since."""
        known = self.bound.setdefault(key, [])
        if known is None:
            return None
        if known and self.call is not None:
            variables = self.call.variables(args, kwargs)
            for bound in reversed(known):
                if bound.guards.hold(variables):
                    return bound
        try:
            known.append(self._bind(args, kwargs))
        except CaptureError as error:
            self.bound[key] = None
            self._retreat(str(error))
            return None
        return known[-1]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        with self._as_before():
            _refuse_hooks(self.module)
            self.call = Call(self.module)
            guards, program = self.maker.make(self.name, self.module, self.call, args, kwargs)
        return _Bound(guards, program, _getter(self.module, program.tensors))

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


def _getter(module: nn.Module, names: Iterable[str]) -> Callable[[nn.Module], tuple[Tensor, ...]]:
    """A function that finds them in the dictionaries of modules: each module, each tensor may be replaced."""

    def place(name: str) -> str:
        *path, leaf = name.split(".")
        owner = module.get_submodule(".".join(path))
        kind = "_parameters" if leaf in owner._parameters else "_buffers"
        return "".join(["m", *(f"._modules[{each!r}]" for each in path), f".{kind}[{leaf!r}]"])

    # One expression: a loop over attributes takes ten times as long, at each call.
    find: Callable[[nn.Module], tuple[Tensor, ...]] = eval(
        f"lambda m: ({''.join(f'{place(name)}, ' for name in names)})"
    )
    return find


def _refuse_hooks(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks:
            raise CaptureError(f"hooks on {name or 'the module itself'}, which would run at compilation only")
