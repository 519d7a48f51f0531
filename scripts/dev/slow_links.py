"""Schedules over slow links: what families take, and what the search finds, as step / ideal.

    python scripts/dev/slow_links.py                    p=4 m=16, p=8 m=32; ten minutes
    python scripts/dev/slow_links.py --seconds 3 --only 4
    python scripts/dev/slow_links.py --emulated         four ranks that sleep, over a link that is delayed

F = B = W = 10 ms of a rank. A link is slow if a message occupies it for a share of F, or arrives a latency
later: all links, or the one in the middle. The search has 1F1B's memory (p activations), 1.5 and 2 times as
much; "one" stage per rank, or two in a V. In parentheses the bound: no plan with this placement takes less.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from zbpp.benchmark.delayed_links import delayed_links
from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.emulated import Emulated
from zbpp.planning import lower_bound, messages_ahead, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, Links, Timetable, simulate

F = 10.0
ROWS = (("all", 0.1, 0.0), ("all", 0.5, 0.0), ("all", 1.0, 1.0), ("middle", 0.5, 1.0), ("middle", 1.0, 3.0))


def links(num_ranks: int, where: str, busy: float, latency: float) -> Links:
    """All links are like this, or the one in the middle; others take 2 % of an F."""
    own = (latency * F, busy * F)
    if where == "all":
        return Links(*own)
    middle = num_ranks // 2
    return Links(0.05, 0.2, {(middle - 1, middle): own, (middle, middle - 1): own})


def costs(per_rank: int, slow: Links) -> Costs:
    """F = B = W = 10 ms of a rank, an activation of 1 of a rank."""
    times = [F / per_rank] * 3
    return Costs(*times, saved=1 / per_rank, deferred=0.5 / per_rank, links=slow)


def searched(num_ranks: int, number: int, placement: str, limit: float, slow: Links, seconds: float) -> str:
    """The makespan of the plan that the search finds, and its bound, over the ideal step's."""
    own = costs(2 if placement == "v" else 1, slow)
    options = {"memory_limit": limit, "placement": placement, "time_limit": seconds}
    found = plan("zb_auto", num_ranks, number, costs=own, **options)
    bound = lower_bound(
        "makespan", rank_of=found.rank_of, num_microbatches=number, costs=own, memory_limit=limit
    )
    ideal = 3 * F * number
    return f"{simulate(found, own).makespan / ideal:.3f} ({bound.value / ideal:.3f})"


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--only", type=int, default=0, help="this number of ranks")
    what = "measure four ranks that sleep, over delayed links, beside the prediction"
    parser.add_argument("--emulated", action="store_true", help=what)
    given = parser.parse_args()
    if given.emulated:
        on_ranks(4, emulated, given.seconds)
        return
    for num_ranks, number in ((4, 16), (8, 32)):
        if given.only in (0, num_ranks):
            table(num_ranks, number, given.seconds)


def table(num_ranks: int, number: int, seconds: float) -> None:
    """Print one table."""
    print(f"p={num_ranks}, m={number}, {seconds:g} s a search: step / ideal (bound)")
    print(f"{'links: busy, latency in F':28}1f1b   zb_h1  zb_v   memory  one            v")
    for where, busy, latency in ROWS:
        slow = links(num_ranks, where, busy, latency)
        families = []
        for name in ("1f1b", "zb_h1", "zb_v"):
            timetable = plan(name, num_ranks, number)
            own = costs(timetable.num_stages // num_ranks, slow)
            families.append(f"{simulate(timetable, own).makespan / (3 * F * number):.3f}")
        head = f"{where}: {busy}, {latency:g}"
        for share in (1.0, 1.5, 2.0):
            both = [
                searched(num_ranks, number, each, share * num_ranks, slow, seconds) for each in ("one", "v")
            ]
            print(
                f"{head:28}{'  '.join(families) if head else ' ' * 19}  {share:<6}  {'  '.join(both)}",
                flush=True,
            )
            head = ""
    print()


UNIT, M, STEPS = 100.0, 8, 6  # ms
SLOW = Links(0.2, 0.1, {(1, 2): (100.0, 50.0), (2, 1): (100.0, 50.0)})


def emulated(seconds: float) -> None:
    """EMULATED: F = B = W = 100 ms of a rank; the middle link is busy for 50 ms, and 100 ms long."""
    with world():
        rank = dist.get_rank()
        if rank == 0:
            print(f"p=4, m={M}, EMULATED; ms: measured over delayed links, predicted, measured / predicted")
        for name, timetable in timetables(seconds).items():
            own = costs_of(timetable)
            ms = measured(timetable, messages_ahead(timetable, own))
            if rank == 0:
                predicted = simulate(timetable, own).makespan
                print(f"{name:32}{ms:7.0f}  {predicted:7.0f}  {ms / predicted:.3f}", flush=True)


def timetables(seconds: float) -> dict[str, Timetable]:
    """Families, and what rank 0 finds in 1F1B's memory and in twice as much."""
    found = {name: plan(name, 4, M) for name in ("1f1b", "zb_h1", "zb_v")}
    for placement, limit in (("one", 4.0), ("v", 4.0), ("one", 8.0), ("v", 8.0)):
        text = [""]
        if dist.get_rank() == 0:
            parts = 2 if placement == "v" else 1
            own = Costs(*[UNIT / parts] * 3, saved=1 / parts, deferred=0.5 / parts, links=SLOW)
            options = {"memory_limit": limit, "placement": placement, "time_limit": seconds}
            text = [str(plan("zb_auto", 4, M, costs=own, **options))]
        dist.broadcast_object_list(text, 0)
        found[f"searched, {placement}, {limit:g} activations"] = Timetable.parse(text[0])
    return found


def costs_of(timetable: Timetable) -> Costs:
    """A rank's F, B and W take 100 ms each."""
    parts = timetable.num_stages // 4
    return Costs(*[UNIT / parts] * 3, links=SLOW)


def measured(timetable: Timetable, ahead: int) -> float:
    """The median time (ms) of a step, the first ones left out."""
    model, times = Emulated(num_layers=8, f=UNIT / 2, b=UNIT / 2, w=UNIT / 2), []
    extras = [MessagesAhead(ahead)] if ahead else []
    with delayed_links(SLOW), Pipeline(model, timetable, extras=extras) as pipeline:
        for _ in range(STEPS):
            x, target = torch.randn(M, 8), torch.randn(M, 8)
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(x, target=target)
            dist.barrier()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
