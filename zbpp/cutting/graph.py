"""One traced graph, cut at its marks into one graph per stage.

A stage passes values to the next stage only. So a value that a later stage needs passes through all stages in
between. A parameter belongs to the first stage that uses it, and is passed on to later ones like any value:
its gradient comes back the same way. Buffers and constants are on every stage that reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from zbpp.cutting.stage import Layout, Trace, layout


class Part(NamedTuple):
    """One stage in one mode.

    state: the parameters and buffers that the stage reads, by their names in the whole model. extras:
    constants and subgraphs, by names of their own.
    """

    trace: Trace
    state: dict[str, Tensor]
    extras: dict[str, Tensor | nn.Module]


def cut(program: ExportedProgram, state: Mapping[str, Tensor], prefix: str) -> list[Part]:
    """The parts of `program` between its calls of torch's `pipe_split`, in forward order.

    state: the traced module's parameters and buffers, a tied one under each of its names. prefix: begins the
    names of extras. Raises ValueError for a value that can't pass from stage to stage.
    """
    cutter = _Cutter(program, state, prefix)
    cutter.check()
    return [cutter.part(stage) for stage in range(cutter.num_stages)]


class _Cutter:
    def __init__(self, program: ExportedProgram, state: Mapping[str, Tensor], prefix: str) -> None:
        self._program, self._prefix = program, prefix
        self._inputs: dict[fx.Node, Any] = {}  # node -> layout, or the value if it is no tensor
        self._state: dict[fx.Node, tuple[str, Tensor]] = {}
        self._extras: dict[fx.Node, tuple[str, Tensor | nn.Module]] = {}
        self._read_inputs(state)
        self._results = self._read_outputs()
        # Values that can pass between stages -> the stage that makes them; in forward order.
        self._home: dict[fx.Node, int] = dict.fromkeys(self._inputs, 0)
        self.num_stages = self._number()
        self._uses = {node: self._stages_using(node) for node in program.graph.nodes}
        parameters = [node for node, (_, tensor) in self._state.items() if isinstance(tensor, nn.Parameter)]
        first_uses = {node: min(self._uses[node]) for node in parameters if self._uses[node]}
        self._home = first_uses | self._home

    def check(self) -> None:
        """Raise ValueError for a stage that would compute nothing, and for values that can't be passed on."""
        computing = {home for node, home in self._home.items() if node.op == "call_function"}
        for stage in range(self.num_stages):
            if stage not in computing:
                raise ValueError(
                    f"stage {stage} of {self.num_stages} would compute nothing: a split point is before the "
                    "first computation, after the last, or next to another split point; move or remove it"
                )
            if stage > 0 and not self._taken(stage):
                raise ValueError(f"stage {stage} needs nothing of the stages before it: move its split point")
            for node in self._taken(stage) if stage > 0 else ():
                value = _traced_value(node)
                if not (isinstance(value, Layout) and all(isinstance(size, int) for size in value.shape)):
                    raise ValueError(
                        f"{node.name}, {value}, is no tensor of a fixed shape, and would pass from stage "
                        f"{stage - 1} to stage {stage}: move the split point between them"
                    )

    def part(self, stage: int) -> Part:
        graph, taken = fx.Graph(), self._taken(stage)
        new = {node: graph.placeholder(node.name) for node in taken}
        read = {
            node: attribute
            for node, attribute in (*self._state.items(), *self._extras.items())
            if node not in new and stage in self._uses[node]
        }
        new |= {node: graph.get_attr(name) for node, (name, _) in read.items()}
        for node, home in self._home.items():
            if node not in new and home == stage:
                new[node] = graph.node_copy(node, new.__getitem__)
        is_last = stage == self.num_stages - 1
        given = self._results if is_last else tuple(self._taken(stage + 1))
        graph.output(fx.node.map_arg(given, new.__getitem__))
        trace = Trace(
            index=stage,
            run=type(fx.GraphModule(dict(read.values()), graph)).forward,
            takes=tuple([self._inputs[node] if stage == 0 else _traced_value(node) for node in taken]),
            inputs=self._program.call_spec.in_spec if stage == 0 else None,
            outputs=self._program.call_spec.out_spec if is_last else None,
        )
        return Part(
            trace,
            state=dict(self._state[node] for node in read if node in self._state),
            extras=dict(self._extras[node] for node in read if node in self._extras),
        )

    def _taken(self, stage: int) -> list[fx.Node]:
        """The values that a stage is given: values of earlier stages that this or a later stage uses.

        Stage 0 is given all inputs.
        """
        if stage == 0:
            return list(self._inputs)
        return [
            node for node, home in self._home.items() if home < stage <= max(self._uses[node], default=home)
        ]

    def _read_inputs(self, state: Mapping[str, Tensor]) -> None:
        nodes = {node.name: node for node in self._program.graph.find_nodes(op="placeholder")}
        first: dict[int, fx.Node] = {}  # of tensors with several names
        for spec in self._program.graph_signature.input_specs:
            node, name = nodes[spec.arg.name], str(spec.target)
            match spec.kind:
                case InputKind.USER_INPUT:
                    is_literal = isinstance(spec.arg, ConstantArgument)
                    self._inputs[node] = spec.arg.value if is_literal else _traced_value(node)
                case InputKind.PARAMETER | InputKind.BUFFER:
                    self._state[node] = (name, state[name])
                    node.replace_all_uses_with(first.setdefault(id(state[name]), node))
                case InputKind.CONSTANT_TENSOR:
                    self._add_extra(node, name, self._program.constants[name])
                case _:
                    raise ValueError(f"{spec.arg.name}: an input of kind {spec.kind.name} can't be traced")

    def _add_extra(self, node: fx.Node, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(f"{name} requires grad and is no parameter: make it an nn.Parameter")
        self._extras[node] = (f"{self._prefix}_{name.replace('.', '_')}", value)

    def _read_outputs(self) -> tuple[Any, ...]:
        """What the last stage returns. Raises ValueError if forward changes anything but buffers."""
        for spec in self._program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise ValueError(f"forward changes {spec.target or spec.arg.name}, which can't be traced")
        (output,) = self._program.graph.find_nodes(op="output")
        results: Any = output.args[0]
        return tuple(results)

    def _number(self) -> int:
        """Give each computation its stage, and return the number of stages."""
        stage = 0
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                self._add_extra(node, node.target, attrgetter(node.target)(self._program.graph_module))
            elif node.op == "call_function" and _is_mark(node):
                stage += 1
            elif node.op == "call_function":
                self._home[node] = self._stage_of(node, stage)
        return stage + 1

    def _stage_of(self, node: fx.Node, stage: int) -> int:
        arguments: tuple[Any, ...] = node.args
        if node.target is operator.getitem:  # an element of a tuple: on the stage that makes the tuple
            return self._home[arguments[0]]
        if node.target is torch.ops.aten.copy_.default and arguments[0] in self._state:
            # The trace writes a buffer's new value at its own end; here the stage that reads it writes it.
            buffer, value, *_ = arguments
            readers = {self._home[user] for user in buffer.users if user in self._home}
            return min(stage, max([*readers, self._home.get(value, 0)]))
        return stage

    def _stages_using(self, node: fx.Node) -> set[int]:
        used = {self._home[user] for user in node.users if user in self._home}
        return used | {self.num_stages - 1} if node in self._results else used


def _traced_value(node: fx.Node) -> Layout | Any:
    return layout(node.meta.get("val"))


def _is_mark(node: fx.Node) -> bool:
    return "pipe_split" in str(node.target)
