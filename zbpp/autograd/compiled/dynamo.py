"""All that compiled stages need of Dynamo: a module's forward as a graph, and the guards of that graph.

Dynamo reads the Python code of one call. Its guards check all that the code depended on: types, attributes,
hooks, globals, closures, shapes, autocast. While the guards pass, Dynamo would read another call as the same
graph.
"""

from __future__ import annotations

import builtins
import inspect
import re
import warnings
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from zbpp.seeding import restored_python_generators

Returned = TypeVar("Returned")

# Hugging Face's models set and reset this global in each forward.
_COLLECTOR = "G['__import_transformers_dot_utils_dot_output_capturing']._active_collector"


class CaptureError(RuntimeError):
    """Why a module can't be compiled, in one line."""


class Reading(NamedTuple):
    """Dynamo's result for one call."""

    graph: GraphModule
    guards: Guards


class ForwardFunction:
    """A module's forward, and the local variables that a call of it begins with, under Dynamo's names."""

    def __init__(self, module: nn.Module) -> None:
        from torch._dynamo.convert_frame import get_traced_fn

        try:
            self.function, self.owner = get_traced_fn(module.forward)
        except RuntimeError as error:
            raise CaptureError(str(error)) from None
        self.signature = inspect.signature(self.function, follow_wrapped=False)

    @property
    def code(self) -> CodeType:
        return self.function.__code__

    def variables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = args if self.owner is None else (self.owner, *args)
        bound = self.signature.bind(*given, **kwargs)
        bound.apply_defaults()
        found = bound.arguments
        for name, cell in zip(self.code.co_freevars, self.function.__closure__ or (), strict=True):
            found[name] = cell.cell_contents
        return found


class Guards:
    """Check whether a graph fits a call of the module that was read, or of a module with the same code."""

    def __init__(self, graph: GraphModule, module: nn.Module, code: CodeType) -> None:
        from torch._dynamo.utils import dynamo_timed, get_metrics_context

        with get_metrics_context(), dynamo_timed("build_guards"):
            self._built = _output(graph).build_guards(code)
        # Dynamo's guards don't notice if the forward of a class is replaced.
        kinds: set[Any] = set(map(type, module.modules()))
        self._forwards = [(kind, kind.forward) for kind in kinds]

    def fit(self, variables: dict[str, Any]) -> bool:
        if any(kind.forward is not forward for kind, forward in self._forwards):
            return False
        # The manager is read at each call: Dynamo replaces it when an object that it watches is gone.
        return bool(self._built.guard_manager.check(variables))


def has_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked to compile this module."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def read(
    module: nn.Module, forward: ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Reading:
    """Let Dynamo read the Python code of module.forward(*args, **kwargs).

    Raises CaptureError for code that a graph can't express, and Dynamo's own errors for code it can't read.
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    # Reading the code must not draw random numbers.
    with _settings(), restored_python_generators(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        graph = dynamo_graph_capture_for_export(module.forward)(*args, **kwargs)
        _add_builtins(graph)
        guards = Guards(graph, module, forward.code)
    _refuse_changes(forward, warned)
    _refuse_foreign_random(graph)
    return Reading(graph, guards)


def outputs_of(graph: GraphModule) -> list[Any]:
    """The outputs of a graph that Dynamo read: fake tensors, and other values as they are."""
    (results,) = graph.graph.output_node().args
    return [each.meta["example_value"] if isinstance(each, Node) else each for each in tree_leaves(results)]


@contextmanager
def _settings() -> Iterator[None]:
    """Dynamo's settings: numbers, sizes and hooks are constants with guards."""
    wanted = {
        "specialize_int": True,
        "specialize_float": True,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "skip_nnmodule_hook_guards": False,
        # This faster way of checking guards misses a change of a tensor's requires_grad.
        "use_recursive_dict_tags_for_guards": False,
    }
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(known):
        yield


def _output(graph: GraphModule) -> Any:
    return graph._dynamo_bytecode_flatten.out.graph_capture_output  # type: ignore[union-attr]


def _add_builtins(graph: GraphModule) -> None:
    """Add builtins to the globals of the code around the graph: torch 2.11 looks for them there."""
    for each in (graph._dynamo_bytecode_flatten, graph._dynamo_bytecode_unflatten):
        each.f_globals = vars(builtins) | each.f_globals  # type: ignore[operator, union-attr]


def _refuse_changes(forward: ForwardFunction, warned: list[warnings.WarningMessage]) -> None:
    """Raise CaptureError if Dynamo warned that forward changes Python objects: the graph would not."""
    harmless = _COLLECTOR, f"L['{inspect.getargs(forward.code).varkw}']"  # a new dictionary at each call
    for each in warned:
        _, _, listed = str(each.message).partition("potential sources you can double check: ")
        changed = [name for name in (literal_eval(listed) if listed else ()) if name not in harmless]
        if changed:
            raise CaptureError(
                "forward sets attributes or changes objects, which a graph can't: of "
                f"{', '.join(map(_readable, changed))} "
                "(tensors may be changed in place: write add_(1), not += 1)"
            )


def _readable(source: str) -> str:
    """Dynamo's name of a value as Python writes it."""
    source = re.sub(r"^[LG]\['(\w+)'\]", r"\1", source)
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", source)


def _refuse_foreign_random(graph: GraphModule) -> None:
    """Raise CaptureError for random numbers of Python or numpy.

    A graph would draw Python's numbers only once, and numpy's from torch's generator.
    """
    is_python = any("gen_rand_values" in name for name in _output(graph).bytecode.co_names)
    if is_python or any(map(_is_numpy_random, graph.graph.nodes)):
        whose = "Python" if is_python else "numpy"
        raise CaptureError(f"forward draws random numbers of {whose}, which a graph can't: use torch.rand")


def _is_numpy_random(node: Node) -> bool:
    function = getattr(node.target, "f", None)  # Dynamo wraps torch's version of a numpy function
    return getattr(function, "__module__", None) == "torch._numpy.random"


def break_graph() -> None:
    """Called in code that is being traced: the code from here on runs as Python."""
    torch._dynamo.graph_break()


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch's
def run_eager(function: Callable[..., Returned], *args: Any) -> Returned:
    """Called in code that is being traced: `function` runs as Python, and so does all that it calls."""
    return function(*args)
