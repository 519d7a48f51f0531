"""Calls of one function, each in a process of its own: searches that run at the same time.

The processes import zbpp.planning, no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class _Told(NamedTuple):
    """What a call told on its way."""

    values: tuple[Any, ...]


class _Returned(NamedTuple):
    """The result of a call."""

    value: Any


def side_by_side(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], heard: Callable[..., None]
) -> list[Result]:
    """Return function(*each, tell) for each of the arguments, in their order.

    Whenever a call tells something by tell(*values), heard(its number, *values) is called here.
    An error of a call is raised here. The processes end with this function, however it ends: also by Ctrl-C.
    """
    # Not a fork: the copy of a lock that the thread of a progress bar holds would never be free.
    context = get_context("spawn")
    processes, pipes = [], []
    results: dict[int, Result] = {}
    try:
        for each in arguments:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_call, args=(function, each, there), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of what `here` receives
            processes.append(process)
            pipes.append(here)
        while len(results) < len(arguments):
            open_pipes = {pipe: number for number, pipe in enumerate(pipes) if number not in results}
            ready = wait(list(open_pipes))
            for pipe, number in open_pipes.items():
                if pipe in ready:
                    match _received(pipe):
                        case _Told(values):
                            heard(number, *values)
                        case _Returned(value):
                            results[number] = value
                        case error:
                            raise error
        return [results[number] for number in range(len(arguments))]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipe: Connection) -> _Told | _Returned | Exception:
    try:
        message: _Told | _Returned | Exception = pipe.recv()
        return message
    except EOFError:
        return RuntimeError("a process that searches was killed; is there too little memory?")


def _call(function: Callable[..., object], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Run in the new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, which ends this process
    answer: _Returned | Exception
    try:
        answer = _Returned(function(*arguments, lambda *values: pipe.send(_Told(values))))
    except BrokenPipeError:
        return  # the caller is gone
    except Exception as error:
        answer = error
    pipe.send(answer)
