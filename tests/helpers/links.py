"""Random links between ranks, and costs with them."""

import random

from zbpp import Costs, Links, Timetable


def random_links(rng: random.Random, num_ranks: int) -> Links:
    """Some links are slow, some are not occupied at all."""
    ranks = range(num_ranks)
    pairs = {
        (a, b): (rng.choice((0.0, rng.uniform(0, 9))), rng.choice((0.0, rng.uniform(0, 9))))
        for a in ranks
        for b in ranks
        if a != b and rng.random() < 0.5
    }
    every = [(a, b) for a in ranks for b in ranks if a != b]
    shared = rng.choice((False, False, True, [each for each in every if rng.random() < 0.7]))
    sizes = rng.uniform(0, 2), rng.uniform(0, 2)
    return Links(rng.choice((0.0, 2.0)), rng.choice((0.0, 3.0)), pairs, *sizes, shared)


def random_costs(rng: random.Random, timetable: Timetable) -> Costs:
    number = timetable.num_stages
    f, b, w, bw = ([rng.uniform(1, 9) for _ in range(number)] for _ in range(4))
    comm = rng.choice((0.0, [rng.uniform(0, 5) for _ in range(number)]))
    return Costs(f, b, w, bw, comm, links=random_links(rng, timetable.num_ranks))
