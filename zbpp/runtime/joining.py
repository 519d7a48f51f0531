"""How a process finds the others of its job, and what it says if they don't come or don't fit.

All ranks meet in the job's store before any process group is made: a process group that waits for a
missing rank only knows a key of the store. Each rank puts a question there, under a random name, with the
versions of what it runs. Rank 0 answers the questions until every rank has confirmed, then says to all
whether the job can begin.

A restarted job finds in the store what its predecessor wrote. So the answer is the name of this attempt,
under which everything else is written. A dead rank's question is never confirmed; the new rank overwrites it.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sys
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch._C._distributed_c10d import TCPStore

from zbpp.runtime.roll_call import ranks_text

_POLL = 0.01  # s
_RETRY = 0.1  # s
_ANSWER = 2.0  # s that a store has for its answer, at least, if it listened late
_LINGER = 0.5  # s in which the others can read why the job does not begin: rank 0 may hold the store
_FINE = "fine"


class StartError(ValueError):
    """The job can't begin: what is missing, and what to do."""


class Rendezvous(NamedTuple):
    """Where the job meets, as torchrun tells its ranks."""

    rank: int
    size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """Raises StartError for a variable that is missing or makes no sense."""
        (rank, size), port = rank_and_size(), _number("MASTER_PORT")
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if name in os.environ:
                _number(name)
        if not 0 < port < 2**16:
            raise StartError(f"MASTER_PORT={port}: {_expected('a port from 1 to 65535')}")
        return cls(rank, size, _variable("MASTER_ADDR"), port)

    def store(self, timeout: float) -> Any:
        """The job's store; rank 0's process holds it, or torchrun's. Raises StartError if nobody does."""
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_holder = self.rank == 0 and not is_torchruns
        end = monotonic() + timeout
        if not is_holder:
            self._await_listener(end, timeout)
        found: list[Any] = []
        failures: list[Exception] = []

        def connect() -> None:
            limit = timedelta(seconds=timeout)
            try:
                found.append(
                    TCPStore(self.address, self.port, self.size, is_holder, limit, wait_for_workers=False)
                )
            except Exception as error:
                failures.append(error)

        thread = Thread(target=connect, daemon=True)  # a foreign process may accept, and never answer
        thread.start()
        thread.join(max(end - monotonic(), _ANSWER))
        if thread.is_alive():
            atexit.register(_exit_at_once)
        if not found:
            told = failures if is_holder else []  # somebody listens there
            raise StartError(self._refusal(timeout, *told)) from next(iter(failures), None)
        return found[0]

    def _await_listener(self, end: float, timeout: float) -> None:
        """Wait until somebody listens at the address: torch would try for twice its timeout, and show C++.

        Raises StartError if nobody does in time.
        """
        while True:
            try:
                socket.create_connection((self.address, self.port), max(end - monotonic(), _POLL)).close()
                return
            except OSError as error:
                if monotonic() >= end:
                    raise StartError(self._refusal(timeout, error)) from None
            sleep(_RETRY)

    def _refusal(self, timeout: float, failure: Exception | None = None) -> str:
        where = f"{self.address}:{self.port}"
        if failure is None:
            return (
                f"rank {self.rank}: what listens at {where} does not answer as a job's store: another "
                "program holds this port. Choose another MASTER_PORT (torchrun: --master-port; --standalone "
                "finds one)"
            )
        if "EADDRINUSE" in str(failure):
            return (
                f"MASTER_PORT={self.port} is in use on this machine, maybe by an earlier job: choose another "
                "one (torchrun: --master-port; --standalone finds one)"
            )
        first_line = str(failure).partition("\n")[0]
        return (
            f"rank {self.rank} of {self.size} reached nobody at {where} within {timeout:g} s "
            "(parallel.timeout): "
            f"rank 0 never came, or MASTER_ADDR, MASTER_PORT or a firewall is wrong ({first_line})"
        )


def _exit_at_once() -> None:
    """End the process at its end: torch's thread, which waits for an answer, would not let it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE; (0, 1) for a process that no launcher has started. May raise StartError."""
    if "RANK" not in os.environ:
        return 0, 1
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise StartError(f"RANK={rank} with WORLD_SIZE={size}: {_expected(f'RANK from 0 to {size - 1}')}")
    return rank, size


def join(store: Any, here: Rendezvous, facts: dict[str, str], timeout: float) -> str:
    """Wait until all ranks are here; returns a name for this start of the job, that no earlier start had.

    facts: must be the same on all ranks. Raises StartError on every rank if one never comes, or if they
    differ.
    """
    told = json.dumps(facts)
    end = monotonic() + timeout
    if here.rank > 0:
        question = uuid4().hex
        store.set(f"zbpp/ask/{here.rank}", f"{question} {told}")
        attempt = _awaited(store, f"zbpp/answer/{question}", here, end, timeout)
        store.set(f"zbpp/confirm/{attempt}/{here.rank}", told)
        verdict = _awaited(store, f"zbpp/verdict/{attempt}", here, end, timeout)
    else:
        attempt = uuid4().hex
        verdict = _verdict(store, here.size, attempt, told, end, timeout)
        store.set(f"zbpp/verdict/{attempt}", verdict)
        sleep(0 if verdict == _FINE else _LINGER)
    if verdict != _FINE:
        raise StartError(verdict)
    return attempt


def versions() -> dict[str, str]:
    """What must be the same on all ranks, whatever the config says."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "zbpp": str(package.__version__),
    }


def _verdict(store: Any, size: int, attempt: str, told: str, end: float, timeout: float) -> str:
    """Rank 0's: whether all ranks are here, and run the same."""
    store.set("zbpp/ask/0", f"- {told}")
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
    return _difference([json.loads(each) for each in (told, *confirmed)]) or _FINE


def _difference(facts: list[dict[str, str]]) -> str:
    from zbpp.runtime.world import AgreementError, check_equal

    try:
        check_equal("programs", facts)
    except AgreementError as error:
        return f"{error}\nstart all ranks in the same environment"
    return ""


def _awaited(store: Any, key: str, here: Rendezvous, end: float, timeout: float) -> str:
    """A value of the store. Raises StartError, which names the ranks that have not come."""
    try:
        while monotonic() < end + 1:  # rank 0 speaks first
            if store.check([key]):
                return str(store.get(key).decode())
            sleep(_POLL)
        missing = [other for other in range(here.size) if not store.check([f"zbpp/ask/{other}"])]
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise StartError(
            f"the process with the job's store is gone, rank 0 or torchrun: {first_line}"
        ) from error
    raise StartError(_never_came(missing or [0], here.size, timeout))


def _never_came(ranks: list[int], size: int, timeout: float) -> str:
    return (
        f"{ranks_text(ranks)} of {size} never came within {timeout:g} s (parallel.timeout): look whether "
        f"{'their processes run' if len(ranks) > 1 else 'its process runs'}, with the same MASTER_ADDR, "
        "MASTER_PORT and WORLD_SIZE; what takes longer at the start needs a longer timeout"
    )


def _number(name: str) -> int:
    text = _variable(name)
    if not text.isdecimal():
        raise StartError(f"{name}={text}: {_expected('a whole number')}")
    return int(text)


def _variable(name: str) -> str:
    if not os.environ.get(name):
        raise StartError(f"RANK is set, and {name} is not: {_expected(name)}")
    return os.environ[name]


def _expected(what: str) -> str:
    launchers = "torchrun and `zbpp train -n 4` set all of it"
    return f"a rank needs {what}. {launchers}; for a job of one process unset RANK"
