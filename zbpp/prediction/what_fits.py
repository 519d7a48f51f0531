"""After an out-of-memory error: what was predicted, and which switches would need less.

The prediction runs in a forked process, which ends after some seconds whatever it does: the failed process
may hold a lock, and nothing may keep it from ending. Stages run on fake tensors alone, without memory.
"""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from zbpp.config import ConfigError, TrainConfig
from zbpp.planning.memory_budget import RankMemory
from zbpp.prediction.predictor import Prediction, Predictor
from zbpp.prediction.switches import Changes, Switches, changed, title_of
from zbpp.render import in_bytes
from zbpp.schedule import PlanError, Timetable

_CLEARLY = 0.99  # of the peak as configured: a switch that saves less is not shown
_LONGEST = 160  # characters of a reason
_END = "."
_HINT = "`zbpp memory` with the arguments of this run shows each rank's curve, and each switch with its time"


class Failed(NamedTuple):
    """Where memory was missing.

    rank: of the pipeline. at: an action, `the update`, or "" for neither. limit: the bytes that each rank may
    hold; None if nobody knows.
    """

    rank: int
    at: str
    limit: float | None


def lines_in_time(
    config: TrainConfig, timetable: Timetable | None, failed: Failed, seconds: float
) -> list[str]:
    """What a forked process says within this time: see `lines`."""
    said = _said_by_fork(lambda: lines(config, timetable, failed), time.monotonic() + seconds)
    if said and said[-1] == _END:
        return said[:-1]
    return [*said, f"not predicted within {seconds:g} s: {'the rest' if said else 'anything'}; {_HINT}"]


def lines(config: TrainConfig, timetable: Timetable | None, failed: Failed) -> Iterator[str]:
    """The predicted peak of the rank; then each switch that would fit; then those that were refused.

    timetable: the run's; None: it is planned.
    """
    predictor = Predictor(fake_only=True)
    try:
        own = predictor.predict(config, timetable)
    except (ConfigError, PlanError) as error:
        yield f"not predicted: {error}"
    else:
        yield _own(own.ranks[failed.rank], failed, config.not_predicted)
        yield from _others(config, own, failed, predictor)
        yield _HINT
    yield _END


def _own(found: RankMemory, failed: Failed, not_predicted: list[str]) -> str:
    at = [str(each) for each in found.actions]
    here = ""
    if failed.at in at:
        here = f", {in_bytes(found.during[at.index(failed.at)])} in {failed.at}"
    elif failed.at:
        here = f", {in_bytes(found.update)} in {failed.at}"
    left_out = f" (without what {', '.join(not_predicted)} changes)" if not_predicted else ""
    return f"predicted for this rank{left_out}: {in_bytes(found.peak)} at most, in {found.peak_at}{here}"


def _others(config: TrainConfig, own: Prediction, failed: Failed, predictor: Predictor) -> Iterator[str]:
    """Yields a line as soon as a switch is known to fit: the time may be over before the next is tried."""
    most = max(each.peak for each in own.ranks)
    limit = "less" if failed.limit is None else f"at most {in_bytes(failed.limit)}"
    refused, found = [], False
    for changes in _candidates(config):
        try:
            ranks = predictor.predict(changed(config, changes), _same(own.timetable, changes)).ranks
        except (ConfigError, PlanError) as error:
            refused.append(f"not predicted: {title_of(changes)} ({str(error)[:_LONGEST]})")
            continue
        peak = max(each.peak for each in ranks)
        if peak <= (most * _CLEARLY if failed.limit is None else failed.limit):
            if not found:
                yield f"the fullest rank, {in_bytes(most)} as configured, would need {limit} with:"
            found = True
            yield f"- {title_of(changes)}: {in_bytes(peak)}"  # torchrun drops lines that begin with a space
    if not found:
        yield f"no switch by itself lets the fullest rank, {in_bytes(most)} as configured, need {limit}"
    yield from refused


def _same(timetable: Timetable, changes: Changes) -> Timetable | None:
    """The run's timetable, unless the changes need another one."""
    replans = any(key.startswith(("schedule.", "parallel.", "num_")) for key in changes)
    return None if replans else timetable


def _candidates(config: TrainConfig) -> list[Changes]:
    """The changes that may save memory, those of one switch first."""
    single = [each for choices in Switches(config).choices() for each in choices]
    if config.memory.limit is None:  # `auto` needs one
        single = [each for each in single if each != {"memory.recompute": "auto"}]
    memory = [
        each for each in single if "memory.gradient_release" not in each and "schedule.name" not in each
    ]
    others = [each for each in single if each not in memory]
    if config.schedule.timetable is None:
        if config.microbatch_size % 2 == 0:
            twice = 2 * (config.batch_size // config.microbatch_size)
            memory.append({"microbatch_size": config.microbatch_size // 2, "num_microbatches": twice})
        memory.append({"parallel.num_processes": 2 * (config.parallel.num_processes or 1)})
    return [*memory, *others]


# ---------------------------------------------------------------- in a process of its own


def _said_by_fork(function: Callable[[], Iterator[str]], end: float) -> list[str]:
    """The texts that a function yields in a forked process; those until `end`, by time.monotonic."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking with threads: the child uses none of their locks
        child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            warnings.simplefilter("ignore")
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            for text in function():
                os.write(writer, text.encode() + b"\0")
        finally:
            os._exit(0)
    os.close(writer)
    said = _read_until(reader, end)
    os.close(reader)
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [text.decode() for text in said.split(b"\0")[:-1]]


def _read_until(reader: int, end: float) -> bytes:
    said = b""
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        part = os.read(reader, 65536)
        if not part:
            break
        said += part
    return said


def with_processes(config: TrainConfig, num_processes: int) -> TrainConfig:
    """The config with the number of processes that run, which a prediction needs."""
    return replace(config, parallel=replace(config.parallel, num_processes=num_processes))
