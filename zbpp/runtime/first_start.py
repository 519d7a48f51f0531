"""A value that the first start of a job chose, kept for the starts that torchrun makes after it.

torchrun starts ranks again with the same command. What the command takes from the clock, such as the folder
of a run, would then be another one each time. torchrun's store outlives its ranks, so the value waits there.
"""

from __future__ import annotations

import os

from zbpp.runtime.joining import Rendezvous


def of_first_start(name: str, value: str, timeout: float) -> str:
    """The value that the first start of this job gave under this name; without torchrun, this value.

    value: not empty. timeout: seconds to wait for the store. To be called by one rank. Raises StartError if
    nobody answers as the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value
    store = Rendezvous.from_environment().store(timeout)
    kept: bytes = store.compare_set(f"zbpp/first/{name}", "", value)
    return kept.decode()
