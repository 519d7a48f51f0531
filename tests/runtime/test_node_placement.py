"""Which groups of a mesh span nodes, against torch's own mesh; and the line that says so."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zbpp.runtime.mesh import DIMENSIONS
from zbpp.runtime.node_placement import placement_warning, spanning_groups
from zbpp.runtime.world import fake_world


def nodes(number, per_node):
    return [f"node-{chr(97 + node)}" for node in range(number) for _ in range(per_node)]


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (2, 1, 2, 2), (1, 1, 1, 8), (8, 1, 1, 1), (2, 1, 4, 1)])
@pytest.mark.parametrize("hosts", [nodes(2, 4), nodes(4, 2), ["a", "b"] * 4])
def test_spanning_groups_are_those_of_torchs_mesh(sizes, hosts):
    with fake_world(8):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=DIMENSIONS).mesh
    expected = {}
    for dimension, name in enumerate(DIMENSIONS):
        groups = mesh.movedim(dimension, -1).reshape(-1, sizes[dimension]).tolist()
        expected[name] = [each for each in groups if len({hosts[rank] for rank in each}) > 1]
    assert spanning_groups(hosts, dict(zip(DIMENSIONS, sizes, strict=True))) == expected


@pytest.mark.parametrize(
    ("hosts", "degrees", "words"),
    [
        (nodes(2, 4), {"tensor": 4}, None),
        (nodes(2, 4), {"tensor": 2, "replicate": 2}, None),
        (nodes(2, 4), {"tensor": 8}, "1 of 1 tensor groups span nodes (processes 0, 1 ... 7 on node-a, node"),
        (nodes(2, 4), {"tensor": 8}, "divides the 4 processes of a node (now 8)"),
        (nodes(2, 6), {"tensor": 4}, "1 of 3 tensor groups span nodes (processes 4, 5, 6, 7 on node-a, node"),
        (["a", "b"] * 4, {"tensor": 2}, "not numbered one after another: start torchrun once on each node"),
        (["a"] * 3 + ["b"] * 5, {"tensor": 2}, "different numbers of processes: start as many on each"),
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
    from zbpp.builders import parallel
    from zbpp.config import ParallelConfig

    monkeypatch.setattr(parallel, "gather", lambda host: nodes(2 // per_node, per_node))
    with fake_world(2):
        parallel.build_mesh(ParallelConfig(tensor=2), "cpu")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("warning: 1 of 1 tensor groups span nodes") for line in said)
