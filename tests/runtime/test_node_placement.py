"""Which groups of a mesh span nodes, and the line that says so."""

import pytest

from zbpp.job.world import fake_world
from zbpp.runtime.parallel.node_placement import placement_warning


def nodes(number, per_node):
    return [f"node-{chr(97 + node)}" for node in range(number) for _ in range(per_node)]


@pytest.mark.parametrize(
    ("hosts", "degrees", "words"),
    [
        (nodes(2, 4), {"tensor": 4}, None),
        (nodes(2, 4), {"tensor": 2, "replicate": 2}, None),
        (nodes(2, 4), {"tensor": 8}, "1 of 1 tensor groups span nodes (the first one: node-a, node-b)"),
        (nodes(2, 4), {"tensor": 8}, "divides the 4 of a node (now 8)"),
        (nodes(2, 6), {"tensor": 4}, "1 of 3 tensor groups span nodes (the first one: node-a, node-b)"),
        (["a", "b"] * 4, {"tensor": 2}, "numbered node after node (torchrun once on each;"),
        (["a"] * 3 + ["b"] * 5, {"tensor": 2}, "Start as many processes on each node"),
        (nodes(4, 2), {"shard": 8}, None),  # no node has room for all shards
        (nodes(2, 6), {"shard": 4}, "1 of 3 shard groups span nodes"),
    ],
)  # fmt: skip
def test_the_line_names_the_group_and_what_to_change(hosts, degrees, words):
    said = placement_warning(hosts, degrees)
    assert (said == "") if words is None else (words in said), said
    assert "\n" not in said


@pytest.mark.parametrize(("per_node", "lines"), [(2, 0), (1, 1)])
def test_rank_0_says_so_in_a_line_when_the_mesh_is_made(per_node, lines, monkeypatch, capsys):
    from zbpp.builders import stages
    from zbpp.config import ParallelConfig

    monkeypatch.setattr(stages, "gather", lambda host: nodes(2 // per_node, per_node))
    with fake_world(2):
        stages.build_mesh(ParallelConfig(tensor=2), "cpu")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("warning: 1 of 1 tensor groups span nodes") for line in said)
