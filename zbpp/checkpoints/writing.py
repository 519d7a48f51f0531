"""A checkpoint that is being written: tensors by torch's DCP, in a thread if wanted, then the other files."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.futures import Future

from zbpp.checkpoints import folders
from zbpp.checkpoints.folders import CheckpointError
from zbpp.devices import current_device, empty_host_cache, is_accelerator, make_current, synchronize
from zbpp.error_text import chain_of, shown_path
from zbpp.job.agreement import refuse_together
from zbpp.runtime.processes.dtensors import local_of
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.tracebacks import hiding_own_frames

Failed = Callable[[str], None]

# A job of one rank has no process group: DCP says so each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class Saving:
    """A checkpoint that is being written. path: its final folder. is_awaited: whether `wait` was called."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        facts: str,
        keep: int | None,
        place: MeshPosition,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.path = path
        self._tensors, self._writer = dict(tensors), FolderWriter(path, facts, keep)
        self._place, self._group = place, group
        self._error, self.is_awaited = "", False
        self._failed: Failed | None = None
        self._thread: threading.Thread | None = None

    def write(self) -> None:
        """Write now. The next call is `wait`."""
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
            if is_first(self._place):
                folders.discard(folders.unfinished(self.path))
                if self._failed is not None:
                    self._failed(self._error)
        self._tensors = {}

    def write_in_background(self, failed: Failed | None = None) -> None:
        """Copy the tensors to host memory, then write in a thread.

        failed(why): called on the first process, from the thread, if writing fails.
        """
        self._tensors, self._failed = _on_host(self._tensors), failed
        # Not a daemon: a process that ends, ends after its part is written.
        name = f"zbpp {self.path.name}"
        self._thread = threading.Thread(target=self._write_in_thread, args=(current_device(),), name=name)
        self._thread.start()

    def _write_in_thread(self, device: torch.device) -> None:
        """device: the current one of the thread that saves. DCP waits for the writing thread's own."""
        make_current(device)
        self.write()
        empty_host_cache()  # the copies were pinned

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is written, or can't be."""
        return self._thread is None or not self._thread.is_alive()

    @hiding_own_frames
    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Collective.

        Raises CheckpointError, on every process, if a process could not write: then nothing is left of it.
        """
        self.is_awaited = True
        if self._thread is not None:
            self._thread.join()
        refuse_together(self._error, self._place.gather, CheckpointError)
        return self.path


def is_first(place: MeshPosition) -> bool:
    """Whether this is the first process of the mesh, which writes what all share."""
    return place.is_first and place.rank == 0


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, so that training may change the tensors."""
    copies = {}
    for name, tensor in tensors.items():
        local = local_of(tensor.detach())
        copy = torch.empty_like(local, device="cpu", pin_memory=is_accelerator(local.device))
        copy.copy_(local, non_blocking=True)
        if local is not tensor and hasattr(tensor, "device_mesh"):
            # Not from_local, which would move the copy back to the mesh's device.
            copy = type(tensor.detach())(copy, tensor._spec, requires_grad=False)  # type: ignore[call-overload, attr-defined]  # DTensor's
        copies[name] = copy
    for device in {each.device for each in tensors.values()}:
        synchronize(device)
    return copies


def _reason(error: BaseException) -> str:
    """What went wrong in a line."""
    if isinstance(error, CheckpointException):  # of one or more processes
        error = next((each for each, _ in error.failures.values()), error)
    return f"{type(error).__name__}: {line_of(error)}"


def line_of(error: BaseException) -> str:
    """The error's text in a line."""
    return " ".join(str(error).split())[:500] or type(error).__name__


# ----------------------------------------------------------------
# torch's writer of files, which at the end makes the checkpoint whole.


class _Results(NamedTuple):
    """What a process has written: DCP's results (the place of each tensor), and the sizes of its files."""

    results: list[Any]
    sizes: dict[str, int]


@contextmanager
def _raising_os_error() -> Iterator[None]:
    """Raise the OSError in the place of an error that it led to.

    torch's zip writer hides a full disk behind an error of its own, and DCP sends that error to the other
    processes without its chain.
    """
    try:
        yield
    except Exception as error:
        known = next((each for each in chain_of(error) if isinstance(each, OSError)), None)
        if known is None:
            raise
        raise known from None


class FolderWriter(FileSystemWriter):
    """path: of the finished checkpoint. facts: the text of state.json. keep: as in `save`."""

    def __init__(self, path: Path, facts: str, keep: int | None) -> None:
        super().__init__(folders.unfinished(path), overwrite=False)
        self._final, self._facts, self._keep = path, facts, keep

    def storage_meta(self) -> StorageMeta:
        """No paths: a checkpoint may be moved."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this process's part."""
        with _raising_os_error():
            results = super().write_data(plan, planner).value()
        names = {each.storage_data.relative_path for each in results}
        done: Future[Any] = Future()
        done.set_result(_Results(results, {name: self._size_of(name) for name in names}))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write what is left, on the first process, and give the checkpoint its name."""
        sizes = {name: size for part in results for name, size in part.sizes.items()}
        with _raising_os_error():
            super().finish(metadata, [part.results for part in results])
        sizes[folders.METADATA] = self._size_of(folders.METADATA)
        state = folders.unfinished(self._final) / folders.STATE
        sizes[folders.STATE] = folders.write_file(state, self._facts)
        folders.commit(self._final, sizes)
        if self._keep is not None:
            folders.keep_newest(self._final.parent, self._keep, self._final)

    def _size_of(self, name: str) -> int:
        return (folders.unfinished(self._final) / name).stat().st_size
