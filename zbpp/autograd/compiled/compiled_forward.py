"""`compile_stage`: make F, B and W of a module run compiled, and fall back to eager where that fails."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zbpp.autograd.compiled.aot_autograd import capture, fake_outputs
from zbpp.autograd.compiled.build_split import build_split
from zbpp.autograd.compiled.compiled_split import CompiledSplit, run
from zbpp.autograd.compiled.dynamo import CaptureError, ForwardFunction, Guards, has_compiled
from zbpp.autograd.compiled.inductor import Backend
from zbpp.autograd.explain import NOT_COMPILED
from zbpp.autograd.leaf_grad import sum_dtype
from zbpp.autograd.models.past import SequenceSlice

_log = logging.getLogger(__name__)

_MOST_VERSIONS = 8  # of calls with equal arguments

# The dispatch modes of torch.utils.checkpoint with a policy: one in its forward, one in its recompute.
_SELECTIVE_MODES = tuple(map(type, create_selective_checkpoint_contexts([])))


class GuardedSplit(NamedTuple):
    """A CompiledSplit, and guards that say which calls it fits."""

    guards: Guards
    split: CompiledSplit


SplitCache = dict[Hashable, list[GuardedSplit]]
"""What was compiled so far, by the structure of a module and its arguments.

So layers that repeat are compiled once, if Dynamo's guards of one layer pass for the other: then the other is
not even traced. Kernels that come again in other graphs are in Inductor's own cache.
"""


def signature(value: Any) -> Hashable:
    """The properties of an argument that its graphs depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def structure_of(module: nn.Module) -> Hashable:
    """Names, shapes, types and ties of a module's parameters and buffers, and the types of gradients."""
    places: dict[int, int] = {}  # tied tensors share one place
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return tuple(
        (name, places.setdefault(id(each), len(places)), signature(each), sum_dtype(each))
        for name, each in tensors
    )


def compile_stage(
    module: nn.Module,
    *,
    whole: bool = True,
    backend: Backend = "inductor",
    budget: float = 1.0,
    name: str = "stage",
    cache: SplitCache | None = None,
    say: Callable[[str], None] = _log.info,
) -> None:
    """Make the module's forward, and both halves of its split backward, run compiled from now on.

    whole: compile the module as one; if false, compile each of its layers by itself, and equal layers once.
    backend: "eager" runs the three graphs without compiling them. budget: the share of the memory between F
    and B that may be used, from 1 (B repeats only cheap operations) to 0 (F keeps only inputs). cache: what
    was compiled so far, to be shared between stages. say: is called with a text when something is being
    compiled.

    Compilation happens in the first F. It happens again for inputs of another shape, and when something has
    changed that the Python code depends on: an attribute, a submodule, a hook, a global, autocast (each F
    asks Dynamo's guards). Without gradients (evaluation) the module runs eager. Results equal those of the
    eager split to rounding, and the same random numbers are drawn.

    A module that can't be compiled stays eager; then its layers are tried one by one. The log has one line
    with the reason for each module that stays eager, and `explain` shows the reason, too. A module that
    torch.compile was asked to compile is left to torch.compile.

    A plain backward() works; torch.autograd.grad finds no parameters, as with `zbpp.checkpoint`.
    Raises ValueError for a budget out of range.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget={budget} is a share of the memory that F keeps: write 0 to 1")
    compiler = _Compiler(backend, budget, {} if cache is None else cache, say)
    if whole or has_compiled(module):
        _replace_forward(module, name, compiler)
    else:
        _replace_forward_of_layers(module, f"{name} ", compiler)


def _replace_forward(module: nn.Module, name: str, compiler: _Compiler) -> None:
    if has_compiled(module):
        _report_eager(module.parameters(), name, "it stays eager", "torch.compile has it already")
    else:
        module.forward = CompiledForward(module, name, compiler)


def _replace_forward_of_layers(module: nn.Module, prefix: str, compiler: _Compiler) -> None:
    for name, layer in _layers(module):
        if not isinstance(layer.forward, CompiledForward):
            _replace_forward(layer, prefix + name, compiler)


def _report_eager(parameters: Iterable[nn.Parameter], name: str, what: str, reason: str) -> None:
    """Say in the log why a module stays eager, and leave the reason at its parameters for `explain`."""
    _log.warning("%s is not compiled, %s: %s", name, what, reason)
    for parameter in parameters:
        setattr(parameter, NOT_COMPILED, reason)


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children that consist of several modules: compiling a single operation gains nothing."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", layer) for inner, layer in _layers(child))
        elif any(True for _ in child.children()):
            yield name, child


class _Compiler(NamedTuple):
    """Compiles modules, unless the cache has a CompiledSplit that fits."""

    backend: Backend
    budget: float
    cache: SplitCache
    say: Callable[[str], None]

    def split_for(
        self,
        name: str,
        module: nn.Module,
        forward: ForwardFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> GuardedSplit:
        """The CompiledSplit of forward(*args, **kwargs)."""
        leaves, spec = tree_flatten((args, kwargs))
        key = self.backend, self.budget, forward.code, structure_of(module), spec, *map(signature, leaves)
        known = self.cache.setdefault(key, [])
        variables = forward.variables(args, kwargs) if known else {}
        for each in known:
            if each.guards.fit(variables):
                return each
        start = time.perf_counter()
        self.say(f"{name}: compiling")
        graphs, guards = capture(module, forward, args, kwargs, self.budget)
        dtypes = {name: sum_dtype(each) for name, each in module.named_parameters()}
        known.append(GuardedSplit(guards, build_split(graphs, self.backend, dtypes)))
        self.say(f"{name}: compiled in {time.perf_counter() - start:.1f} s")
        return known[-1]


class _Bound(NamedTuple):
    """A CompiledSplit with its guards, and the function that finds the split's tensors in a module."""

    guards: Guards
    split: CompiledSplit
    tensors_of: Callable[[nn.Module], tuple[Tensor, ...]]


class CompiledForward:
    """Takes the place of a module's forward."""

    compiles = True  # read by the pipeline: ranks wait longer for a step that may compile

    def __init__(self, module: nn.Module, name: str, compiler: _Compiler) -> None:
        self.module, self.name, self.compiler = module, name, compiler
        self.before = module.__dict__.get("forward")
        self.function: ForwardFunction | None = None
        # A key: structure and signatures of the arguments. A value of None: such calls run eager.
        self.bound: dict[Hashable, list[_Bound] | None] = {}
        self._is_paused = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_paused or not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        is_slice = any(isinstance(each, SequenceSlice) for each in leaves)
        key = SequenceSlice if is_slice else (spec, *map(signature, leaves))  # all slices stay eager
        bound = self._bound(key, args, kwargs)
        if bound is None:
            return self.eager(*args, **kwargs)
        outputs = run(bound.split, bound.tensors_of(self.module), leaves)
        return tree_unflatten(outputs, bound.split.f.structure)

    def outputs(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The outputs of a call, flat, as fake tensors: Dynamo reads the code, and nothing runs.

        Takes seconds, and a small part of the time of compiling. Raises CaptureError.
        """
        with self._own_forward():
            return fake_outputs(self.module, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a call with such arguments needs, without running it: no number in them is read."""
        leaves, spec = tree_flatten((args, kwargs))
        self._bound((spec, *map(signature, leaves)), args, kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the module runs eager, with any hooks; afterwards it runs compiled again."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        """Copy the module, too, and share the cache: the copy's first call finds its CompiledSplit there."""
        other = copy.copy(self)
        other.module, other.before = copy.deepcopy((self.module, self.before), memo)
        other.bound = {}
        return other

    def _bound(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound | None:
        """The latest CompiledSplit whose guards pass, compiled now if there is none; None to run eager."""
        known = self.bound.setdefault(key, [])
        if known is None:
            return None
        try:
            _refuse_selective_checkpoint()
            if key is SequenceSlice:
                raise CaptureError("its attention reads what earlier slices of the sequence have written")
            if known and self.function is not None:
                variables = self.function.variables(args, kwargs)
                for bound in reversed(known):
                    if bound.guards.fit(variables):
                        return bound
            if len(known) == _MOST_VERSIONS:
                raise CaptureError(
                    f"what its Python code reads has changed {_MOST_VERSIONS} times, and each time it was "
                    "compiled anew: keep a number that changes in a tensor (register_buffer, and fill_ it "
                    "between steps)"
                )
            known.append(self._bind(args, kwargs))
        except CaptureError as error:
            self.bound[key] = None
            self._fall_back_to_eager(str(error))
            return None
        return known[-1]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        with self._own_forward():
            _refuse_hooks(self.module)
            self.function = ForwardFunction(self.module)
            guards, split = self.compiler.split_for(self.name, self.module, self.function, args, kwargs)
        return _Bound(guards, split, _getter(self.module, split.tensors))

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """Inside, the module has its own forward again."""
        now = vars(self.module).pop("forward")  # this object, or a wrapper that was put around it since
        if self.before is not None:
            self.module.forward = self.before
        try:
            yield
        finally:
            self.module.forward = now

    def _fall_back_to_eager(self, reason: str) -> None:
        """Run eager from now on, and try to compile the layers instead."""
        layers = [
            layer for _, layer in _layers(self.module) if not isinstance(layer.forward, CompiledForward)
        ]
        what = "its layers are, each by itself" if layers else "it stays eager"
        others = {id(parameter) for layer in layers for parameter in layer.parameters()}
        own = [parameter for parameter in self.module.parameters() if id(parameter) not in others]
        _report_eager(own, self.name, what, reason)
        _replace_forward_of_layers(self.module, f"{self.name} ", self.compiler)


def _getter(module: nn.Module, names: Iterable[str]) -> Callable[[nn.Module], tuple[Tensor, ...]]:
    """A function that finds the named tensors in a module.

    It looks them up in the modules' dictionaries at each call, since modules and tensors may be replaced.
    """

    def place(name: str) -> str:
        *path, leaf = name.split(".")
        owner = module.get_submodule(".".join(path))
        kind = "_parameters" if leaf in owner._parameters else "_buffers"
        return "".join(["m", *(f"._modules[{each!r}]" for each in path), f".{kind}[{leaf!r}]"])

    # The lookups become one expression: a loop over attributes would take ten times as long at each call.
    find: Callable[[nn.Module], tuple[Tensor, ...]] = eval(
        f"lambda m: ({''.join(f'{place(name)}, ' for name in names)})"
    )
    return find


def _refuse_selective_checkpoint() -> None:
    """Raise CaptureError inside a selective checkpoint.

    It keeps the results of operations for its recompute. Of a module that is being captured it would keep
    fake tensors, and of compiled code it would skip operations that write into memory they are given.
    """
    if any(isinstance(mode, _SELECTIVE_MODES) for mode in _get_current_dispatch_mode_stack()):
        raise CaptureError(
            "torch.utils.checkpoint calls it with context_fn, which must see each operation: leave out "
            "context_fn, or compile=stage"
        )


def _refuse_hooks(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks:
            raise CaptureError(f"hooks on {name or 'the module itself'}, which would run at compilation only")
