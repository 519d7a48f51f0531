"""Saving a checkpoint: all processes agree on it while training stands still, then each writes its part.

all processes   state -> plan -> one gather -> copy (in the background only)     training stands still
each process    writes its tensors, hashes them, tells the first process         training goes on
the first       .metadata, state.json, manifest.json, rename, `latest`
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbpp.checkpoints import folders, model_states, optimizer_states
from zbpp.checkpoints.folders import CheckpointError
from zbpp.checkpoints.nest import encoded
from zbpp.checkpoints.optimizer_states import Masters, UnderWay, check_arguments, kind_of, last_of
from zbpp.checkpoints.random_states import random_states
from zbpp.checkpoints.writing import Exchange, Part
from zbpp.error_text import shown_path
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.mesh import Place

Failed = Callable[[str], None]


@runtime_checkable
class Stateful(Protocol):
    """A further object that a checkpoint may hold: a scheduler, a LossScale, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Saving:
    """A checkpoint that is being written. path: its final folder. seconds: this process's time to write.

    failed(why): called on the first process, from the thread that writes, if writing fails.
    """

    def __init__(
        self, path: Path, part: Part, exchange: Exchange, place: Place, state: str, keep: int | None
    ) -> None:
        self.path, self._place = path, place
        self._part, self._exchange, self._state, self._keep = part, exchange, state, keep
        self._error, self.seconds = "", 0.0
        self._failed: Failed | None = None
        self._thread: threading.Thread | None = None
        self.under_way = UnderWay(path)

    def write(self) -> None:
        """Write now, and wait."""
        self._write()

    def write_in_background(self, buffers: dict[Any, Tensor], failed: Failed | None = None) -> None:
        """Copy the tensors to host memory, then write in a thread. buffers: host memory to use again."""
        self._part.copy(buffers)
        self._failed = failed
        self.under_way.is_open = True
        # Not a daemon: a process that ends, ends after its part is written.
        self._thread = threading.Thread(target=self._write, name=f"zbpp {self.path.name}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this process has written its part; the first process also finishes the checkpoint."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Collective.

        Raises CheckpointError, on every process, if a process could not write: then nothing is left of it.
        """
        self.under_way.is_open = False
        if self._thread is not None:
            self._thread.join()
        for error in self._place.gather(self._error):
            if error:
                raise CheckpointError(error)
        return self.path

    def _write(self) -> None:
        index, begin = self._exchange.index, time.perf_counter()
        try:
            self._exchange.post(self._written())
            if index == 0:
                self._finish()
        except Exception as error:
            self._error = f"{shown_path(self.path)} could not be written ({_named(error)})"
            if index == 0:
                folders.discard(folders.unfinished(self.path))
                if self._failed is not None:
                    self._failed(self._error)
        finally:
            self.seconds = time.perf_counter() - begin

    def _written(self) -> tuple[Any, Any, str]:
        """Write this process's part: (DCP's results, {file: size and checksum}, error or "").

        The first process writes its part in `_finish` instead.
        """
        if self._exchange.index == 0:
            return [], {}, ""
        try:
            return *self._part.write(), ""
        except Exception as error:
            return [], {}, f"process {self._exchange.index}: {_named(error)}"

    def _finish(self) -> None:
        own: tuple[list[Any], dict[str, folders.Written]] = [], {}
        error = None
        try:
            own = self._part.write()
        except (
            Exception
        ) as caught:  # raised below, when all others have ended: then the folder can be removed
            error = caught
        told = self._exchange.collect((*own, ""))
        if error is not None:
            raise error
        for *_, refusal in told:
            if refusal:
                raise OSError(refusal)
        folder = folders.unfinished(self.path)
        files = {name: each for _, written, _ in told for name, each in written.items()}
        files |= self._part.write_metadata([results for results, *_ in told])
        files[folders.STATE] = folders.write_file(folder / folders.STATE, self._state)
        folders.commit(self.path, files)
        if self._keep is not None:
            folders.keep_newest(self.path.parent, self._keep, self.path)


class Saver:
    """Saves again and again in the background, and copies states into the same host memory each time.

    failed(why): called on the first process when a checkpoint could not be written; such a failure is not
    raised. seconds: the time that writing the last checkpoint took.
    """

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._buffers: dict[Any, Tensor] = {}
        self._last: Saving | None = None
        self.seconds = 0.0

    def begin(self, saving: Saving) -> None:
        """Copy the tensors of `saving`, and write them in the background. Before the next: `settle`."""
        saving.write_in_background(self._buffers, self._failed)
        self._last = saving

    def settle(self) -> str:
        """Wait for the last checkpoint; returns why it could not be written, or nothing. Collective."""
        last, self._last = self._last, None
        if last is None:
            return ""
        try:
            last.wait()
        except CheckpointError as error:
            return str(error)
        self.seconds = last.seconds
        return ""


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
    `wait()` of the returned Saving before the next save and at the end.

    Weights and optimizer states get the names of the whole model: `zbpp.load` takes them under any other cut,
    number of ranks, schedule and mesh. Raises CheckpointError, on every process, if the checkpoint can't be
    written; the folder's other checkpoints stay as they are.
    """
    saving = prepared(
        folder, pipeline, optimizer, step=step, masters=masters, keep=keep, info=info, states=states
    )
    if background:
        saving.write_in_background({})
    else:
        saving.write()
        saving.wait()
    return saving


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
    check_arguments(pipeline, optimizer, step, keep)
    path, tensors = folders.path_of(Path(folder), step), dict[str, Tensor]()
    part, facts, error = None, {}, ""
    is_first, is_prepared = place.is_first and place.rank == 0, False
    pipeline.settle()  # collective; before anything that may fail on one process alone
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
        part = Part(tensors, folders.unfinished(path), is_first=is_first)
    except CheckpointError as caught:
        error = _line(caught)
    except Exception as caught:  # of the user's objects, too: the other processes wait
        error = f"{path} can't be written: {type(caught).__name__}: {_line(caught)}"
    exchange = Exchange(place)
    told = place.gather((error, part and part.plan, facts))
    for refusal, *_ in told:
        if refusal:
            if is_prepared:
                folders.discard(folders.unfinished(path))
            raise CheckpointError(refusal)
    assert part is not None
    part.choose([plan for _, plan, _ in told], exchange.index)
    whole = _merged([each for *_, each in told], pipeline, step) | {"info": dict(info or {})}
    saving = Saving(path, part, exchange, place, json.dumps(whole), keep)
    last_of[pipeline] = saving.under_way
    return saving


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


def _named(error: BaseException) -> str:
    """What went wrong in a line. torch's zip writer hides a full disk behind an error of its own."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:  # a chain may be a circle
        chain.append(following)
        following = following.__cause__ or following.__context__
    known = next((each for each in chain if isinstance(each, OSError)), error)
    return f"{type(known).__name__}: {_line(known)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
