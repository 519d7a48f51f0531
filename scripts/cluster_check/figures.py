"""Times of messages on each link, beside its bandwidth; tokens per second, beside the bubble's prediction.

A message takes two launches and a handshake, about 20 us, and its bytes: by the datasheet a link between
GPUs of one machine moves 450 GB/s (NVLink 4), one between machines 50 GB/s (400 Gb/s). The prediction of a
schedule is its simulated bubble, with the times of F, B and W that one rank needs for its share of the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import bench_split
import torch
from gpu_check.measuring import phases_ms
from gpu_check.page import Here
from gpu_check.stages import (
    LLAMA_1B,
    SMALL,
    Sizes,
    blocks,
    llama_stages,
    stage_of,
    token_batch,
    token_loss,
    x_and_dy,
)

from cluster_check.rows import Check
from zbpp.job.agreement import gather
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.groups import close_groups, link_groups
from zbpp.runtime.processes.mesh import planned_by_rank_0
from zbpp.schedule import Costs, PlanError, simulate

_INSIDE, _BETWEEN = 450e9, 50e9  # bytes per s
_LATENCY = 20e-6  # s: two launches and NCCL's handshake
_LAYERS = 4  # of a rank


def run(check: Check) -> None:
    messages(check)
    tokens(check)


def messages(check: Check) -> None:
    """Each link between neighbours, alone: an activation of 32 MiB, and a message of 1 KiB."""
    here = check.here
    names = gather(_machine(check))
    for sender in range(here.size - 1):
        links = link_groups(None, [(sender, sender + 1)], check.timeouts.waiting, here.device)
        rate = _INSIDE if names[sender] == names[sender + 1] else _BETWEEN
        for nbytes in (1 << 10, (1 << 15) if check.is_small else (1 << 25)):
            predicted = (
                f"{1e3 * (_LATENCY + nbytes / rate):.3g} ms: 20 us, and bytes over {rate / 1e9:g} GB/s"
            )
            check.row(
                f"rank {sender} to {sender + 1}, {nbytes >> 10} KiB",
                lambda s=sender, n=nbytes, k=links: _message(check, k, s, n),
                predicted,
            )
        close_groups(links.values())


def _machine(check: Check) -> str:
    import socket

    return socket.gethostname()


def _message(check: Check, links: Any, sender: int, nbytes: int) -> str:
    """The time of one of many messages, seen by the receiver."""
    here, took = check.here, 0.0
    if (sender, sender + 1) in links:
        link, tensor = links[sender, sender + 1], torch.zeros(nbytes, dtype=torch.uint8, device=here.device)
        times = []
        for number in range(1, 9):
            if here.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            move = link.send if here.rank == sender else link.recv
            move([tensor], int(here.rank == sender), number).wait()
            if here.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        took = median(times[2:])
    found: float = gather(took)[sender + 1]
    return f"{1e3 * found:.3f} ms, {nbytes / found / 1e9:.2f} GB/s"


def tokens(check: Check) -> None:
    """A Llama with four layers of Llama-3.2-1B's size per rank."""
    world = check.here
    here = Here(world.device, check.is_small)
    sizes: Sizes = here.choose(LLAMA_1B, SMALL)
    num_microbatches = 4 * world.size
    costs = _costs(here, sizes)
    for name in ("1f1b", "zb_h1", "zb_v"):
        try:
            timetable = planned_by_rank_0(lambda n=name: plan(n, world.size, num_microbatches))
        except PlanError as error:
            check.write(f"{name}: {error}")
            continue
        share = timetable.num_stages // world.size
        own = Costs(f=costs.f / share, b=costs.b / share, w=costs.w / share)
        makespan = simulate(timetable, own).makespan
        fastest = 1e3 * num_microbatches * sizes.tokens / makespan
        predicted = f"{fastest:.4g} tokens/s by the bubble, without messages and the head"
        check.row(
            f"{name}, {_LAYERS} layers per rank",
            lambda t=timetable: _tokens(check, here, sizes, t),
            predicted,
        )


def _costs(here: Here, sizes: Sizes) -> Costs:
    """F, B and W (ms) of one rank's layers, the slowest rank's."""
    stage = stage_of(blocks(sizes, _LAYERS, here))
    found = phases_ms(here, bench_split.phases(bench_split.Zbpp(), stage, *x_and_dy(sizes, here)), rounds=5)
    everyone: Sequence[dict[str, float]] = gather(found)
    f, b, w = (max(each[phase] for each in everyone) for phase in "FBW")
    return Costs(f=f, b=b, w=w)


def _tokens(check: Check, here: Here, sizes: Sizes, timetable: Any) -> str:
    owned = timetable.stages_of(check.here.rank)
    stages = llama_stages(sizes, _LAYERS * check.here.size, owned, timetable.num_stages, here)
    x, target = token_batch(sizes, timetable.num_microbatches, here)
    args = (x,) if 0 in stages else ()
    given = {"target": target} if timetable.num_stages - 1 in stages else {}
    times = []
    with Pipeline(stages, timetable, token_loss, timeout=check.timeouts.waiting) as pipeline:
        for _ in range(here.choose(5, 2)):
            here.synchronize()
            begin = time.perf_counter()
            pipeline.step(*args, **given)
            here.synchronize()
            times.append(time.perf_counter() - begin)
    slowest = max(gather(median(times[1:])))
    return f"{timetable.num_microbatches * sizes.tokens / slowest:.4g} tokens/s"
