"""Start a job's ranks on this machine, without torchrun; if the job fails, find the error that came first.

This is a rank's death by a signal, else the error with the earliest time; the others followed from it. A
mistake of the user is reported in one line, a bug with the traceback of the rank that raised it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from zbpp import fork_server
from zbpp.ranges import ConfigError
from zbpp.schedule import PlanError

_BEGUN = "begun"  # a file that exists when a rank has begun


class Refusal(ValueError):
    """What was asked for can't be done; the message says why, in a line."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def refusals() -> tuple[type[Exception], ...]:
    """The errors that are mistakes of the user: one line each says what to write instead."""
    from zbpp.checkpoints import CheckpointError
    from zbpp.runtime import (  # torch: a second to import
        AgreementError,
        BoundaryError,
        DeviceError,
        StartError,
    )
    from zbpp.runtime.memory.weight_buffers import OffloadError
    from zbpp.training.leaving import MetricError
    from zbpp.training.non_finite import NonFiniteError
    from zbpp.training.optim.precision import LossScaleError
    from zbpp.training.run_folder import FolderError

    training = FolderError, LossScaleError, MetricError, NonFiniteError
    return (
        ConfigError,
        PlanError,
        Refusal,
        CheckpointError,
        *training,
        AgreementError,
        BoundaryError,
        DeviceError,
        StartError,
        OffloadError,
    )


def wants_traceback() -> bool:
    """Whether the user wants to see where a mistake was noticed."""
    return bool(os.environ.get("ZBPP_TRACEBACK"))


def discard_output() -> None:
    """Send standard output to nowhere, once nobody reads it: Python flushes it again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_ranks() -> str:
    """Let ranks begin at once later, if that is possible; returns how multiprocessing starts them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return fork_server.start_method()


def on_ranks(
    num_ranks: int, function: Callable[[Any], Any], argument: Any, *, passes_signals: bool = False
) -> Any:
    """Call function(argument) in `num_ranks` new processes of this machine; returns rank 0's result.

    `function` must be importable. A rank has one thread, unless OMP_NUM_THREADS says otherwise.
    passes_signals: SIGTERM, SIGINT and SIGUSR1 go to the ranks, which may end in order; a second SIGTERM or
    SIGINT ends the job at once. Without it the first one does.
    Raises Refusal if a rank refused its work, BrokenPipeError if nobody reads what a rank prints, RankError
    if a rank failed otherwise.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zbpp.pass_signals import passing_signals

    start_method = prepare_ranks()
    signals = "SIGHUP,SIGQUIT" if passes_signals else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    with (
        TemporaryDirectory(prefix="zbpp-") as folder,
        _without_torchs_log(),
        _same_package(),
        passing_signals(Path(folder) / _BEGUN) if passes_signals else nullcontext() as passed,
    ):
        launch = LaunchConfig(
            start_method=start_method,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            run_id=uuid4().hex,
            signals_to_handle=signals,
        )
        try:
            return elastic_launch(launch, _run_rank)(function, argument, folder)[0]
        except ChildFailedError as failed:
            raise _first_error(Path(folder), failed.failures, passed.name if passed else None) from None
        except SignalException as stopped:
            raise Refusal(f"stopped by {stopped.sigval.name}") from None


@contextmanager
def _same_package() -> Iterator[None]:
    """New processes import zbpp from where this one did, not a zbpp that lies in the current folder.

    A new process gets this one's sys.path, in which the current folder stands first, for the user's classes.
    So this package's folder goes before it, until the new process has imported zbpp: see _run_rank.
    """
    home = str(Path(__file__).parents[1])
    sys.path.insert(0, home)
    try:
        yield
    finally:
        sys.path.remove(home)


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Silence torch's log lines about ranks that failed or that torch ended: our error reports it, once."""
    prefixes = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    loggers = [logging.getLogger(name) for name in names]  # each has a level of its own
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _run_rank(function: Callable[[Any], Any], argument: Any, folder: str) -> Any:
    (Path(folder) / _BEGUN).touch()
    fork_server.begin_as_a_rank()
    del sys.path[0]  # _same_package put it there; the user's classes are found as in the first process
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        return function(argument)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # torch would take it for success
    except Exception as error:
        kind, text = "bug", traceback.format_exc()
        if isinstance(error, BrokenPipeError):
            kind = "broken pipe"
            discard_output()
        elif is_of_communication(error) and not wants_traceback():
            kind, text = "lost", with_notes(error)
        elif isinstance(error, refusals()) and not wants_traceback():
            kind, text = "refusal", with_notes(error)
        failure = {"time": time.time(), "kind": kind, "text": text}
        try:
            _write_at_once(Path(folder), os.environ["RANK"], json.dumps(failure))
        except OSError as unwritten:  # a full disk: the launcher learns the exit status alone
            told = f"rank {os.environ['RANK']} failed ({unwritten}, so it says so here):"
            print(told, text, sep="\n", file=sys.stderr, flush=True)
        raise


def with_notes(error: Exception) -> str:
    """The error's text; on the lines after it, what was added on the way, such as the action's name."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def is_of_communication(error: Exception) -> bool:
    """Whether a message did not come; the rank that raises this is not the one to blame."""
    from zbpp.runtime import CommunicationError

    return isinstance(error, CommunicationError)


def _write_at_once(folder: Path, name: str, text: str) -> None:
    """Write a file that exists whole or not at all: this rank may be killed at any time."""
    draft = folder / f"{name}.draft"
    draft.write_text(text)
    draft.rename(folder / name)


def _first_error(folder: Path, failures: Mapping[int, Any], stopped_by: str | None = None) -> Exception:
    """The error that ended the job: a rank killed by a signal, else the first failure by the clock.

    stopped_by: the signal that was passed on to the ranks. Those that could not end in order died of it.
    """
    if stopped_by is not None:
        number = signal.Signals[stopped_by]
        if any(failure.exitcode in (-number, 128 + number) for failure in failures.values()):
            return Refusal(f"stopped by {stopped_by}")
    written = {
        int(path.name): json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdigit()
    }
    for rank, failure in failures.items():  # a rank that its watchdog has ended
        if rank not in written and isinstance(getattr(failure, "message", None), dict):
            text = failure.message["message"]
            written[rank] = {"time": failure.timestamp, "kind": "refusal", "text": text}
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return Refusal(f"rank {rank} died of {signal.Signals(-failure.exitcode).name}")
        if failure.exitcode > 0 and rank not in written:  # os._exit in code of the user's
            return Refusal(f"rank {rank} left with exit status {failure.exitcode} before the run's end")
    if not written:
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        return Refusal(f"ranks ended without a word; exit codes by rank: {codes}")
    # The others say that a message did not come; a rank that failed says why.
    rank = min(written, key=lambda each: (written[each]["kind"] == "lost", written[each]["time"]))
    kind, text = written[rank]["kind"], written[rank]["text"]
    if kind == "broken pipe":
        return BrokenPipeError()
    return RankError(f"rank {rank} failed\n{text}") if kind == "bug" else Refusal(text)
