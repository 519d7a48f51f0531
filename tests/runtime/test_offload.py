"""Activations that leave between F and B: results equal to the last bit, less memory, nothing left over."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.processes import run_ranks
from helpers.timetables import choose_offload, with_offload
from zbpp import ActivationOffload, Costs, Pipeline, Timetable, make_mesh, plan, simulate
from zbpp.autograd import recompute
from zbpp.features.activation_offload.activation_offload import offload_of
from zbpp.measure.live_tensors import live_bytes
from zbpp.runtime.processes.dtensors import local_of

CPU = torch.device("cpu")
M, ROWS, SIZE, WIDE = 6, 64, 64, 512
SMALLEST = 1
# The kinds of plan that each schedule runs with.
KINDS = {
    "1f1b": ["auto", "number"],
    "zb_h1": ["auto", "number"],
    "zb_h2": ["auto"],
    "zb_v": ["auto", "number"],
    "interleaved_zb": ["auto"],
}
PAIRS = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
# Times that leave room for every copy, so that all leave whose F and B have an action between them.
COSTS = Costs(f=2, b=2, w=2, host=0.1)
EVERYTHING = ActivationOffload(COSTS, least_bytes=SMALLEST)
# Of a microbatch of two blocks, about what leaves: three microbatches may be away at a time.
LIMITED = ActivationOffload(COSTS.in_bytes(saved=10**6, deferred=0), 3e6 / 2**30, least_bytes=SMALLEST)
ALL_LATE = Timetable.parse(" ".join(f"0{op}{microbatch}" for op in "FBW" for microbatch in range(M)))


class Block(nn.Module):
    """A feed-forward layer with dropout; most of what it saves is WIDE."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.first, self.second = nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.second(F.gelu(self.first(self.norm(x)))))


def stages_for(rank, timetable):
    stages = {}
    for stage in timetable.stages_of(rank):
        torch.manual_seed(stage)
        stages[stage] = nn.Sequential(Block(), Block())
    return stages


def batch(num_rows=M * ROWS):
    return torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(0))


def trained(rank, timetable, offload, num_steps=3, stages=None):
    """Losses, gradients, what a further step held, host memory (before it, after it), bytes that left."""
    stages = stages or stages_for(rank, timetable)
    losses, x = [], batch()
    with Pipeline(stages, timetable, F.mse_loss, extras=[*filter(None, [offload])]) as pipeline:
        for _ in range(num_steps):
            losses += [each.item() for each in pipeline.step(x, target=x)]
        before = host_memory(pipeline)
        level = live_bytes(lambda: pipeline.step(x, target=x), CPU)
        gradients = [each.grad for each in pipeline.parameters()]
        left = bytes_that_left(pipeline)
        return losses, gradients, level, (before, host_memory(pipeline)), left


def bytes_that_left(pipeline):
    offload = offload_of(pipeline)
    return 0 if offload is None else sum(offload.nbytes.values())


def host_memory(pipeline):
    """The addresses of the host memory that is free."""
    offload = offload_of(pipeline)
    free = {} if offload is None else offload._copier._free
    return sorted(each.data_ptr() for some in free.values() for each in some)


def with_and_without(rank, num_ranks):
    """{(schedule, kind of plan): (equal losses and gradients, bytes without, bytes with, ...)}."""
    found = {}
    offloads = {"auto": EVERYTHING, "number": LIMITED}
    for name, kinds in KINDS.items():
        timetable = plan(name, num_ranks, M)
        expected = trained(rank, timetable, None)
        for kind in kinds:
            losses, gradients, level, host, left = trained(rank, timetable, offloads[kind])
            equal = losses == expected[0] and all(map(torch.equal, gradients, expected[1]))
            found[name, kind] = equal, expected[2].highest, level, host, left
    return found


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(with_and_without, 2, 2)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_losses_and_gradients_are_equal_to_the_last_bit(name, kind, on_two_ranks):
    for rank in on_two_ranks:
        assert rank[name, kind][0]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_all_host_memory_is_free_after_a_step_and_none_is_made_in_the_steady_state(name, kind, on_two_ranks):
    assert all(rank[name, kind][3][0] == rank[name, kind][3][1] for rank in on_two_ranks)
    assert any(rank[name, kind][3][0] for rank in on_two_ranks)
    assert sum(rank[name, kind][4] for rank in on_two_ranks) > ROWS * WIDE * 4


def test_a_step_of_a_v_holds_less_and_nothing_after_it(on_two_ranks):
    """Rank 0's first stage waits longest."""
    _, without, level, *_ = on_two_ranks[0]["zb_v", "auto"]
    assert level.after == 0
    assert without - level.highest > ROWS * WIDE * 4  # at least one of a block's wide tensors


def on_one_rank(offload=None, make=None):
    """GPipe holds every microbatch. The wide tensors are nearly all that leaves."""
    timetable = plan("gpipe", 1, M)
    return trained(0, timetable, offload, stages=None if make is None else {0: make()})


def test_device_bytes_fall_by_the_planned_amount():
    """Planned in bytes: those of a microbatch that leave, times how many fewer are held at the peak."""
    timetable = plan("gpipe", 1, M)
    with Pipeline(stages_for(0, timetable), timetable, F.mse_loss, extras=[EVERYTHING]) as pipeline:
        pipeline.step(batch(), target=batch())
        nbytes = offload_of(pipeline).nbytes[0]
    without = simulate(timetable, COSTS)
    left = with_offload(timetable, COSTS, choose_offload(without, COSTS))
    planned = (without.peak_memory[0] - left.peak_memory[0]) * nbytes
    assert planned >= 3 * nbytes
    measured = on_one_rank()[2].highest - on_one_rank(EVERYTHING)[2].highest
    assert measured == pytest.approx(planned, rel=0.1)


def with_recompute():
    torch.manual_seed(0)
    block = nn.Sequential(Block(), Block())
    recompute(block)
    return nn.Sequential(block, Block())


def with_save_on_cpu():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                x = self.first(x)
            return self.second(x)

    torch.manual_seed(0)
    return Inside()


def with_torch_checkpoint():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            return self.second(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))

    torch.manual_seed(0)
    return Inside()


@pytest.mark.parametrize("make", [with_recompute, with_save_on_cpu, with_torch_checkpoint])
def test_offload_composes_with_what_else_packs_or_recomputes(make):
    expected, found = on_one_rank(make=make), on_one_rank(EVERYTHING, make)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[4] > 0


def on_a_mesh(rank):
    """(equal losses and gradients, bytes that left) of shards (FSDP2), and of tensor-parallel parts."""
    found = {}
    for dimension in ("shard", "tensor"):
        mesh = make_mesh(**{dimension: 2})
        expected, (losses, gradients, nbytes) = (meshed(mesh, offload) for offload in (None, EVERYTHING))
        found[dimension] = losses == expected[0] and all(map(torch.equal, gradients, expected[1])), nbytes
    return found


def meshed(mesh, offload):
    timetable, x, losses = ALL_LATE, batch(), []
    stages = stages_for(0, timetable)
    if mesh["tensor"].size() > 1:
        for block in stages[0]:
            parallelize_module(
                block, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
            )
    with Pipeline(stages, timetable, F.mse_loss, mesh=mesh, extras=[*filter(None, [offload])]) as pipeline:
        for _ in range(2):
            losses += [each.item() for each in pipeline.step(x, target=x)]
        gradients = [local_of(each.grad) for each in pipeline.parameters()]
        return losses, gradients, bytes_that_left(pipeline)


def test_weights_that_fsdp2_gathers_stay_and_what_is_split_over_a_mesh_is_equal_to_the_last_bit():
    plain = 2 * ROWS * (2 * WIDE + 3 * SIZE) * 4
    for rank in run_ranks(on_a_mesh, 2):
        assert rank["shard"][0]
        assert rank["tensor"][0]
        assert rank["shard"][1] == pytest.approx(plain, rel=0.1)  # no weight among them
        assert 0 < rank["tensor"][1] < plain  # DTensors stay


REFUSED = [
    ({"costs": Costs()}, "no time of a copy to host memory: give those that `zbpp measure` writes"),
    ({"costs": None}, "costs=None: write Costs"),
    ({"costs": COSTS, "gib": 1.0}, "the costs count activations: give costs in bytes"),
    *(({"costs": COSTS, "gib": wrong}, 'write "auto", or how many GiB') for wrong in (0, -1, True, "some")),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_with_which_nothing_could_be_planned_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ActivationOffload(**options)
