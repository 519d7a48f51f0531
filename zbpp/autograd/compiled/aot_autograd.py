"""All that compiled stages need of AOTAutograd: the forward and the backward of a call in aten's operations.

`capture` lets Dynamo read the Python code, AOTAutograd trace the joint graph of forward and backward, and
torch's min-cut partitioner choose the values that F keeps until B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from zbpp.autograd.compiled.dynamo import CaptureError, ForwardFunction, Guards, outputs_of, read
from zbpp.autograd.compiled.fx_graphs import extract, is_random, placeholders
from zbpp.autograd.compiled.inductor import decompositions, first_line, settings, simplified
from zbpp.autograd.models.auxiliary import auxiliary_loss

Source = str | int  # a module's parameter or buffer by name, or the position of an argument


class Joint(NamedTuple):
    """The forward and the backward of one call, in aten's operations.

    forward: sources -> (new values of `mutated`, outputs, the values that backward needs).
    backward: (the values it needs, under the names of forward's nodes; a gradient for each of `tangents`) ->
    a gradient or None for each of `sources`.
    """

    forward: GraphModule
    backward: GraphModule
    sources: list[Source]
    mutated: list[str]
    num_outputs: int
    tangents: list[int]  # positions of the outputs that have gradients
    structure: TreeSpec  # of the outputs


def capture(
    module: nn.Module, forward: ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any], budget: float
) -> tuple[Joint, Guards]:
    """The graphs of forward(*args, **kwargs), and guards that say which other calls they fit.

    Random operations stay in the graphs and draw from torch's generator. budget: the share of the memory
    between F and B that may be used, from 1 (B repeats only cheap operations) to 0 (F keeps only inputs).
    Raises CaptureError.
    """
    with settings(), _kept_for_backward(budget), ExitStack() as stack, _reasons():
        reading = read(module, forward, args, kwargs)
        return _trace(stack, module, reading.graph, args, kwargs), reading.guards


def fake_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The outputs of module(*args, **kwargs), flat, as fake tensors. Raises CaptureError."""
    with settings(), _reasons():
        return outputs_of(read(module, ForwardFunction(module), args, kwargs).graph)


@contextmanager
def _reasons() -> Iterator[None]:
    """Turn every error into a CaptureError: Dynamo, the module's code and the tracers may raise anything."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = _auxiliary_loss(error) or first_line(error)
        raise CaptureError(reason) from error


@contextmanager
def _kept_for_backward(budget: float) -> Iterator[None]:
    import torch._functorch.config as partitioner

    # With a budget of 0 the partitioner would even draw random numbers again.
    with partitioner.patch(activation_memory_budget=max(budget, 1e-9)):
        yield


class _Fresh(nn.Module):
    """Wraps a module. An output that is a view, an input or the same as another output is copied.

    Such an output would get no gradient.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (*tree_leaves((args, kwargs)), *self.parameters(), *self.buffers())
        seen = {StorageWeakRef(each.untyped_storage()) for each in given if isinstance(each, Tensor)}

        def fresh(tensor: Tensor) -> Tensor:
            storage = StorageWeakRef(tensor.untyped_storage())
            is_alias = tensor._is_view() or storage in seen
            seen.add(storage)
            return tensor.clone() if is_alias else tensor

        return tree_map_only(Tensor, fresh, self.inner(*args, **kwargs))


def _trace(
    stack: ExitStack, module: nn.Module, read: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Joint:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    traced = _Fresh(read)
    with _restored_tensors(module):
        joint = aot_export_joint_with_descriptors(
            stack, traced, args, kwargs, decompositions=decompositions()
        )
    graph = joint.graph_module
    inputs = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]
    results = graph.graph.output_node().meta["desc"]
    _refuse_sparse(graph)
    names = _names(module, traced)
    sources = [_source(each, names) for each in inputs if not each.is_tangent()]
    num_gradients = sum(each is None or each.is_grad() for each in results)
    forward, backward = _partition(graph, inputs, len(results) - num_gradients)
    mutated, num_outputs = _mutated(results, names)
    return Joint(
        forward,
        backward,
        sources,
        mutated,
        num_outputs,
        [_output_of(each.output) for each in inputs if each.is_tangent()],
        joint.out_spec,
    )


@contextmanager
def _restored_tensors(module: nn.Module) -> Iterator[None]:
    """Give the module its parameters and buffers back at the end.

    While torch traces it puts other tensors in their place. It leaves them in a module that has two names.
    """
    places: list[dict[str, Any]] = [
        place for each in module.modules() for place in (each._parameters, each._buffers)
    ]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, tensors in zip(places, before, strict=True):
            place.update(tensors)


def _partition(graph: GraphModule, inputs: list[Any], num_forward: int) -> tuple[GraphModule, GraphModule]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if not any(each.is_tangent() for each in inputs):
        return simplified(graph), extract(graph, [], [])
    random = [node for node in graph.graph.nodes if is_random(node)]
    for node in random:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # a second draw would give other numbers
    drawn = [node.name for node in random]
    alive = [position for position, each in enumerate(inputs) if each.is_param() or each.is_buffer()]
    parts = min_cut_rematerialization_partition(
        simplified(graph), None, num_fwd_outputs=num_forward, static_lifetime_input_indices=alive
    )
    if drawn != [node.name for part in parts for node in part.graph.nodes if is_random(node)]:
        raise CaptureError("random numbers would be drawn twice, in another order or not at all")
    if any(isinstance(node.meta.get("val"), tuple) for node in placeholders(parts[1])):
        raise CaptureError("the policy of a checkpoint keeps an operation with several results")
    return parts


def _refuse_sparse(graph: GraphModule) -> None:
    values = [node.meta.get("val") for node in graph.graph.nodes]
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values):
        raise CaptureError("it has a sparse tensor, or the gradient of one")


def _names(module: nn.Module, traced: nn.Module) -> dict[str, str]:
    """Names of parameters and buffers in the traced module -> their names in the module."""
    own = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    everything = [
        *traced.named_parameters(remove_duplicate=False),
        *traced.named_buffers(remove_duplicate=False),
    ]
    return {name: own[id(tensor)] for name, tensor in everything if id(tensor) in own}


def _source(description: Any, names: dict[str, str]) -> Source:
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    if isinstance(description, PlainAOTInput):
        return description.idx
    if (description.is_param() or description.is_buffer()) and hasattr(description, "target"):
        if description.target in names:
            return names[description.target]
        name = description.target.removeprefix("inner.")
        raise CaptureError(f"{name} is a tensor, but neither parameter nor buffer: use register_buffer")
    raise CaptureError(f"an input of a kind that is not handled: {description.expr()}")


def _mutated(results: list[Any], names: dict[str, str]) -> tuple[list[str], int]:
    """The buffers that forward changes, and how many outputs it has besides."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTOutput

    mutated, num_outputs = [], 0
    for each in results:
        if isinstance(each, InputMutationAOTOutput):
            source = _source(each.mutated_input, names)
            if isinstance(source, int) or not each.mutated_input.is_buffer():
                what = f"argument {source}" if isinstance(source, int) else source
                raise CaptureError(f"forward changes {what} in place")
            mutated.append(source)
        elif isinstance(each, PlainAOTOutput):
            num_outputs += 1
        elif each is not None and not each.is_grad():
            raise CaptureError(f"an output of a kind that is not handled: {each.expr()}")
    return mutated, num_outputs


def _output_of(description: Any) -> int:
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    if not isinstance(description, PlainAOTOutput):
        raise CaptureError(f"a gradient of a kind that is not handled: {description.expr()}")
    return description.idx


def _auxiliary_loss(error: Exception) -> str:
    """A clearer text for Dynamo's error inside `auxiliary_loss`; "" for any other error."""
    if f", in {auxiliary_loss.__name__}" not in str(error):
        return ""
    return "it calls zbpp.auxiliary_loss, which a graph can't; call it in a module with few other operations"
