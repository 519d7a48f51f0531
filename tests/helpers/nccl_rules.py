"""A process-group backend, "strict", that keeps NCCL's rules on the CPU; gloo moves the bytes.

A program that is right on gloo may hang or compute with wrong numbers on NCCL. This backend makes the
differences visible:

- One order per communicator. What shares a communicator runs one at a time, in the order in which it was
  called: a receive that was posted ahead holds up all that comes after it. Point-to-point operations of two
  ranks share a communicator of these two, the group's collectives share another one.
- A communicator is made at its first use, and the call blocks the host until all of its ranks are there.
- An operation reads its input, and writes its result, at some later time: it begins after a random delay.
- A result is there after `wait`, not before. Until then the buffer holds NaN or other wrong numbers.
- A buffer belongs to its operation until `wait`: BufferError if the program has changed it in the meantime.
- NCCL has no 16-bit integers and no complex numbers, and takes no tensor with gaps: TypeError.
- What has started is a kernel, which holds the device until the other ranks come: `wait_for_device` waits for
  all that this process has started. So do a first product, a compiler and a tuner on a GPU.
- Both ends name the same operation, dtype and size, else RuntimeError; NCCL would hang or mix up bytes.

Where NCCL would hang this backend raises RuntimeError at the timeout. On NCCL `wait` makes the stream wait,
and here it makes the host wait. That is the same for a program with one stream: what it starts after the
`wait` starts behind it in either case.

What is not emulated: several streams; memory that is freed while a kernel on another stream reads it; kernels
of several communicators that compete for the device; the watchdog that ends the process; batches of
point-to-point operations (`batch_isend_irecv`), which zbpp does not use.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

NAME = "strict"
_LARGEST_DELAY = 0.002  # s
_FORBIDDEN = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128}
_INTERVAL = 0.05  # s
_LONGEST_END = 0.5  # s
_broken: list[Exception] = []  # the rules that this process has broken
_running: weakref.WeakSet[_Work] = weakref.WeakSet()  # what this process has started
_POISON = 0x7F  # in every byte: NaN as bfloat16, a huge number as a float or an integer


def register() -> None:
    """Let `init_process_group` know the backend."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StrictGroup, devices=["cpu"])


class _Work(dist.Work):
    """An operation under way. `wait` brings the result into the caller's tensors."""

    def __init__(self, name: str, outputs: Sequence[Tensor], timeout: float) -> None:
        super().__init__()
        self._name, self._timeout = name, timeout
        self._outputs = list(outputs)
        self._results: list[Tensor] = []
        self._error: BaseException | None = None
        self._done, self._is_delivered = threading.Event(), False
        _running.add(self)

    def finish(self, results: Sequence[Tensor] = (), error: BaseException | None = None) -> None:
        """The operation has ended; called by the communicator's thread."""
        self._results, self._error = list(results), error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.wait_for_end()
        if not self._is_delivered:
            self._is_delivered = True
            with torch.no_grad():
                for output, result in zip(self._outputs, self._results, strict=True):
                    output.detach().copy_(result)
        return True

    def wait_for_end(self) -> None:
        """Wait until the operation has ended; its result is still to be delivered."""
        end = time.monotonic() + self._timeout
        while not (self._done.wait(_INTERVAL) or _broken) and time.monotonic() < end:
            pass
        if _broken:  # what a program did wrong is told before what follows from it
            raise RuntimeError(f"{_broken[0]}") from _broken[0]
        if not self._done.is_set():
            raise RuntimeError(f"{self._name} did not end within {self._timeout} s: NCCL would hang here")
        if self._error is not None:
            raise RuntimeError(f"{self._name}: {self._error}") from self._error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """NCCL's is complete once the operation is queued. Callbacks run at once, on a stream behind it."""
        return _complete(self._outputs)


def _complete(tensors: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return future


def wait_for_device() -> None:
    """What `torch.cuda.synchronize()` does: wait until all that this process has started has ended."""
    for work in [*_running]:
        work.wait_for_end()
    _running.clear()


class _Communicator:
    """Runs operations one at a time, in the order in which they come."""

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout: timedelta) -> None:
        # This blocks until all ranks of the communicator have come.
        self.gloo = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
        self._random = random.Random(f"{name} {rank}")
        self._operations: queue.SimpleQueue[tuple[Callable[[], Sequence[Tensor]], _Work] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"strict {name}")
        self._thread.start()

    def start(self, operation: Callable[[], Sequence[Tensor]], work: _Work) -> _Work:
        self._operations.put((operation, work))
        return work

    def end(self) -> None:
        """Let the thread end once it has run what was started, and wait for that, though not for a hang.

        A thread that is still in gloo's C++ when Python ends takes the process with it.
        """
        self._operations.put(None)
        self._thread.join(_LONGEST_END)

    def _run(self) -> None:
        error: BaseException | None = None
        while (started := self._operations.get()) is not None:
            operation, work = started
            time.sleep(self._random.random() ** 3 * _LARGEST_DELAY)
            results: Sequence[Tensor] = ()
            if error is None:  # after an error the communicator is finished
                try:
                    with torch.no_grad():
                        results = operation()
                except BaseException as raised:
                    error = raised
                    if isinstance(raised, BufferError | TypeError):
                        _broken.append(raised)
            work.finish(results, error)


class StrictGroup(dist.ProcessGroup):
    """A group of the backend "strict"."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._limit = store, timeout
        self._place, self._num_places = rank, size
        self._all: _Communicator | None = None
        self._pairs: dict[int, _Communicator] = {}

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    # Point to point.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        link = self._pair(peer)
        work, unchanged = self._begin("send", [tensor], [])

        def operation() -> Sequence[Tensor]:
            unchanged()
            link.gloo.send([_facts(tensor)], int(peer > self._place), 0).wait()
            link.gloo.send([tensor.detach().clone()], int(peer > self._place), 0).wait()
            unchanged()
            return ()

        return link.start(operation, work)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        link = self._pair(peer)
        work, unchanged = self._begin("receive", [], [tensor])

        def operation() -> Sequence[Tensor]:
            facts, found = _facts(tensor), torch.empty_like(tensor)
            told = torch.empty_like(facts)
            link.gloo.recv([told], int(peer > self._place), 0).wait()
            if not torch.equal(told, facts):
                raise TypeError(f"sent (dtype, size) {told.tolist()} where {facts.tolist()} is received")
            link.gloo.recv([found], int(peer > self._place), 0).wait()
            unchanged()
            return [found]

        return link.start(operation, work)

    # Collectives.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        return self._collective("broadcast", tensors, tensors, lambda gloo, own: gloo.broadcast(own, opts))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        is_mean = opts.reduceOp == dist.ReduceOp.AVG  # gloo has none
        if is_mean:
            opts = dist.AllreduceOptions()

        def run(gloo: Any, own: list[Tensor]) -> Any:
            work = gloo.allreduce(own, opts)
            work.wait()
            if is_mean:
                own[0].div_(self._num_places)
            return work

        return self._collective("allreduce", tensors, tensors, run)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return works[-1] if len(works) == 1 else _All(works)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._collective("reduce", tensors, tensors, lambda gloo, own: gloo.reduce(own, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run(gloo: Any, found: list[Tensor]) -> Any:
            return gloo.allgather([found], [inputs[0].detach().contiguous()])

        return self._collective("allgather", inputs, outputs[0], run)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self._collective(
            "allgather", [given], [output], lambda gloo, found: gloo._allgather_base(found[0], given.detach())
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _All([self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        is_mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG

        def run(gloo: Any, found: list[Tensor]) -> Any:
            whole = given.detach().clone()
            gloo.allreduce([whole]).wait()
            part = whole.flatten().chunk(self._num_places)[self._place].view_as(output)
            found[0].copy_(part / self._num_places if is_mean else part)

        return self._collective("reduce_scatter", [given], [output], run)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _All([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "alltoall",
            [given],
            [output],
            lambda gloo, found: gloo.alltoall_base(found[0], given.detach(), output_sizes, input_sizes),
        )

    # Names of newer versions of torch.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = (
        _reduce_scatter_base,
        reduce_scatter_tensor_coalesced,
    )
    all_to_all_single = alltoall_base

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        flat = [tensor for some in inputs for tensor in some]
        return self._collective(
            "scatter", flat, outputs, lambda gloo, found: gloo.scatter(found, inputs, opts), is_checked=False
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        flat, own = [tensor for some in outputs for tensor in some], [inputs[0].detach().contiguous()]

        def run(gloo: Any, found: list[Tensor]) -> Any:
            return gloo.gather([found] if outputs else [], own, opts)

        return self._collective("gather", inputs, flat, run)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective("barrier", [], [], lambda gloo, _: gloo.barrier(), is_checked=False)

    # The end of a group.

    def abort(self) -> None:
        for communicator in (self._all, *self._pairs.values()):
            if communicator is not None:
                communicator.end()
        self._pairs.clear()
        self._all = None

    def shutdown(self) -> None:
        self.abort()

    # How operations begin.

    def _pair(self, peer: int) -> _Communicator:
        if peer not in self._pairs:
            low, high = sorted([self._place, peer])
            name = f"pair {low} {high}"
            rank = int(self._place > peer)
            self._pairs[peer] = _Communicator(self._store, name, rank, 2, self._limit)
        return self._pairs[peer]

    def _collective(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[Any, list[Tensor]], Any],
        *,
        is_checked: bool = True,
    ) -> dist.Work:
        """Start `run(gloo, found)`. found: tensors like the outputs, with their values if in place."""
        if self._all is None:
            self._all = _Communicator(self._store, "all", self._place, self._num_places, self._limit)
        communicator = self._all
        work, unchanged = self._begin(name, inputs, outputs)
        is_in_place = [any(each is output for each in inputs) for output in outputs]

        def operation() -> Sequence[Tensor]:
            if is_checked:
                _check_alike(communicator.gloo, name, inputs, self._num_places)
            unchanged()
            found = [
                output.detach().clone() if is_own else torch.empty_like(output)
                for output, is_own in zip(outputs, is_in_place, strict=True)
            ]
            ended = run(communicator.gloo, found)
            if ended is not None:
                ended.wait()
            unchanged()
            return found

        return communicator.start(operation, work)

    def _begin(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[_Work, Callable[[], None]]:
        """The operation's Work, and what raises BufferError if the program has changed a buffer since."""
        for tensor in (*inputs, *outputs):
            if tensor.dtype in _FORBIDDEN:
                raise TypeError(f"NCCL has no {tensor.dtype}")
            if not tensor.is_contiguous():
                raise TypeError(
                    f"{name}: NCCL takes no tensor with gaps, such as one of strides {tensor.stride()}"
                )
        with torch.no_grad():
            for output in outputs:
                if not any(_share_memory(output, each) for each in inputs):
                    _bytes_of(output).fill_(_POISON)
        before = [(each, _bytes_of(each).clone()) for each in (*inputs, *outputs)]

        def unchanged() -> None:
            if not all(torch.equal(_bytes_of(tensor), known) for tensor, known in before):
                raise BufferError(f"the buffer of a {name} was changed before its wait()")

        return _Work(name, outputs, self._limit.total_seconds()), unchanged


class _All(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """See _Work."""
        return _complete(self.result())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """FSDP2 gathers in place: each rank's part is a slice of the whole."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _facts(tensor: Tensor) -> Tensor:
    numbers = sorted(map(str, (each for each in vars(torch).values() if isinstance(each, torch.dtype))))
    return torch.tensor([numbers.index(str(tensor.dtype)), tensor.numel()])


def _check_alike(gloo: Any, name: str, inputs: Sequence[Tensor], size: int) -> None:
    """Raise TypeError unless all ranks make the same call."""
    mine = torch.cat([torch.tensor([_number_of(name), len(inputs)]), *map(_facts, inputs)])
    told = [torch.empty(8, dtype=torch.int64) for _ in range(size)]
    padded = torch.zeros(8, dtype=torch.int64)
    padded[: min(len(mine), 8)] = mine[:8]
    gloo.allgather([told], [padded]).wait()
    if any(not torch.equal(each, padded) for each in told):
        raise TypeError(f"{name}: the ranks make different calls: {[each.tolist() for each in told]}")


def _number_of(text: str) -> int:
    """The same on all processes, unlike Python's."""
    return int.from_bytes(text.encode()[:7], "big")
