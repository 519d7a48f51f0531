"""Guards and explains in-place changes: memory that a later action needs must stay as it is.

A message is the memory that a stage returned, not a copy. It may be memory of a buffer, of a parameter, or of
the step's input, and the stage's next F may overwrite it while the message is under way. Autograd counts the
in-place changes of a tensor's memory (`_version`). The count is noted when the message leaves its stage, and
compared when the next stage has read it: at the Release of a sent message, or at an Update that may write it;
for a stage of the same rank, where the consuming action begins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd.weight_grads import ChangedInPlace
from zbpp.runtime.layout import Message, Run, layout_of

if TYPE_CHECKING:
    from zbpp.runtime.stage import StageWorker

_SAVED_CHANGED = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\]"
    r"(, which is output \d+ of (?P<node>\w+),)? is at version (?P<version>\d+)"
)


class MessageChanged(Exception):
    """A tensor of a message was changed in place; `explained` makes the user's error of it.

    channel: of the message, see `channel_of` in links.py.
    """

    def __init__(self, channel: Any, tensor: Tensor) -> None:
        super().__init__(channel)
        self.channel, self.tensor = channel, tensor


def versions_of(message: Iterable[Tensor | None]) -> list[int]:
    """Autograd's counts of in-place changes; [] under torch.inference_mode(), where tensors have none."""
    try:
        return [each._version for each in message if each is not None]
    except RuntimeError:
        return []


def check_unchanged(channel: Any, message: Iterable[Tensor | None], versions: list[int]) -> None:
    """Raise MessageChanged if a tensor's count is no longer the one that `versions_of` has found."""
    now = versions_of(message)
    if now != versions:
        tensors = [each for each in message if each is not None]
        changed = [a != b for a, b in zip(now, versions, strict=True)]
        raise MessageChanged(channel, tensors[changed.index(True)])


class Handover:
    """A message from one stage to another stage of the same rank. channel: see MessageChanged."""

    def __init__(self, channel: Any) -> None:
        self._channel, self._versions = channel, list[int]()

    def noted(self, run: Run) -> Run:
        """The function of the producer: `run`, then note the counts."""

        def producer(message: Message) -> Message:
            made = run(message)
            self._versions = versions_of(made)
            return made

        return producer

    def checked(self, run: Run) -> Run:
        """The function of the consumer: raise MessageChanged if a count has grown, else `run`."""

        def consumer(message: Message) -> Message:
            check_unchanged(self._channel, message, self._versions)
            return run(message)

        return consumer


# ---- What the user reads


def explained(error: MessageChanged, workers: Mapping[int, StageWorker]) -> ChangedInPlace:
    """The error in the user's words. workers: of this rank, by stage."""
    name, stage, _ = error.channel
    what = {"x": f"what stage {stage - 1} returned", "g": f"the gradient that stage {stage + 1} passes back"}
    places = filter(None, (_place_of(error.tensor, worker) for worker in workers.values()))
    place = next((f" (memory of {each})" for each in places), "")
    (layout,) = layout_of((error.tensor,))
    return ChangedInPlace(
        f"{what[name]}, {layout}{place}, was changed in place before stage {stage} had it: a pipeline "
        "runs other microbatches in between. Return memory that is written once, such as a .clone()"
    )


def explained_in_backward(error: RuntimeError, module: nn.Module, index: int) -> ChangedInPlace | None:
    """Autograd's error in B or W for a saved tensor that has changed, with its name; None for another error.

    Autograd says the tensor's shape and count of changes, and the node that computed it, if one did: such a
    tensor belongs to one microbatch, and plain autograd refuses its change, too. A view of a buffer has the
    buffer's count, perhaps another shape, and no node; that of a parameter has the node AsStrided.
    """
    found = _SAVED_CHANGED.search(str(error))
    if found is None:
        return None
    shape, version = [int(size) for size in re.findall(r"\d+", found["shape"])], int(found["version"])
    places = [
        each
        for each in _tensors_in(module)
        if versions_of((each[2],)) == [version] and _may_be_view(shape, each[2])
    ]
    if found["node"] is not None:
        places = [each for each in places if each[2].requires_grad and found["node"].startswith("AsStrided")]
        if not places:
            return None
    exact = [each for each in places if list(each[2].shape) == shape]
    written = [each for each in places if each[0] != "parameter"]  # forward rarely writes into a parameter
    chosen = [each for each in exact if each[0] != "parameter"] or written or exact or places
    names = " or ".join(f"{kind} {name}" for kind, name, _ in chosen[:3])
    which = f". That is {names} of stage {index}, or a view of it" if names else ""
    return ChangedInPlace(
        f"{str(error).partition('. Hint:')[0]}{which}: a pipeline runs the forward of later microbatches "
        "before this one's backward. In forward, make a new tensor instead of writing into the old one, or "
        "compute with a .clone() of it"
    )


def _may_be_view(shape: list[int], tensor: Tensor) -> bool:
    """Whether a view of the tensor may have this shape: dimensions cut, dropped or moved, or all reshaped."""
    sizes = zip(sorted(shape, reverse=True), sorted(tensor.shape, reverse=True), strict=False)
    is_part = len(shape) <= tensor.dim() and all(size <= whole for size, whole in sizes)
    return is_part or math.prod(shape) == tensor.numel()


def place_in(tensor: Tensor, module: nn.Module) -> str:
    """Which tensor of a module has this tensor's memory: `buffer mask`; nothing if none has."""
    memory = _memory_of(tensor)
    named = ((f"{kind} {name}", _memory_of(other)) for kind, name, other in _tensors_in(module))
    return next((name for name, other in named if other is not None and other == memory), "")


def _place_of(tensor: Tensor, worker: StageWorker) -> str:
    """What has the tensor's memory: `buffer mask of stage 0`; nothing if it is not found."""
    if place := place_in(tensor, worker.module):
        return f"{place} of stage {worker.index}"
    given = tree_leaves((worker.feed.args, worker.feed.kwargs))
    is_given = _memory_of(tensor) in {_memory_of(each) for each in given if isinstance(each, Tensor)}
    return "an input of the step" if is_given else ""


def _tensors_in(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of parameters, buffers, and tensors in attributes of modules."""
    for name, parameter in module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers():
        yield "buffer", name, buffer
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield "attribute", f"{prefix}.{name}".lstrip("."), value


def _memory_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own, such as a nested one
        return None
