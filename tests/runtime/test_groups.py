"""How the process groups of links, ties and meshes are made."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from zbpp import lower, plan
from zbpp.runtime.processes.groups import close_groups, group_of, in_rounds, link_groups


def waits(links):
    """How many connections stand behind each other, if each takes one unit and both ends go in this order."""
    free = {}
    for sender, receiver in links:
        end = max(free.get(sender, 0), free.get(receiver, 0)) + 1
        free[sender] = free[receiver] = end
    return max(free.values(), default=0)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 33])
def test_neighbours_connect_in_two_rounds_whatever_their_number(num_ranks):
    links = lower(plan("zb_h1", num_ranks, num_ranks)).links
    assert sorted(in_rounds(links)) == sorted(links)
    rounds = min(num_ranks - 1, 2)
    assert waits(in_rounds(links)) == 2 * rounds  # each pair has two directions
    if num_ranks > 3:
        assert waits(links) == 2 * (num_ranks - 1)  # in the order of the ranks each waits for the one before


def test_any_links_connect_in_fewer_rounds_than_twice_a_ranks_neighbours():
    for seed in range(200):
        links = lower(random_timetable(random.Random(seed))).links
        most = max((sum(rank in link for link in links) for rank in range(9)), default=0)
        assert sorted(in_rounds(links)) == sorted(links)
        assert waits(in_rounds(links)) <= max(2 * most - 1, 0)


def groups_of_some_ranks(rank):
    """Group two of three ranks, and connect links, while the job's group is bound to a device."""
    job = c10d._get_default_group()
    if rank != 1:
        job.bound_device_id = torch.device("cuda", 0)
    split = c10d._get_split_source

    def no_split(group):
        raise AssertionError("torch splits the job's communicator, which rank 1 takes no part in")

    c10d._get_split_source = no_split
    try:
        name = f"zbpp/{dist.get_world_size()} ranks/tie"
        tie = group_of([0, 2], None, name, 30.0)
        total = torch.ones(1)
        if tie is not None:
            dist.all_reduce(total, group=tie)
        links = link_groups(None, [(0, 1), (1, 2)], 30.0, torch.device("cpu"))
        found = total.item(), sorted(links), job.bound_device_id
    finally:
        c10d._get_split_source = split
        job.bound_device_id = None
    dist.barrier()
    close_groups([*links.values(), *([] if tie is None else [tie])])
    return found


def test_groups_of_some_ranks_take_nothing_from_a_job_that_is_bound_to_a_device():
    """`init_process_group(device_id=...)` and a tie between the first and the last of three ranks."""
    device = torch.device("cuda", 0)
    assert run_ranks(groups_of_some_ranks, 3, fresh=True) == [
        (2.0, [(0, 1)], device),
        (1.0, [(0, 1), (1, 2)], None),
        (2.0, [(1, 2)], device),
    ]
