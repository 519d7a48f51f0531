"""Schedules over slow links: what families take, and what the search finds, as step / ideal.

    python scripts/dev/slow_links.py                    p=4 m=16, p=8 m=32; ten minutes
    python scripts/dev/slow_links.py --seconds 3 --only 4

F = B = W = 10 ms of a rank. A link is slow if a message occupies it for a share of F, or arrives a latency
later: all links, or the one in the middle. The search has 1F1B's memory (p activations), 1.5 and 2 times as
much; "one" stage per rank, or two in a V. In parentheses the bound: no plan with this placement takes less.
"""

import argparse

from zbpp.planning import lower_bound, plan
from zbpp.schedule import Costs, Links, simulate

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
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
