"""All that compiled stages need of Inductor: a graph made callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule

from zbpp.autograd.compiled.adding import ADD_PRODUCT, ADD_ROWS
from zbpp.autograd.compiled.dynamo import CaptureError
from zbpp.autograd.compiled.fx_graphs import is_random

Backend = Literal["inductor", "eager"]
Boxed = Callable[[list[Any]], Any]
"""A compiled graph. It empties the list of its inputs, and frees each input after its last use."""

aten = torch.ops.aten


def build(graph: GraphModule, backend: Backend, *, trusted: bool = False) -> Boxed:
    """A callable for the graph. Its outputs have the strides that they had when the graph was traced.

    trusted: the compiled code does not check the strides of its inputs at each call. Raises CaptureError.
    """
    if backend == "eager":
        return lambda values: graph(*_emptied(values))
    try:
        return _compile(graph, trusted)
    except Exception as error:  # a compiler may raise anything
        raise CaptureError(first_line(error)) from error


def _compile(graph: GraphModule, trusted: bool) -> Boxed:
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    _teach_inductor()
    examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    with settings(), config.patch(size_asserts=not trusted), V.set_fake_mode(detect_fake_mode(examples)):
        compiled: Any = compile_fx_inner(graph, examples)
    call: Boxed = getattr(compiled, "current_callable", None) or compiled
    return call


def _emptied(values: list[Any]) -> list[Any]:
    taken = values[:]
    values.clear()
    return taken


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings: parts of torch warn about other parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def settings() -> Iterator[None]:
    """Inductor's settings: random numbers are drawn by the same calls in the same order as in eager code."""
    with quiet():
        from torch._inductor import config

        with config.patch({"fallback_random": True, **_random_in_order()}):
            yield


def decompositions() -> dict[Any, Any]:
    """Decompositions of the operations that Inductor has no code for."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    # As a scatter, this operation would sum in no fixed order.
    table.pop(aten.embedding_dense_backward.default, None)
    return table


def simplified(graph: GraphModule) -> GraphModule:
    """The joint graph after Inductor's passes over it."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    return joint_graph_passes(graph)


def _random_in_order() -> dict[str, Any]:
    """Settings for versions of Inductor that don't keep the order in which random numbers are drawn."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    if hasattr(post_grad, "_chain_random_ops_for_ordering") or config.post_grad_custom_post_pass:
        return {}
    return {"post_grad_custom_post_pass": _chain_random}


def _chain_random(graph: Graph) -> None:
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    drawing = [node for node in graph.nodes if is_random(node)]
    preserve_node_ordering(graph, {later: OrderedSet([first]) for first, later in pairwise(drawing)})


def _teach_inductor() -> None:
    """Make Inductor call the operations that add in place, and the one that `decompositions` leaves whole."""
    from torch._inductor.lowering import fallback_handler, lowerings

    for operation in (aten.addmm_.default, aten.baddbmm_.default, ADD_PRODUCT, ADD_ROWS):
        lowerings.setdefault(operation, partial(_call_in_place, operation))
    kept = aten.embedding_dense_backward.default
    lowerings.setdefault(kept, fallback_handler(kept, add_to_fallback_set=False))


def _call_in_place(operation: Any, *args: Any) -> Any:
    """Inductor's node for an operation that changes its first argument."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    result = FallbackKernel.create(operation, *args)
    if operation.namespace == "aten":
        kernel = next(each for each in reversed(V.graph.operations) if isinstance(each, FallbackKernel))
        # Calling the tensor's method takes a quarter of the time of a call through torch.ops.
        kernel.python_kernel_name = f"torch.Tensor.{operation.overloadpacket.__name__}"
    return result


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")
