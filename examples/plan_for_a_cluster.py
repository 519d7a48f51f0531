"""Plan before there is a cluster: which schedule, how much memory, how far from the best that is possible?

python plan_for_a_cluster.py

It needs neither torch nor a second process. `zbpp plan --help` shows the same for the command line.
"""

from zbpp import Costs, plan, simulate
from zbpp.planning import certificate

NUM_RANKS, NUM_MICROBATCHES = 4, 16
# Of one stage, as `zbpp measure` writes them: F, B, W, a message in ms; GiB from F to B, and from B to W.
COSTS = Costs(f=18.5, b=18.1, w=9.3, comm=0.6, saved=2.0, deferred=0.7)
LIMIT = 12.0  # GiB of activations that each rank may hold


def main() -> None:
    print(f"{'schedule':12} {'step, ms':>9} {'bubble':>7} {'GiB':>5}")
    for name in ("1f1b", "zb_h1", "zb_h2", "zb_auto"):
        options = {"memory_limit": LIMIT, "time_limit": 2.0} if name == "zb_auto" else {}
        timetable = plan(name, NUM_RANKS, NUM_MICROBATCHES, costs=COSTS, **options)
        line = simulate(timetable, COSTS)
        held = max(line.peak_memory)
        note = "" if held <= LIMIT else "  does not fit"
        print(f"{name:12} {line.makespan:9.1f} {line.bubble_rate:7.3f} {held:5.1f}{note}")
    found = certificate(timetable, COSTS, memory_limit=LIMIT)
    print(f"no plan with one stage per rank and {LIMIT:g} GiB takes less than {found.bound:.1f} ms")
    print("the last plan, a line per rank; schedule.timetable=FILE trains with it:")
    print(timetable)


if __name__ == "__main__":
    main()
