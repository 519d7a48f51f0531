"""Start a job's ranks on this machine by torch's elastic_launch, in this process, without torchrun.

On a machine without CUDA a rank is a fork of this process, which has imported torch: a spawned rank takes
five seconds of a core for the same imports. With CUDA each rank is a new process, since a fork can't use
devices. If the job fails, the error that came first is raised here: a mistake in the config as a ConfigError,
another known failure as a Refusal of one line, a bug as a RankError with that rank's traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import active_children, parent_process
from threading import Thread, current_thread, main_thread
from typing import Any
from uuid import uuid4

from zbpp.ranges import ConfigError
from zbpp.schedule import PlanError
from zbpp.tracebacks import hide_own_frames, wants_traceback

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME = 0.5  # s: a signal that comes twice within this time is one
_POLL = 0.5  # s


class Refusal(RuntimeError):
    """A job that can't go on; the message says why, in a line."""


class RankDeath(Refusal):
    """A rank's process ended by a signal, or left early, and said nothing."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


class LostError(RuntimeError):
    """A rank waited for another one in vain; it is not the rank to blame."""


def mistakes() -> tuple[type[Exception], ...]:
    """The errors that are mistakes in the command line or in the config."""
    from zbpp.runtime import DeviceError  # torch: a second to import
    from zbpp.training.run_folder import FolderError

    return ConfigError, PlanError, DeviceError, FolderError


def failures() -> tuple[type[Exception], ...]:
    """The errors with which a run may end, and which one line explains."""
    from zbpp.autograd.weight_grads import ChangedInPlace
    from zbpp.checkpoints import CheckpointError
    from zbpp.runtime import AgreementError, BoundaryError, StartError
    from zbpp.training.non_finite import NonFiniteError
    from zbpp.training.optim.precision import LossScaleError
    from zbpp.training.run_folder import WriteError

    runtime = Refusal, AgreementError, BoundaryError, ChangedInPlace, StartError
    return *runtime, CheckpointError, LossScaleError, NonFiniteError, WriteError


def discard_output() -> None:
    """Send standard output to nowhere, once nobody reads it: Python flushes it again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_notes(error: Exception) -> str:
    """The error's text; on the lines after it, what was added on the way, such as the action's name."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def is_of_communication(error: Exception) -> bool:
    """Whether a message did not come; the rank that raises this is not the one to blame."""
    from zbpp.runtime import CommunicationError

    return isinstance(error, CommunicationError)


def prepare_ranks() -> None:
    """Keep this process free of OpenMP's threads, which a fork does not have. Call it before any work."""
    set_threads()
    import torch

    torch.set_num_threads(1)


def set_threads() -> bool:
    """Give this process the threads of every rank: OMP_NUM_THREADS, by default one.

    The number decides in which order a product is summed up, so one process and several ranks have the same
    losses to the last bit only with the same number. Returns whether it is the default.
    """
    is_default = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return is_default


def on_ranks(num_ranks: int, function: Callable[[Any], Any], argument: Any) -> Any:
    """Call function(argument) in `num_ranks` new processes of this machine; returns rank 0's result.

    `function` must be importable. A rank has one thread, unless OMP_NUM_THREADS says otherwise. SIGTERM,
    SIGINT and SIGUSR1 go to the ranks, which may end in order; a second SIGTERM or SIGINT ends the job at
    once. Raises ConfigError if a rank found a mistake in the config, Refusal if it could not go on,
    BrokenPipeError if nobody reads what a rank prints, RankError if a rank failed otherwise.
    """
    prepare_ranks()
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        start_method="spawn" if torch.accelerator.is_available() else "fork",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id=uuid4().hex,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    with _quiet(), _passing_signals_on() as passed:
        try:
            return elastic_launch(launch, _run_rank)(function, argument)[0]
        except ChildFailedError as failed:
            raise _first_error(failed.failures, passed) from None
        except SignalException as stopped:
            raise Refusal(f"stopped by {stopped.sigval.name}") from None


def end_with_launcher() -> None:
    """End this process as soon as torchrun, or the process that started it as a rank, is gone.

    An orphan would train on, into its successor's files. A process that nobody started as a rank stays. A
    loop of a user's own may call this, too.
    """
    started_by = parent_process()
    if started_by is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()  # with multiprocessing's forkserver another one than started_by

    def wait() -> None:
        while os.getppid() == parent and (started_by is None or started_by.is_alive()):
            time.sleep(_POLL)
        os._exit(1)

    Thread(target=wait, name="zbpp-launcher", daemon=True).start()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log lines about ranks that fail, and Python's warning of forks beside threads.

    A fork is safe here: no other thread of this process holds a lock that a rank uses.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def _passing_signals_on() -> Iterator[list[signal.Signals]]:
    """Signals that come inside go to all processes that this one started; gives the list of those passed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    passed: list[signal.Signals] = []
    ended_at: list[float] = []

    def take(number: int, _: object) -> None:
        received, now, ranks = signal.Signals(number), time.monotonic(), active_children()
        if received != signal.SIGUSR1:
            if not ranks or (ended_at and now - ended_at[0] > _SAME):
                raise SignalException(f"{received.name}", sigval=received)
            ended_at.append(now)
        passed.append(received)
        for rank in ranks:
            os.kill(rank.pid or 0, number)

    if current_thread() is not main_thread():
        yield passed
        return
    before = {each: signal.signal(each, take) for each in _SIGNALS}
    try:
        yield passed
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _run_rank(function: Callable[[Any], Any], argument: Any) -> Any:
    """What a rank does; torch writes the error that it raises into a file for the first process."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)  # a fork has the first process's handlers
    logging.disable(logging.NOTSET)
    end_with_launcher()
    set_threads()
    try:
        return function(argument)
    except BrokenPipeError:
        discard_output()
        raise
    except Exception as error:
        if wants_traceback():
            raise
        if is_of_communication(error):
            raise LostError(with_notes(error)) from error
        if isinstance(error, mistakes()):
            raise ConfigError(with_notes(error)) from error
        if isinstance(error, failures()):
            raise Refusal(with_notes(error)) from error
        hide_own_frames(error)
        raise


def _first_error(failures: Mapping[int, Any], passed: list[signal.Signals]) -> Exception:
    """The error that ended the job: a rank's death by a signal, else the first failure by the clock.

    failures: by rank, torch's ProcessFailure. passed: the signals that were passed on to the ranks; a rank
    that could not end in order died of one of them.
    """
    reports = {rank: each.message for rank, each in failures.items() if isinstance(each.message, dict)}
    if passed and not reports:
        return Refusal(f"stopped by {passed[0].name}")
    for rank, failure in failures.items():
        if rank in reports or failure.exitcode == -signal.SIGTERM:  # torch has ended it
            continue
        if failure.exitcode < 0:
            return RankDeath(f"rank {rank} died of {signal.Signals(-failure.exitcode).name}")
        return RankDeath(f"rank {rank} left with exit status {failure.exitcode} before the run's end")
    if not reports:
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        return RankDeath(f"ranks ended without a word; exit codes by rank: {codes}")
    # A rank that waited in vain says so; the one that failed says why.
    rank = min(reports, key=lambda each: ("LostError" in reports[each]["message"], failures[each].timestamp))
    kind, _, text = reports[rank]["message"].partition(": ")
    if kind == BrokenPipeError.__name__:
        return BrokenPipeError()
    if kind == ConfigError.__name__:
        return ConfigError(text)
    if kind in (Refusal.__name__, LostError.__name__):
        return Refusal(text)
    return RankError(f"rank {rank} failed\n{reports[rank]['extraInfo']['py_callstack']}")
