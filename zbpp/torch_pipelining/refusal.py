"""Why a schedule of torch's runs on torch's runtime."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.stage import _PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zbpp.schedule import PlanError
from zbpp.torch_pipelining.features import FORWARD_KEYWORDS
from zbpp.torch_pipelining.order import NoTimetable, timetable_of

STEP = "_step_microbatches"  # the method that all of torch's schedules go through

# The arguments of torch's Schedule classes that zbpp knows, by what honours them.
_OF_CONSTRUCTORS = {
    # torch's code before and after STEP, and torch's methods that the engine calls
    "stage",
    "stages",
    "n_microbatches",
    "loss_fn",
    "args_chunk_spec",
    "kwargs_chunk_spec",
    "output_merge_spec",
    "scale_grads",
    "backward_requires_autograd",
    "use_full_backward",  # torch warns that it does nothing
    # zbpp, which places receives and gathers of weights itself: no result depends on these
    "defer_pp_recv",
    "max_active_stages",
}
_OF_FORWARDS = {"pass_pipeline_stage_info", "pass_stage_and_microbatch_indices"}  # by ForwardKeywords
_OF_STEP = {"arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs"}


def refusal(schedule: Any, stages: list[Any], batch: Any) -> str:
    """Why this rank's part of a schedule can't run on zbpp; "" if it can."""
    unknown = ", ".join(unknown_arguments(schedule))
    if unknown:
        return f"this torch's {type(schedule).__name__} has {unknown}, which zbpp does not know"
    if getattr(schedule, "_comp_type_to_function_map", None):
        return "it has custom functions, which call torch's stages"
    if any(isinstance(each, DTensor) for each in tree_leaves(batch)):
        return "its batch has DTensors"
    if any(base.__name__ == "ReplicateModule" for each in stages for base in type(each.submod).__mro__):
        return "its stages are in torch's composable replicate, which zbpp does not drive"
    if any(isinstance(each, _PipelineStage) and _skips(each) for each in stages):
        return "stages that are no neighbours pass tensors to each other"
    try:
        timetable_of(schedule)
    except (NoTimetable, PlanError) as error:
        return str(error)
    return ""


def unknown_arguments(schedule: Any) -> list[str]:
    """The arguments of torch's constructors and of STEP that zbpp does not know.

    An argument of a constructor counts only if its value is not the default. torch keeps the value on the
    schedule object, under the argument's name or with an underscore before it. An argument whose value is not
    found there counts, too.
    """
    known = _OF_CONSTRUCTORS | (_OF_FORWARDS if hasattr(schedule, FORWARD_KEYWORDS) else set())
    found = {each.name: each.default for each in _of_constructors(type(schedule)) if each.name not in known}
    given = [name for name, default in found.items() if not _is_kept(schedule, name, default)]
    return given + [name for name in _named(getattr(torchs._PipelineSchedule, STEP)) if name not in _OF_STEP]


def _of_constructors(kind: type) -> Iterator[Parameter]:
    """The arguments of the constructors of torch's classes that a Schedule class is derived from."""
    for each in kind.__mro__:
        if each.__module__ == torchs.__name__ and "__init__" in vars(each):
            yield from _named(vars(each)["__init__"]).values()


def _named(method: Any) -> dict[str, Parameter]:
    """The arguments of a method that have names, without `self`."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    found = signature(method).parameters.items()
    return {name: each for name, each in found if each.kind in named and name != "self"}


def _is_kept(schedule: Any, name: str, value: Any) -> bool:
    """Whether a schedule object holds this value of an argument."""
    kept = [vars(schedule)[each] for each in (name, f"_{name}") if each in vars(schedule)]
    return any(each is value or (type(each) is type(value) and bool(each == value)) for each in kept)


def _skips(stage: _PipelineStage) -> bool:
    """Whether a stage that torch has traced takes anything but the outputs of the stage before it."""
    if stage.is_first:
        return False
    before = [node for node in stage.node.graph.nodes if node.op == "call_module"][stage.stage_index - 1]
    users = [node for node in before.users if node.op == "call_function"]
    sent = users or [before]
    return list(stage.node.args) != sent or any(set(each.users) != {stage.node} for each in sent)
