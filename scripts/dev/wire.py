#!/usr/bin/env python
"""A wire with a latency and a bandwidth between two network namespaces, and four ranks over it. Linux, root.

    python scripts/dev/wire.py --latency 100 --busy 50 1f1b zb_h1 one:4 one:8

Ranks 0 and 1 are in one namespace, ranks 2 and 3 in the other: the middle link of the pipeline is slow.
Each namespace has a TUN device. A process carries the packets between them: each waits for the ones before,
and for the latency. Stages sleep 100 ms in F, B and W (EMULATED). A microbatch's message has 1 MB, which the
wire carries in --busy ms. A schedule is a family, or placement:activations for what the search finds there.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import fcntl
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
from zbpp.job.world import world
from zbpp.models.emulated import Emulated
from zbpp.planning import messages_ahead, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, Links, Timetable, simulate

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
MTU, P, STEPS, UNIT, MEGABYTE, HIDDEN = 65000, 4, 6, 100.0, 1_000_000, 8
_NEW_NETWORK, _SET_DEVICE, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001


def main() -> None:
    """Make the namespaces, carry packets between them, and run the job in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--latency", type=float, default=100.0, help="ms")
    parser.add_argument("--busy", type=float, default=50.0, help="ms of the wire per message")
    parser.add_argument("--ahead", type=int, help="MessagesAhead (default: as many as the links need)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("schedules", nargs="+")
    given = parser.parse_args()
    if "RANK" in os.environ:
        job(given)
        return
    name = f"zbpp{os.getpid()}"
    try:
        for end, other in ("ab", "ba"):
            make_namespace(name + end, ADDRESSES[end], ADDRESSES[other])
        carried = f"import wire; wire.carry({name!r}, {given.latency}, {MEGABYTE / given.busy * 1e3})"
        here = Path(__file__).parent
        with subprocess.Popen([sys.executable, "-c", carried], cwd=here) as carrier:
            time.sleep(1)
            run_job(name)
            carrier.terminate()
    finally:
        for end in ADDRESSES:
            subprocess.run(["ip", "netns", "del", name + end], check=False)


def make_namespace(name: str, address: str, peer: str) -> None:
    """A network namespace with a TUN device `w0`."""
    inside = ["ip", "netns", "exec", name]
    for command in (
        ["ip", "netns", "add", name],
        [*inside, "ip", "tuntap", "add", "dev", "w0", "mode", "tun"],
        [*inside, "ip", "addr", "add", address, "peer", peer, "dev", "w0"],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "ip", "link", "set", "w0", "mtu", str(MTU), "up", "txqueuelen", "10000"],
        [*inside, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"],
        [*inside, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"],
    ):
        subprocess.run(command, check=True)


def carry(name: str, latency: float, rate: float) -> None:
    """Carry packets between the two devices. latency: ms. rate: bytes per second."""
    ends = [opened(name + end) for end in ADDRESSES]
    free, queues = [0.0, 0.0], [collections.deque[tuple[float, bytes]]() for _ in ends]
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=time.perf_counter() + 1)
        ready, _, _ = select.select(ends, [], [], max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        for index, end in enumerate(ends):
            for packet in packets(end) if end in ready else ():
                free[index] = max(now, free[index]) + len(packet) / rate
                queues[index].append((free[index] + latency / 1e3, packet))
        for index, queue in enumerate(queues):
            while queue and queue[0][0] <= time.perf_counter():
                os.write(ends[1 - index], queue.popleft()[1])


def packets(end: int) -> list[bytes]:
    """Those that wait at a device, 16 at most."""
    found = list[bytes]()
    try:
        while len(found) < 16:
            found.append(os.read(end, MTU + 100))
    except BlockingIOError:
        pass
    return found


def opened(namespace: str) -> int:
    """The TUN device of a namespace, as a file."""
    libc, here = ctypes.CDLL(None), os.open("/proc/self/ns/net", os.O_RDONLY)
    libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), _NEW_NETWORK)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_DEVICE, struct.pack("16sH", b"w0", _TUN_WITHOUT_HEADER))
    libc.setns(here, _NEW_NETWORK)
    return end


def run_job(name: str) -> None:
    """Run this script as four ranks."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    own = {
        "MASTER_ADDR": ADDRESSES["a"],
        "MASTER_PORT": port,
        "WORLD_SIZE": str(P),
        "GLOO_SOCKET_IFNAME": "w0",
    }
    ranks = []
    for rank in range(P):
        command = ["ip", "netns", "exec", name + ("a" if rank < P // 2 else "b"), sys.executable, *sys.argv]
        ranks.append(
            subprocess.Popen(command, env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        )
    for each in ranks:
        each.wait()


def job(given: argparse.Namespace) -> None:
    """One rank: measure each schedule, beside its prediction."""
    torch.manual_seed(0)  # the ranks of a pipeline share a batch
    slow = (given.latency, given.busy)
    links = Links(0.2, 0.1, {(1, 2): slow, (2, 1): slow})
    with world():
        for name in given.schedules:
            timetable = timetable_of(name, given.microbatches, links)
            costs = costs_of(timetable.num_stages // P, links)
            ahead = messages_ahead(timetable, costs) if given.ahead is None else given.ahead
            ms = measured(timetable, MEGABYTE // 4 // HIDDEN, ahead)
            if dist.get_rank() == 0:
                predicted = simulate(timetable, costs).makespan
                print(
                    f"{name:12}{ms:7.0f}  {predicted:7.0f}  {ms / predicted:.3f}  {ahead} ahead", flush=True
                )


def costs_of(parts: int, links: Links) -> Costs:
    """A rank's F, B and W take 100 ms each."""
    return Costs(*[UNIT / parts] * 3, saved=1 / parts, deferred=0.5 / parts, links=links)


def timetable_of(name: str, num_microbatches: int, links: Links) -> Timetable:
    """That of a family, or one that rank 0 finds: placement:activations."""
    placement, _, limit = name.partition(":")
    if not limit:
        return plan(name, P, num_microbatches)
    text = [""]
    if dist.get_rank() == 0:
        options = {"placement": placement, "memory_limit": float(limit), "time_limit": 3.0}
        costs = costs_of(2 if placement == "v" else 1, links)
        text = [str(plan("zb_auto", P, num_microbatches, costs=costs, **options))]
    dist.broadcast_object_list(text, 0)
    return Timetable.parse(text[0])


def measured(timetable: Timetable, rows: int, ahead: int) -> float:
    """The median time (ms) of a step, from a common start to the last rank's end; the first ones left out."""
    model, times = Emulated(num_layers=8, f=UNIT / 2, b=UNIT / 2, w=UNIT / 2, hidden_size=HIDDEN), []
    extras = [MessagesAhead(ahead)] if ahead else []
    with Pipeline(model, timetable, extras=extras) as pipeline:
        for _ in range(STEPS):
            x, target = torch.randn(2, timetable.num_microbatches * rows, HIDDEN)
            start = [time.perf_counter() + 2.0]
            dist.broadcast_object_list(start, 0)  # one machine has one clock
            time.sleep(max(0.0, start[0] - time.perf_counter()))
            pipeline.step(x, target=target)
            took = torch.tensor([1e3 * (time.perf_counter() - start[0])])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times.append(took.item())
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
