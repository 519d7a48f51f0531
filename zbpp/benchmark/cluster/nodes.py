"""Where the nodes of a cluster check meet, and how many processes each has.

Arguments say both; without them the environment of Slurm or of a PyTorchJob does.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import NoReturn

from zbpp.benchmark.cluster.settings import PARTS

PORT = 29600
JOIN_TIMEOUT = 300.0
_KINDS = ("gpu", "cpu", "auto")  # as torchrun counts processes: one per GPU, one per CPU core, either
_MOST_PROCESSES = 4096
_AGAIN = 2.0  # s between two lookups of a name
_UNMET = re.compile("Rendezvous(Timeout|Connection|Closed|StateE)")  # torchrun's errors


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        refuse(message)


def refuse(message: str) -> NoReturn:
    """End the program with status 2 and one line."""
    print(f"cluster_check: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """number: of nodes. head, port: where all meet; each job takes the next port.

    processes: on each node, as torchrun takes it. join_timeout: seconds that a node waits for the others.
    rank_timeout: seconds that a rank waits for another; the nodes of a failed job end that far apart.
    """

    number: int
    head: str
    port: int
    processes: str
    join_timeout: float
    rank_timeout: float = 0.0

    def place(self, job: int) -> str:
        """`2 nodes at node-1:29600`."""
        return f"{self.number} nodes at {self.head}:{self.port + job}"

    def patience(self, job: int) -> float:
        """Seconds that a node waits for the others before this job."""
        return self.join_timeout + (self.rank_timeout if job else 0.0)

    def torchrun(self, job: int, name: str) -> list[str]:
        """torchrun's arguments for a job of all nodes. job: 0, 1, ...; name: of all jobs of this check."""
        processes = f"--nproc-per-node={self.processes}"
        if self.number == 1:
            return ["--standalone", processes]
        wait = f"join_timeout={self.patience(job):.0f},read_timeout={self.patience(job):.0f}"
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-id={name}-{job}",
            f"--nnodes={self.number}",
            f"--rdzv-endpoint={self.head}:{self.port + job}",
            f"--rdzv-conf={wait}",
            processes,
        ]

    def did_not_meet(self, log: Path, begun: Path) -> bool:
        """Whether the job ended because not all nodes came. log: the job's; begun: exists if ranks began."""
        # A node that ends later than the head says the same: the head's store is gone then.
        return self.number > 1 and not begun.exists() and bool(_UNMET.search(log.read_text(errors="replace")))

    def advice(self, job: int) -> str:
        """What to check if they don't meet."""
        return (
            "check on each node: does this script run there, with the same --nnodes, --head and --port? "
            f"does `getent hosts {self.head}` name the node where all meet, and does this script run on that "
            f"node? does a firewall close port {self.port + job}? --join-timeout S waits longer"
        )


def parse_nodes(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Nodes, list[str]]:
    """(the nodes, the arguments that are not about nodes). Ends the program for values that can't be."""
    parser = OneLineParser(prog="cluster_check", add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default=_number_of_nodes(environment))
    parser.add_argument("--head", default="")
    parser.add_argument("--port", default=str(PORT))
    parser.add_argument("--nproc", default="")
    parser.add_argument("--join-timeout", default=str(JOIN_TIMEOUT))
    options, rest = parser.parse_known_args(arguments)
    number, port = _whole(options.nnodes), _whole(options.port)
    if not 1 <= number <= 10**6:
        refuse(f"--nnodes {options.nnodes}: write a number of nodes, 1 or more")
    if not 1 <= port <= 65536 - len(PARTS):
        refuse(
            f"--port {options.port}: write a port, 1 to {65536 - len(PARTS)}; each part takes the next one"
        )
    if options.nproc and options.nproc not in _KINDS and not 1 <= _whole(options.nproc) <= _MOST_PROCESSES:
        refuse(f"--nproc {options.nproc}: write a number of processes, 1 or more, or gpu for one per GPU")
    try:
        join_timeout = float(options.join_timeout)
    except ValueError:
        join_timeout = 0.0
    if not 1 <= join_timeout <= 1e6:
        refuse(f"--join-timeout {options.join_timeout}: write seconds, 1 or more")
    head = options.head or _head(environment)
    if number > 1 and not head:
        refuse(f"--nnodes {number} needs --head, a node that all reach")
    nodes = Nodes(number=number, head=head, port=port, processes=options.nproc, join_timeout=join_timeout)
    return nodes, rest


def await_name(nodes: Nodes, say: Callable[[str], None]) -> None:
    """Wait until the head's name is known here: that of a Kubernetes pod comes with the pod.

    Ends the program if the name does not come.
    """
    end, has_said = time.monotonic() + nodes.join_timeout, False
    while nodes.number > 1:
        problem = _problem_of_name(nodes.head, max(end - time.monotonic(), 0.1))
        if not problem:
            return
        if time.monotonic() > end:
            refuse(
                f"--head {nodes.head} is unknown on {socket.gethostname()} ({problem}) after "
                f"{nodes.join_timeout:.0f} s: write a name or an address that each node knows"
            )
        if not has_said:
            say(f"the name {nodes.head} is unknown here; asks again for up to {nodes.join_timeout:.0f} s ...")
        has_said = True
        time.sleep(min(_AGAIN, nodes.join_timeout))


def _problem_of_name(host: str, seconds: float) -> str:
    """Why the name's address is not known; "" if the address is. A signal ends the wait for a slow answer."""
    answers: list[str] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None)
            answers.append("")
        except (OSError, UnicodeError) as error:
            answers.append(str(error))

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:.0f} s"


def _whole(text: str) -> int:
    """The whole number in a text; 0 if there is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _number_of_nodes(environment: Mapping[str, str]) -> str:
    """Slurm's number of nodes, or a PyTorchJob's, which says 4:4 (the least and the most); else 1."""
    given = environment.get("SLURM_JOB_NUM_NODES") or environment.get("PET_NNODES") or "1"
    return given.rpartition(":")[2]


def _head(environment: Mapping[str, str]) -> str:
    endpoint = environment.get("PET_RDZV_ENDPOINT", "")
    if endpoint:
        return endpoint.rpartition(":")[0] or endpoint
    names = environment.get("SLURM_JOB_NODELIST", "")
    if not names:
        return ""
    command = ["scontrol", "show", "hostnames", names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        refuse(f"scontrol does not name the nodes of this job ({error}): write --head, a node that all reach")
    return done.stdout.partition("\n")[0].strip()
