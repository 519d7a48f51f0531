"""Saving a checkpoint: all processes agree on it while training stands still, then each writes its part.

all processes   facts -> one gather -> copy (in the background only)     training stands still
each process    plans, writes and hashes its tensors, by torch's DCP     training goes on
the first       .metadata, state.json, manifest.json, rename, `latest`
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from zbpp.checkpoints import folders, model_states, optimizer_states
from zbpp.checkpoints.folders import CheckpointError
from zbpp.checkpoints.nest import encoded
from zbpp.checkpoints.optimizer_states import UNEVEN_OPTIMIZERS, Masters, kind_of
from zbpp.checkpoints.random_states import random_states
from zbpp.checkpoints.writing import FolderWriter
from zbpp.error_text import shown_path
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.groups import gloo_group
from zbpp.runtime.parallel.mesh import Place, local_of

Failed = Callable[[str], None]

# A job of one rank has no process group: DCP says so each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@runtime_checkable
class Stateful(Protocol):
    """A further object that a checkpoint may hold: a scheduler, a LossScale, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Saving:
    """A checkpoint that is being written. path: its final folder. seconds: this process's time to write.

    is_awaited: whether `wait` was called.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        facts: str,
        keep: int | None,
        place: Place,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.path, self.seconds = path, 0.0
        self._tensors, self._writer = dict(tensors), FolderWriter(path, facts, keep)
        self._place, self._group = place, group
        self._error, self.is_awaited = "", False
        self._failed: Failed | None = None
        self._thread: threading.Thread | None = None

    def write(self) -> None:
        """Write now. The next call is `wait`."""
        begin = time.perf_counter()
        try:
            dcp_save(
                self._tensors,
                storage_writer=self._writer,
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (Exception, CheckpointException) as error:
            self._error = f"{shown_path(self.path)} could not be written ({_reason(error)})"
            if _is_first(self._place):
                folders.discard(folders.unfinished(self.path))
                if self._failed is not None:
                    self._failed(self._error)
        self._tensors = {}
        self.seconds = time.perf_counter() - begin

    def write_in_background(self, failed: Failed | None = None) -> None:
        """Copy the tensors to host memory, then write in a thread.

        failed(why): called on the first process, from the thread, if writing fails.
        """
        self._tensors, self._failed = _on_host(self._tensors), failed
        # Not a daemon: a process that ends, ends after its part is written.
        self._thread = threading.Thread(target=self.write, name=f"zbpp {self.path.name}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is written, or can't be."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Collective.

        Raises CheckpointError, on every process, if a process could not write: then nothing is left of it.
        """
        self.is_awaited = True
        if self._thread is not None:
            self._thread.join()
        for error in self._place.gather(self._error):
            if error:
                raise CheckpointError(error)
        return self.path


def _is_first(place: Place) -> bool:
    return place.is_first and place.rank == 0


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, so that training may change the tensors."""
    copies = {}
    for name, tensor in tensors.items():
        local = local_of(tensor.detach())
        copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        copy.copy_(local, non_blocking=True)
        if local is not tensor and hasattr(tensor, "device_mesh"):
            # Not from_local, which would move the copy back to the mesh's device.
            copy = type(tensor.detach())(copy, tensor._spec, requires_grad=False)  # type: ignore[call-overload, attr-defined]  # DTensor's
        copies[name] = copy
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _reason(error: BaseException) -> str:
    """What went wrong in a line. torch's zip writer hides a full disk behind an error of its own."""
    if isinstance(error, CheckpointException):  # of one or more processes
        error = next((each for each, _ in error.failures.values()), error)
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:  # a chain may be a circle
        chain.append(following)
        following = following.__cause__ or following.__context__
    known = next((each for each in chain if isinstance(each, OSError)), error)
    return f"{type(known).__name__}: {_line(known)}"


def save(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int,
    masters: Masters | None = None,
    keep: int | None = None,
    background: bool = False,
    info: Mapping[str, Any] | None = None,
    **states: Stateful,
) -> Saving:
    """Write the checkpoint `folder`/step-N. A folder of this name exists only when it is whole. Collective.

    step: how many steps are done, 0 or more. masters: a MasterWeights; they are saved in place of the 16-bit
    weights. keep: how many checkpoints, the newest ones, stay in the folder; None: all. Those of later steps
    than this one stay, too. step and keep are the same on all ranks. states: further objects with a
    state_dict, such as scheduler=..., loss_scale=...; the first process's states are saved for all. info:
    plain values (JSON) to save as well. Gradients are not saved: save after the optimizer's step.

    background: return when the state is copied to host memory, and write while training goes on; call
    `wait()` of the returned Saving at the end. The next save waits, too.

    Weights and optimizer states get the names of the whole model: `zbpp.load` takes them under any other cut,
    number of ranks, schedule and mesh. Raises CheckpointError, on every process, if the checkpoint can't be
    written; the folder's other checkpoints stay as they are.
    """
    saving = prepared(
        folder, pipeline, optimizer, step=step, masters=masters, keep=keep, info=info, states=states
    )
    if background:
        saving.write_in_background()
    else:
        saving.write()
        saving.wait()
    return saving


class _OfPipeline(NamedTuple):
    """group: in which the processes of a pipeline agree while its training steps use the other groups."""

    group: dist.ProcessGroup | None
    last: Saving | None


_known: WeakKeyDictionary[Pipeline, _OfPipeline] = WeakKeyDictionary()


def prepared(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    *,
    step: int,
    masters: Masters | None,
    keep: int | None,
    info: Mapping[str, Any] | None,
    states: Mapping[str, Stateful],
) -> Saving:
    """The checkpoint, agreed on by all processes, not written yet. The arguments are those of `save`."""
    place = pipeline.place
    _check_arguments(place, optimizer, step, keep)
    path, tensors = folders.path_of(Path(folder), step), dict[str, Tensor]()
    facts, error = {}, ""
    is_first, is_prepared = _is_first(place), False
    pipeline.settle()  # collective; before anything that may fail on one process alone
    group, last = _known[pipeline] if pipeline in _known else _OfPipeline(gloo_group(place), None)
    if last is not None and not last.is_awaited:
        last.wait()
    try:
        json.dumps(info)
        if is_first:
            folders.prepare(path)
        is_prepared = is_first
        facts = _facts(pipeline, optimizer, masters, tensors)
        mine = states if is_first else {}  # a data loader of another replica is at another batch
        facts["states"] = {
            name: encoded(each.state_dict(), f"states.{name}", tensors) for name, each in mine.items()
        }
        facts["kinds"] = {name: kind_of(each) for name, each in mine.items()}
    except CheckpointError as caught:
        error = _line(caught)
    except Exception as caught:  # of the user's objects, too: the other processes wait
        error = f"{path} can't be written: {type(caught).__name__}: {_line(caught)}"
    told = place.gather((error, facts))
    for refusal, _ in told:
        if refusal:
            if is_prepared:
                folders.discard(folders.unfinished(path))
            raise CheckpointError(refusal)
    whole = _merged([each for _, each in told], pipeline, step) | {"info": dict(info or {})}
    saving = Saving(path, tensors, json.dumps(whole), keep, place, group)
    _known[pipeline] = _OfPipeline(group, saving)
    return saving


def _check_arguments(place: Place, optimizer: object, step: object, keep: object) -> None:
    """Raise CheckpointError, on every process, for a bad step or keep, or one that differs. Collective."""
    refusal = ""
    if type(step) is not int or not 0 <= step < 2**53:
        refusal = f"step={step!r}: write how many steps are done, a whole number from 0 to 2^53"
    elif keep is not None and (type(keep) is not int or keep < 1):
        refusal = f"keep={keep!r}: write how many checkpoints stay, 1 or more"
    told = place.gather((refusal, f"step={step!r}, keep={keep!r}", optimizer is None))
    for each, *_ in told:
        if each:
            raise CheckpointError(each)
    found = sorted({values for _, values, _ in told})
    if len(found) > 1:
        raise CheckpointError(f"{found[0]} on one rank, {found[1]} on another one: give all ranks the same")
    if len({is_none for *_, is_none in told}) > 1:
        raise CheckpointError(UNEVEN_OPTIMIZERS)


def _facts(
    pipeline: Pipeline,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    masters: Masters | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """This process's part of state.json; its tensors are added to `tensors`."""
    optimizers = optimizer_states.optimizers_of(optimizer)
    return {
        "model": model_states.collect(pipeline, masters, tensors),
        "optimizer": optimizer_states.collect(pipeline, optimizers, masters, tensors)
        if optimizer is not None
        else None,
        "random": random_states(),
    }


def _merged(parts: list[dict[str, Any]], pipeline: Pipeline, step: int) -> dict[str, Any]:
    """state.json from the parts of all processes."""
    model = {**parts[0]["model"], "extra": {}}
    for part in parts:
        model["extra"] = part["model"]["extra"] | model["extra"]
    timetable = pipeline.timetable
    model |= {"num_stages": timetable.num_stages, "is_prefixed": pipeline.has_prefixed_names}
    optimizers = [each["optimizer"] for each in parts]  # None on all processes or on no one
    return {
        "format": folders.FORMAT,
        "step": step,
        "torch": torch.__version__,
        "num_processes": len(parts),
        "timetable": str(timetable),
        "model": model,
        "optimizer": None if optimizers[0] is None else optimizer_states.merged(optimizers),
        "random": [each["random"] for each in parts],
        "states": parts[0]["states"],
        "kinds": parts[0]["kinds"],
    }


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
