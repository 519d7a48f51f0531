"""Any module that torch.export can trace, cut into stages at submodules.

    module --torch.export--> one graph --cut--> a graph per stage, over the module's own parameters

torch's own `torch.distributed.pipelining.pipeline` uses torch.export and the mark `pipe_split`, too. But it
copies a parameter that two stages use, keeps dropout on in eval mode, fails on torch.no_grad() in forward,
and sends values directly to later stages; a `Pipeline` sends to the next stage only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split
from torch.export import ExportedProgram

from zbpp.autograd import auxiliary_losses
from zbpp.cutting.check import check_equal
from zbpp.cutting.graph import Part, cut
from zbpp.cutting.stage import TracedStage, describe
from zbpp.error_text import did_you_mean, kind_of
from zbpp.tracebacks import hiding_own_frames


@hiding_own_frames
def trace_stages(
    module: nn.Module,
    example: Tensor | tuple[Any, ...],
    split_points: Iterable[str] = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> dict[int, nn.Module]:
    """Cut a module into {stage index: module}: one stage more than split points, in forward order.

    example, example_kwargs: what forward gets for one MICROBATCH; the stages take its shapes and no others.
    split_points: names of submodules, each called once, before which a stage begins. Calls of torch's
    `pipe_split` in forward are split points, too.

    The stages hold the module's own parameters and buffers, no copies, under their names in the module. The
    owner of stage 0 passes all inputs; keyword arguments of later stages are ignored. Inputs that later
    stages need are sent along with the activations; so is a parameter that several stages use (a tied
    embedding), once per microbatch. `train()` and `eval()` of a stage choose between two traces: one in
    training mode, with the submodules' modes as they are now, and one in eval mode. A checkpointed block is
    traced as a plain one. Move the module to its device and dtype before.
    check: run the example, forward and gradients, through copies of module and stages, and compare.

    Raises ValueError for a module that can't be traced or cut, or whose stages compute something else.
    """
    args = (example,) if isinstance(example, Tensor) else tuple(example)
    kwargs = dict(example_kwargs or {})
    points = list(split_points)
    if isinstance(split_points, str) or not all(isinstance(each, str) for each in points):
        raise ValueError(
            f"split_points is {kind_of(split_points)}, not a list of names of submodules: write "
            "trace_stages(module, example, [name, ...])"
        )
    for point in points:
        _check_is_submodule(module, point)
    state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))
    parts = {training: _parts(module, training, args, kwargs, points, state) for training in (True, False)}
    _check_alike(parts)
    persistent = module.state_dict(keep_vars=True).keys()
    stages: dict[int, nn.Module] = {}
    for index, share in enumerate(_shares(parts, state)):
        own = {training: found[index] for training, found in parts.items()}
        traces = {training: part.trace for training, part in own.items()}
        extras = own[True].extras | own[False].extras
        stages[index] = TracedStage(traces, share, persistent, extras).train(module.training)
    stages[0].signature = signature(module.forward)  # type: ignore[assignment]
    if check:
        check_equal(module, stages, args, kwargs)
    return stages


def _check_is_submodule(module: nn.Module, name: str) -> None:
    names = [each for each, _ in module.named_modules() if each]
    if name not in names:
        raise ValueError(
            f"{type(module).__name__} has no submodule {name!r}; it has {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}{did_you_mean(name, names)}"
        )


def _parts(
    module: nn.Module,
    training: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    points: Sequence[str],
    state: Mapping[str, Tensor],
) -> list[Part]:
    """The parts, one per stage, of a trace in training or eval mode."""
    with _modes_kept(module):
        if module.training is not training:
            module.train(training)
        return cut(_traced(module, args, kwargs, points), state, "_training" if training else "_eval")


def _traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], points: Sequence[str]
) -> ExportedProgram:
    with _marks(module, points) as calls, torch.enable_grad(), auxiliary_losses() as auxiliary:
        try:
            program = torch.export.export(module, args, kwargs)
        except Exception as error:  # of any kind: torch.export's own errors, and those of the model's code
            raise ValueError(
                f"torch.export can't trace {type(module).__name__} "
                f"({'training' if module.training else 'eval'} mode): {_first_line(error)}; if forward "
                "branches on tensors' values, use torch.where, zbpp.split_sequential, or write a "
                "PipelineModel"
            ) from error
    if auxiliary:
        raise ValueError(
            f"{type(module).__name__} reports auxiliary losses ({', '.join(map(repr, auxiliary))}), which a "
            "trace does not contain: use zbpp.split_sequential, or write a PipelineModel"
        )
    for name in points:
        if calls[name] != 1:
            inside = [f"{name}.{each}" for each, _ in module.get_submodule(name).named_children()]
            such = f", such as {inside[len(inside) // 2]}" if inside and not calls[name] else ""
            raise ValueError(
                f"forward calls {name!r} {calls[name]} times: split at a submodule that it calls once{such}"
            )
    return program


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    """Each submodule is afterwards in the mode (training or eval) that it was in."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextmanager
def _marks(module: nn.Module, points: Sequence[str]) -> Iterator[Counter[str]]:
    """Mark the split points in what is traced inside; yields {name: how often its submodule was called}."""
    calls: Counter[str] = Counter()
    handles = []
    for name in points:

        def mark(*_: Any, name: str = name) -> None:
            calls[name] += 1
            pipe_split()

        handles.append(module.get_submodule(name).register_forward_pre_hook(mark, prepend=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _check_alike(parts: Mapping[bool, list[Part]]) -> None:
    """Raise ValueError if a stage takes other values in eval mode than in training mode."""
    for stage, (training, evaluation) in enumerate(zip(parts[True], parts[False], strict=True)):
        takes = training.trace.takes, evaluation.trace.takes
        if takes[0] != takes[1]:
            raise ValueError(
                f"stage {stage} would take {describe(takes[1])} in eval mode, {describe(takes[0])} in "
                "training mode: split where both pass the same"
            )


def _shares(parts: Mapping[bool, list[Part]], state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return, per stage, the parameters and buffers that the stage reads, under all their names.

    A tensor that no stage reads goes to stage 0.
    """
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for found in parts.values():
        for index, part in enumerate(found):
            for tensor in part.state.values():
                readers[id(tensor)].add(index)
    shares: list[dict[str, Tensor]] = [{} for _ in parts[True]]
    for name, tensor in state.items():
        holders = readers[id(tensor)] or {0}
        if isinstance(tensor, nn.Parameter) and len(holders) > 1:
            raise ValueError(
                f"the first stage to use {name} is {min(holders)} in one mode, {max(holders)} in the other: "
                "split where training and eval mode use it first on the same stage"
            )
        for index in holders:
            shares[index][name] = tensor
    return shares
