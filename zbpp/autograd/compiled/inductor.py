"""Everything that compiled stages need of torch's private parts, behind two functions.

`capture` traces one call of a module: Dynamo for the Python code, AOTAutograd for the joint graph of
forward and backward, torch's min-cut partitioner for what F keeps until B. `build` makes a graph
callable, by Inductor.
"""

from __future__ import annotations

import inspect
import re
import shutil
import warnings
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

Backend = Literal["inductor", "eager"]
Boxed = Callable[[list[Any]], Any]  # takes its inputs out of the list as it goes
Source = str | int  # a module's parameter or buffer by name, or the position of an argument

OLDEST = (2, 13)

aten = torch.ops.aten

# Hugging Face's models set and reset it in each forward.
_COLLECTOR = "G['__import_transformers_dot_utils_dot_output_capturing']._active_collector"


class CaptureError(RuntimeError):
    """Why a module can't be compiled, in one line."""


class Joint(NamedTuple):
    """Forward and backward of one call, in aten's operations.

    forward: sources -> (new values of `mutated`, outputs, what backward needs).
    backward: what it needs, by the names of forward's nodes; then a gradient for each of `tangents`,
    which are outputs' positions -> one gradient for each of `gradients`.
    """

    forward: GraphModule
    backward: GraphModule
    sources: list[Source]
    mutated: list[str]
    num_outputs: int
    tangents: list[int]
    gradients: list[Source]
    structure: TreeSpec  # of the outputs


def check_torch() -> None:
    """Raises RuntimeError where this version of torch lacks what is needed."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise RuntimeError(
            f"compiled stages need torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: "
            "install it, or write compile=none"
        )


def check_compiler() -> None:
    """Raises RuntimeError where Inductor would find no C++ compiler for the CPU."""
    from torch._inductor import config

    known = [config.cpp.cxx] if isinstance(config.cpp.cxx, str) else config.cpp.cxx
    if not any(name and shutil.which(name) for name in known):
        raise RuntimeError(
            "compiling for the CPU needs a C++ compiler, and there is neither g++ nor what CXX names: "
            "install one (apt-get install g++), or write compile=none"
        )


def has_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked to."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget: float) -> Joint:
    """The graphs of module(*args, **kwargs); its random operations stay, and draw from torch's generator.

    budget: of memory between F and B, from 1 (only cheap work is done again) to 0 (only inputs are kept).
    Raises CaptureError.
    """
    with _settings(budget), ExitStack() as stack:
        try:
            return _capture(stack, module, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:  # whatever Dynamo, the module's own code or the tracers may raise
            raise CaptureError(_foreign_tensors(module, error) or _first_line(error)) from error


def build(graph: GraphModule, backend: Backend, *, trusted: bool = False) -> Boxed:
    """A callable for the graph; its outputs keep the strides that they had when it was traced.

    trusted: nobody need check at each call that the inputs have theirs. Raises CaptureError.
    """
    if backend == "eager":
        return lambda values: graph(*_emptied(values))
    try:
        return _compile(graph, trusted)
    except Exception as error:  # whatever may go wrong in a compiler
        raise CaptureError(_first_line(error)) from error


def _compile(graph: GraphModule, trusted: bool) -> Boxed:
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    _teach_inductor()
    examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    with _settings(1.0), config.patch(size_asserts=not trusted), V.set_fake_mode(detect_fake_mode(examples)):
        compiled: Any = compile_fx_inner(graph, examples)
    call: Boxed = getattr(compiled, "current_callable", None) or compiled
    return call


def _emptied(values: list[Any]) -> list[Any]:
    taken = values[:]
    values.clear()
    return taken


@contextmanager
def _settings(budget: float) -> Iterator[None]:
    budget = max(budget, 1e-9)  # at 0 even random numbers would be drawn again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's parts warn of each other
        import torch._functorch.config as partitioner
        import torch._inductor.config as inductor

        # As without compilation: dropout's masks are drawn by the same calls in the same order.
        with inductor.patch(fallback_random=True), partitioner.patch(activation_memory_budget=budget):
            yield


def _teach_inductor() -> None:
    """Let it call what adds to a gradient in place, and what `_decompositions` leaves whole."""
    from torch._inductor.lowering import fallback_handler, lowerings

    for operation in (aten.addmm_, aten.baddbmm_, aten.index_add_):
        lowerings.setdefault(operation.default, partial(_call_in_place, operation.default))
    kept = aten.embedding_dense_backward.default
    lowerings.setdefault(kept, fallback_handler(kept, add_to_fallback_set=False))


def _call_in_place(operation: Any, *args: Any) -> Any:
    """Inductor's node for an operation that changes its first argument."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    result = FallbackKernel.create(operation, *args)
    kernel = next(each for each in reversed(V.graph.operations) if isinstance(each, FallbackKernel))
    # The method costs a quarter of the call through torch.ops.
    kernel.python_kernel_name = f"torch.Tensor.{operation.overloadpacket.__name__}"
    return result


# ---- Capture


class _Fresh(nn.Module):
    """The module, with outputs that are no inputs, no views, nor the same: those would lack gradients."""

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


def _capture(stack: ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Joint:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    traced = _Fresh(_python_free(module, args, kwargs))
    joint = aot_export_joint_with_descriptors(stack, traced, args, kwargs, decompositions=_decompositions())
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
        sources,
        joint.out_spec,
    )


def _python_free(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The module as Dynamo reads it: all of its Python code, or an error that says what could not be read."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        captured: Callable[..., Any] = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    _refuse_changes(module, said)
    return captured


def _refuse_changes(module: nn.Module, warned: list[warnings.WarningMessage]) -> None:
    """Of what forward does to Python objects, which Dynamo warns of, no graph knows."""
    harmless = _COLLECTOR, f"L['{_name_of_keywords(module.forward)}']"
    for each in warned:
        _, _, listed = str(each.message).partition("potential sources you can double check: ")
        changed = [name for name in (literal_eval(listed) if listed else ()) if name not in harmless]
        if changed:
            names = ", ".join(re.sub(r"^[LG]\['(\w+)'\]", r"\1", name) for name in changed)
            raise CaptureError(
                f"forward sets attributes or changes objects, which a graph can't: of {names} "
                "(tensors may be changed in place: write add_(1), not += 1)"
            )


def _name_of_keywords(forward: Any) -> str | None:
    """Of the dictionary that a function takes its other keywords in: at each call a new one."""
    code = getattr(forward, "__code__", None)
    return inspect.getargs(code).varkw if code else None


def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    # As a scatter its sums would have no fixed order.
    table.pop(aten.embedding_dense_backward.default, None)
    return table


def _partition(graph: GraphModule, inputs: list[Any], num_forward: int) -> tuple[GraphModule, GraphModule]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    _keep_random(graph)
    alive = [position for position, each in enumerate(inputs) if each.is_param() or each.is_buffer()]
    forward, backward = min_cut_rematerialization_partition(
        joint_graph_passes(graph), None, num_fwd_outputs=num_forward, static_lifetime_input_indices=alive
    )
    return forward, backward


def _keep_random(graph: GraphModule) -> None:
    """What was drawn in F is kept: drawn again it would be something else."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _refuse_sparse(graph: GraphModule) -> None:
    values = [node.meta.get("val") for node in graph.graph.nodes]
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values):
        raise CaptureError("it has a sparse tensor, or the gradient of one")


def _names(module: nn.Module, traced: nn.Module) -> dict[str, str]:
    """What the traced module calls its parameters and buffers -> what the module does."""
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


def _foreign_tensors(module: nn.Module, error: Exception) -> str:
    """In words of ours, what the tracer says of a tensor that it was not given; "" for any other error."""
    if "convert all Tensors to FakeTensors" not in str(error):
        return ""
    names = [
        f"{path}.{name}".removeprefix(".")
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, Tensor)
    ]
    which = f", perhaps {', '.join(names)}" if names else ""
    return f"it uses a tensor that is neither argument, parameter nor buffer{which}: use register_buffer"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")
