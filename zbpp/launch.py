"""Starting a job's ranks on this machine from a script, without torchrun; and which error of a job is told.

A job whose ranks fail has one cause: the first error by the clock, since all others follow from it. A mistake
of the user is told in one line; a bug with the traceback of the rank that raised it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from zbpp.ranges import ConfigError
from zbpp.schedule import PlanError


class Refusal(ValueError):
    """What a job's ranks can't do, in a line."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def refusals() -> tuple[type[Exception], ...]:
    """The errors that are mistakes of the user: one line each says what to write instead."""
    from zbpp.runtime import AgreementError, BoundaryError, DeviceError  # torch: a second to import
    from zbpp.training.run_folder import FolderError

    return ConfigError, PlanError, Refusal, FolderError, AgreementError, BoundaryError, DeviceError


def wants_traceback() -> bool:
    """Whether the user wants to see where a mistake was noticed."""
    return bool(os.environ.get("ZBPP_TRACEBACK"))


def on_ranks(num_ranks: int, function: Callable[[Any], Any], config: Any) -> Any:
    """function(config) on `num_ranks` new processes of this machine; rank 0's result.

    `function` must be importable. One thread each, unless OMP_NUM_THREADS says otherwise. Raises Refusal
    if a rank refused its work, RankError if one failed otherwise.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id=uuid4().hex,
    )
    with TemporaryDirectory(prefix="zbpp-") as folder, _quiet():
        try:
            return elastic_launch(launch, _rank)(function, config, folder)[0]
        except ChildFailedError as failed:
            raise _cause(Path(folder), failed.failures) from None
        except SignalException as stopped:
            raise Refusal(f"stopped by {stopped.sigval.name}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of each rank that failed, and of each that it ended: our error says it once."""
    talking = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(talking)]
    loggers = [logging.getLogger(name) for name in names]  # each has a level of its own
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rank(function: Callable[[Any], Any], config: Any, folder: str) -> Any:
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    import torch

    torch.set_num_threads(threads)
    try:
        return function(config)
    except Exception as error:
        refused = isinstance(error, refusals()) and not wants_traceback()
        text = str(error) if refused else traceback.format_exc()
        failure = {"time": time.time(), "refused": refused, "text": text}
        _tell(Path(folder), os.environ["RANK"], json.dumps(failure))
        raise


def _tell(folder: Path, name: str, text: str) -> None:
    """Write a file that is there whole or not at all: this rank may be killed at any time."""
    draft = folder / f"{name}.draft"
    draft.write_text(text)
    draft.rename(folder / name)


def _cause(folder: Path, failures: Mapping[int, Any]) -> Exception:
    """What brought the job down: a rank that died without a word, else the first error by the clock."""
    for rank, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # which torch sends to the others
            return Refusal(f"rank {rank} died of {signal.Signals(-failure.exitcode).name}")
    told = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdigit()}
    if not told:
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        return Refusal(f"ranks ended without a word; exit codes by rank: {codes}")
    rank = min(told, key=lambda each: told[each]["time"])
    if told[rank]["refused"]:
        return Refusal(told[rank]["text"])
    return RankError(f"rank {rank} failed\n{told[rank]['text']}")
