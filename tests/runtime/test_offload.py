"""Activations that leave between F and B: results equal to the last bit, less memory, nothing left over."""

import gc
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.processes import run_ranks
from zbpp import ActivationOffload, Costs, Pipeline, Timetable, make_mesh, plan
from zbpp.autograd import recompute
from zbpp.autograd.copies import OffloadError
from zbpp.builders.trainer import build_offload
from zbpp.config import ConfigError, MemoryConfig
from zbpp.families import FAMILIES
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.mesh import local_of
from zbpp.runtime.weight_offload import OffloadedWeights

CPU = torch.device("cpu")
M, ROWS, SIZE, WIDE = 6, 64, 64, 512
SMALLEST = 1
# The kinds of plan that each schedule runs with.
KINDS = {
    "1f1b": ["planned", "measured", "number"],
    "zb_h1": ["planned", "measured", "number"],
    "zb_h2": ["planned"],
    "zb_v": ["planned", "measured", "number"],
    "interleaved_zb": ["planned"],
}
PAIRS = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
# Between B and W of zb_v on two ranks lie two actions at most: too few to leave and come back.
WITH_W = ["zb_h1", "zb_h2", "interleaved_zb"]
# Times that leave room for every copy, so that all leave whose F and B have an action between them.
COSTS = Costs(f=2, b=2, w=2, host=0.1)
EVERYTHING = ActivationOffload(costs=COSTS, least_bytes=SMALLEST)


WAITING = Timetable.parse(" ".join(f"0{op}{microbatch}" for op in "FBW" for microbatch in range(M)))


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
    """Losses, gradients, what a further step held, spaces (before, after), bytes that left before W."""
    stages = stages or stages_for(rank, timetable)
    losses, x = [], batch()
    with Pipeline(stages, timetable, F.mse_loss, offload=offload) as pipeline:
        for _ in range(num_steps):
            losses += [each.item() for each in pipeline.step(x, target=x)]
        spaces = num_spaces(pipeline)
        level = live_bytes(lambda: pipeline.step(x, target=x), CPU)
        gradients = [each.grad for each in pipeline.parameters()]
        waiting = {} if offload is None else pipeline.offloaded_bytes("deferred")
        return losses, gradients, level, (spaces, num_spaces(pipeline)), sum(waiting.values())


def num_spaces(pipeline):
    offload = pipeline._engine._activations
    return 0 if offload is None else (offload.copier.num_spaces, offload.copier.used_bytes)


def with_and_without(rank, num_ranks, folder):
    """{schedule: (equal losses and gradients, bytes without, bytes with, spaces)} for three kinds of plan."""
    found = {}
    offloads = {
        "planned": ActivationOffload(to=folder, costs=COSTS, least_bytes=SMALLEST),
        "measured": ActivationOffload(to="host", least_bytes=SMALLEST),
        "number": ActivationOffload(gib=0.001, to="host", least_bytes=SMALLEST),
    }
    for name, kinds in KINDS.items():
        timetable = plan(name, num_ranks, M)
        expected = trained(rank, timetable, None)
        for kind in kinds:
            losses, gradients, level, spaces, waiting = trained(rank, timetable, offloads[kind])
            equal = losses == expected[0] and all(map(torch.equal, gradients, expected[1]))
            found[name, kind] = equal, expected[2].highest, level, spaces, waiting
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return run_ranks(with_and_without, 2, 2, tmp_path_factory.mktemp("offload"))


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_losses_and_gradients_are_equal_to_the_last_bit(name, kind, on_two_ranks):
    for rank in on_two_ranks:
        assert rank[name, kind][0]


@pytest.mark.parametrize("name", WITH_W)
def test_what_waits_for_w_leaves_under_every_schedule_with_a_gap_before_w(name, on_two_ranks):
    assert sum(rank[name, "planned"][4] for rank in on_two_ranks) >= ROWS * WIDE * 4  # bytes of a wide x
    assert on_two_ranks[0]["1f1b", "planned"][4] == 0


@pytest.mark.parametrize("name", KINDS)
def test_no_space_is_made_in_the_steady_state_and_none_is_in_use_after_a_step(name, on_two_ranks):
    spaces = [rank[name, kind][3] for rank in on_two_ranks for kind in KINDS[name] if kind != "measured"]
    assert all(before == after for before, after in spaces)
    assert all(used == 0 for _, (_, used) in spaces)
    assert any(number > 0 for _, (number, _) in spaces)


def test_a_step_of_a_v_holds_less_and_nothing_after_it(on_two_ranks):
    """Rank 0's first stage waits longest. What is in the file is in no tensor."""
    _, without, level, *_ = on_two_ranks[0]["zb_v", "planned"]
    assert level.after == 0
    assert without - level.highest > ROWS * WIDE * 4  # at least one of a block's wide tensors


def behind_frozen_stages(rank):
    """{(family, first stage): (whether all with offload equals all without, the bytes that left)}.

    Without offload, all families of one cut have equal results: gpipe and looped_bfs stand for them.
    """
    without, found = {}, {}
    offload = ActivationOffload(gib=1, costs=COSTS, least_bytes=SMALLEST)
    for name in sorted(FAMILIES, key=["looped_bfs", "gpipe"].__contains__, reverse=True):
        timetable = plan(name, 2, M)
        cut = timetable.rank_of
        torch.manual_seed(0)  # every family has the same first stage
        for first in (Block().requires_grad_(False), nn.Identity()):
            kind = type(first).__name__
            if (cut, kind) not in without:
                without[cut, kind] = two_steps(timetable, None, half_frozen(rank, timetable, first))
            losses, gradients, _ = without[cut, kind]
            own_losses, own, left = two_steps(timetable, offload, half_frozen(rank, timetable, first))
            found[name, kind] = losses == own_losses and all(map(_same, gradients, own)), left
    return found


def half_frozen(rank, timetable, first):
    """Stages without dropout, whose stage 1's W reads the received x, and its B the output."""
    stages = {stage: module.eval() for stage, module in stages_for(rank, timetable).items()}
    own = {0: first.eval(), 1: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())}
    return {stage: own.get(stage, module) for stage, module in stages.items()}


def two_steps(timetable, offload, stages):
    """Losses, gradients, and the bytes that left of each stage."""
    x = batch()
    with Pipeline(stages, timetable, F.mse_loss, offload=offload) as pipeline:
        losses = [each.item() for _ in range(2) for each in pipeline.step(x, target=x)]
        left = [*pipeline.offloaded_bytes().values(), *pipeline.offloaded_bytes("deferred").values()]
        return losses, [each.grad for each in pipeline.parameters()], sum(left)


def _same(one, other):
    return (one is None) == (other is None) and (one is None or torch.equal(one, other))


def test_behind_a_first_stage_without_gradients_all_gradients_are_equal_to_the_last_bit():
    """Under every family: which stages share a rank with the first differs, and what waits for how long."""
    both = run_ranks(behind_frozen_stages, 2)
    for found in both:
        assert [each for each, (is_equal, _) in found.items() if not is_equal] == []
    stays = {name for name, kind in both[0] if not both[0][name, kind][1] + both[1][name, kind][1]}
    assert stays <= {"1f1b"}  # where the first stage saves nothing, and the last one's B follows its F


def on_one_rank(offload=None, make=None):
    """GPipe holds every microbatch. The wide tensors are nearly all that leaves."""
    timetable = plan("gpipe", 1, M)
    return trained(0, timetable, offload, stages=None if make is None else {0: make()})


def test_device_bytes_fall_by_the_planned_amount(tmp_path):
    """Planned in bytes: those of a microbatch that leave, times how many fewer are held at the peak."""
    from zbpp import simulate
    from zbpp.schedule import choose_offload

    timetable = plan("gpipe", 1, M)
    offload = ActivationOffload(to=tmp_path, costs=COSTS, least_bytes=SMALLEST)
    with Pipeline(stages_for(0, timetable), timetable, F.mse_loss, offload=offload) as pipeline:
        pipeline.step(batch(), target=batch())
        nbytes = pipeline.offloaded_bytes()[0]
    without = simulate(timetable, COSTS)
    left = simulate(timetable, COSTS, choose_offload(without, COSTS))
    planned = (without.peak_memory[0] - left.peak_memory[0]) * nbytes
    assert planned >= 3 * nbytes
    measured = on_one_rank()[2].highest - on_one_rank(offload)[2].highest
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
    offload = ActivationOffload(costs=COSTS, least_bytes=SMALLEST)
    expected, found = on_one_rank(make=make), on_one_rank(offload, make)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[3][0][0] > 0


def test_exactly_the_named_microbatches_leave():
    offload = ActivationOffload(values=[(0, 1), (0, 3)], least_bytes=SMALLEST)
    timetable = plan("gpipe", 1, M)
    with Pipeline(stages_for(0, timetable), timetable, F.mse_loss, offload=offload) as pipeline:
        program = str(pipeline._engine._executors["step"]._program)
        pipeline.step(batch(), target=batch())
    assert [line for line in program.splitlines() if line.startswith("Offload")] == [
        "Offload saved(0,1)",
        "Offload saved(0,3)",
    ]


def test_host_memory_that_runs_out_leaves_no_gradient_and_the_next_step_is_whole():
    expected = on_one_rank()
    offload = ActivationOffload(costs=COSTS, least_bytes=SMALLEST)
    timetable = plan("gpipe", 1, M)
    stages = stages_for(0, timetable)
    with Pipeline(stages, timetable, F.mse_loss, offload=offload) as pipeline:
        copier = pipeline._engine._activations.copier
        make, copier._make_space = copier._make_space, full
        with pytest.raises(OffloadError, match=r"no room for \d+ more bytes of offloaded activations"):
            pipeline.step(batch(), target=batch())
        assert {each.grad for each in pipeline.parameters()} == {None}
        assert copier.used_bytes == 0
        copier._make_space = make
        losses = [each.item() for each in pipeline.step(batch(), target=batch())]
    assert losses == expected[0][:M]


def full(nbytes):
    raise MemoryError("planted")


def test_a_copy_that_fails_is_raised_where_it_is_waited_for():
    offload = ActivationOffload(costs=COSTS, least_bytes=SMALLEST)
    timetable = plan("gpipe", 1, M)
    with Pipeline(stages_for(0, timetable), timetable, F.mse_loss, offload=offload) as pipeline:
        pipeline._engine._activations.copier._write = broken
        with pytest.raises(OffloadError, match="copying offloaded activations failed: planted"):
            pipeline.step(batch(), target=batch())
        assert {each.grad for each in pipeline.parameters()} == {None}


def broken(storage, space):
    raise OSError("planted")


def test_nothing_outlives_a_step_with_the_garbage_collector_off(tmp_path):
    offload = ActivationOffload(to=tmp_path, costs=COSTS, least_bytes=SMALLEST)
    timetable = plan("gpipe", 1, M)
    with Pipeline(stages_for(0, timetable), timetable, F.mse_loss, offload=offload) as pipeline:

        def steps(number):
            for _ in range(number):
                pipeline.step(batch(), target=batch())

        live_bytes(lambda: steps(3), CPU)  # the first one imports modules, which leave frames
        gc.collect()
        gc.disable()
        try:
            before = census()
            level = live_bytes(lambda: steps(10), CPU)
            assert census() == before
            assert level.after == 0
        finally:
            gc.enable()


def census():
    objects = gc.get_objects()
    kinds = [type(each).__name__ for each in objects]
    names = ("SavedActivations", "SavedTensor", "_Memory", "Stays", "WeightGrads", "GradientEdge", "frame")
    return {
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in objects),
        **{name: kinds.count(name) for name in names},
    }


@pytest.mark.parametrize("gib", [0, -1, True, "some", float("nan")])
def test_a_limit_that_is_no_size_is_refused(gib):
    with pytest.raises(ValueError, match='write "auto", or how many GiB may leave'):
        ActivationOffload(gib=gib)


def a_missing_folder(rank):
    timetable = plan("1f1b", 2, M)
    to = Path(tempfile.gettempdir()) / "missing" if rank else "host"
    with pytest.raises(OffloadError, match="can't be offloaded to .*missing"):
        Pipeline(stages_for(rank, timetable), timetable, F.mse_loss, offload=ActivationOffload(to=to))
    offload = None if rank else ActivationOffload()
    with pytest.raises(ValueError, match="costs or values on some ranks only"):
        Pipeline(stages_for(rank, timetable), timetable, F.mse_loss, offload=offload)
    return True


def test_what_one_rank_refuses_all_ranks_raise():
    assert run_ranks(a_missing_folder, 2) == [True, True]


def on_a_mesh(rank):
    """(equal losses and gradients, bytes that left) of shards (FSDP2), and of tensor-parallel parts.

    All F's, then all B's, then all W's.
    """
    found = {}
    for dimension in ("shard", "tensor"):
        mesh = make_mesh(**{dimension: 2})
        expected, (losses, gradients, nbytes) = (meshed(mesh, offload) for offload in (None, EVERYTHING))
        found[dimension] = losses == expected[0] and all(map(torch.equal, gradients, expected[1])), nbytes
    return found


def meshed(mesh, offload):
    timetable, x, losses = WAITING, batch(), []
    stages = stages_for(0, timetable)
    if mesh["tensor"].size() > 1:
        for block in stages[0]:
            parallelize_module(
                block, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
            )
    with Pipeline(stages, timetable, F.mse_loss, mesh=mesh, offload=offload) as pipeline:
        for _ in range(2):
            losses += [each.item() for each in pipeline.step(x, target=x)]
        gradients = [local_of(each.grad) for each in pipeline.parameters()]
        waiting = 0 if offload is None else pipeline.offloaded_bytes("deferred")[0]
        return losses, gradients, (pipeline.offloaded_bytes().get(0, 0), waiting)


def test_weights_that_fsdp2_gathers_stay_and_what_is_split_over_a_mesh_is_equal_to_the_last_bit():
    plain = 2 * ROWS * (2 * WIDE + 3 * SIZE) * 4
    for rank in run_ranks(on_a_mesh, 2):
        assert rank["shard"][0]
        assert rank["tensor"][0]
        (saved, waiting), (of_tensor, tensor_waiting) = rank["shard"][1], rank["tensor"][1]
        assert saved == pytest.approx(plain, rel=0.1)  # no weight among them
        assert 0 < of_tensor < plain  # DTensors stay
        assert 0 < waiting < plain
        assert 0 < tensor_waiting < plain


def test_activations_and_weights_that_leave_are_refused_together():
    timetable = plan("gpipe", 1, M)
    stages = stages_for(0, timetable)
    OffloadedWeights(stages, CPU)
    with pytest.raises(ValueError, match="doesn't go with OffloadedWeights"):
        Pipeline(stages, timetable, F.mse_loss, offload=ActivationOffload())
    with pytest.raises(ConfigError, match="memory.offload=auto doesn't go with memory.offload_weights=true"):
        MemoryConfig(offload="auto", offload_weights=True)


@pytest.mark.parametrize("wrong", [0, -1.5, "all", True])
def test_the_config_refuses_what_is_no_offload(wrong):
    with pytest.raises(ConfigError, match=f"memory.offload={wrong}: write"):
        MemoryConfig(offload=wrong)


@pytest.mark.parametrize("offload", [0.5, "auto"])
def test_the_config_becomes_options(offload):
    assert build_offload(MemoryConfig()) is None
    assert build_offload(MemoryConfig(offload=offload, offload_to="/x")) == ActivationOffload(offload, "/x")
