"""How a process finds the others of its job, and what it says if they don't come or don't fit.

torch reads the environment and opens the job's store. All ranks meet there before any process group is made:
a process group that waits for a missing rank only knows a key of the store. Each rank puts a question there,
under a random name, with the versions of what it runs. Rank 0 answers the questions until every rank has
confirmed, then says to all whether the job can begin.

A restarted job finds in the store what its predecessor wrote. So the answer is the name of this attempt,
under which everything else is written. A dead rank's question is never confirmed; the new rank overwrites it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zbpp.job.agreement import AgreementError, check_equal

_POLL = 0.01  # s
_LINGER = 0.5  # s in which the others can read why the job does not begin: rank 0 may hold the store
_FINE = "fine"


class StartError(ValueError):
    """The job can't begin: what is missing, and what to do."""


def rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE; (0, 1) for a process that no launcher has started."""
    if "RANK" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))


def job_store(timeout: float) -> tuple[Any, int, int]:
    """(the job's store, rank, number of ranks). Raises StartError if the job can't be found."""
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return store, rank, size
    except (ValueError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise StartError(
            f"no job at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {first_line}. "
            "torchrun and `zbpp train -n 4` set all that a rank needs (torchrun --standalone finds a free "
            "port); for a job of one process unset RANK"
        ) from error


def of_first_start(name: str, value: str, timeout: float) -> str:
    """The value that the first start of this job gave under this name; without torchrun, this value.

    torchrun starts ranks again with the same command, and what the command takes from the clock, such as the
    folder of a run, would be another one each time. torchrun's store outlives its ranks. value: not empty. To
    be called by one rank. Raises StartError if nobody answers as the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value
    store, _, _ = job_store(timeout)
    kept: bytes = store.compare_set(f"zbpp/first/{name}", "", value)
    return kept.decode()


def join(store: Any, rank: int, size: int, facts: dict[str, str], timeout: float) -> str:
    """Wait until all ranks are here; returns a name for this start of the job, that no earlier start had.

    facts: must be the same on all ranks. Raises StartError on every rank if one never comes, or if they
    differ.
    """
    own_facts = json.dumps(facts)
    end = monotonic() + timeout
    if rank > 0:
        question = uuid4().hex
        store.set(f"zbpp/ask/{rank}", f"{question} {own_facts}")
        attempt = _awaited(store, f"zbpp/answer/{question}", size, end, timeout)
        store.set(f"zbpp/confirm/{attempt}/{rank}", own_facts)
        verdict = _awaited(store, f"zbpp/verdict/{attempt}", size, end, timeout)
    else:
        attempt = uuid4().hex
        verdict = _verdict(store, size, attempt, own_facts, end, timeout)
        store.set(f"zbpp/verdict/{attempt}", verdict)
        sleep(0 if verdict == _FINE else _LINGER)
    if verdict != _FINE:
        raise StartError(verdict)
    return attempt


class Meeting:
    """All ranks of the job, which exchange texts before any process group is made.

    Keep it until the process group is made: rank 0 may hold the job's store. Raises StartError if a rank
    never comes.
    """

    def __init__(self, timeout: float) -> None:
        self._store, self._rank, self._size = job_store(timeout)
        self._timeout = timeout
        attempt = join(self._store, self._rank, self._size, versions(), timeout)
        self._texts = PrefixStore(f"zbpp/{attempt}", self._store)

    def of_rank_0(self, name: str, text: str) -> str:
        """Rank 0's text, on every rank. text: ignored on the others."""
        if self._rank == 0:
            self._texts.set(name, text)
        return self._of(0, name)

    def gather(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self._texts.set(f"{name}/{self._rank}", text)
        return [self._of(rank, f"{name}/{rank}") for rank in range(self._size)]

    def _of(self, rank: int, key: str) -> str:
        try:
            self._texts.wait([key], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise StartError(_never_came([rank], self._size, self._timeout)) from error
        return str(self._texts.get(key).decode())


def versions() -> dict[str, str]:
    """What must be the same on all ranks, whatever the config says."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "zbpp": str(package.__version__),
    }


def _verdict(store: Any, size: int, attempt: str, own_facts: str, end: float, timeout: float) -> str:
    """Rank 0's: whether all ranks are here, and run the same."""
    store.set("zbpp/ask/0", f"- {own_facts}")
    waiting = list(range(1, size))
    while waiting and monotonic() < end:
        for other in waiting:
            if store.check([f"zbpp/ask/{other}"]):
                question = store.get(f"zbpp/ask/{other}").decode().partition(" ")[0]
                store.set(f"zbpp/answer/{question}", attempt)
        sleep(_POLL)
        waiting = [other for other in waiting if not store.check([f"zbpp/confirm/{attempt}/{other}"])]
    if waiting:
        return _never_came(waiting, size, timeout)
    confirmed = [store.get(f"zbpp/confirm/{attempt}/{other}").decode() for other in range(1, size)]
    return _difference([json.loads(each) for each in (own_facts, *confirmed)]) or _FINE


def _difference(facts: list[dict[str, str]]) -> str:
    try:
        check_equal("programs", facts)
    except AgreementError as error:
        return f"{error}\nstart all ranks in the same environment"
    return ""


def _awaited(store: Any, key: str, size: int, end: float, timeout: float) -> str:
    """A value of the store. Raises StartError, which names the ranks that have not come."""
    try:
        while monotonic() < end + 1:  # rank 0 speaks first
            if store.check([key]):
                return str(store.get(key).decode())
            sleep(_POLL)
        missing = [other for other in range(size) if not store.check([f"zbpp/ask/{other}"])]
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise StartError(
            f"the process with the job's store is gone, rank 0 or torchrun: {first_line}"
        ) from error
    raise StartError(_never_came(missing or [0], size, timeout))


def _never_came(ranks: list[int], size: int, timeout: float) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"{who} of {size} never came within {timeout:g} s (parallel.timeout): look whether "
        f"{'their processes run' if len(ranks) > 1 else 'its process runs'}, with the same MASTER_ADDR, "
        "MASTER_PORT and WORLD_SIZE; what takes longer at the start needs a longer timeout"
    )
