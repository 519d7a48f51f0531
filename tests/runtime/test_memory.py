"""Measured bytes of live tensors are those that the shapes say, and do not grow with the microbatches."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.autograd import recompute
from zbpp.measure.live_tensors import Level, LiveTensors, live_bytes
from zbpp.measure.microbatch_memory import StageMemory, first_inputs, stage_memory
from zbpp.models.mlp import Mlp
from zbpp.runtime.call.fingerprint import NUM_COMPARED
from zbpp.stage_api import mean_over

CPU = torch.device("cpu")
ROWS, HIDDEN = 4, 8
BYTES = ROWS * HIDDEN * 4  # of a float32 activation


def received():
    return torch.zeros(ROWS, HIDDEN, requires_grad=True)


def memory_of(module, x=None, index=1, **options):
    return stage_memory(index, module, (received() if x is None else x,), CPU, **options)


# ---------------------------------------------------------------- live bytes


def test_a_dropped_tensor_counts_at_the_peak_and_a_kept_one_also_afterwards():
    kept = []

    def run():
        dropped = torch.empty(1000, dtype=torch.uint8)
        kept.append(torch.empty(600, dtype=torch.uint8))
        del dropped
        kept.append(torch.empty(100, dtype=torch.uint8))

    assert live_bytes(run, CPU) == Level(highest=1600, after=700)


def test_live_tensors_are_counted_once_and_until_they_are_freed():
    before = torch.ones(100)
    with LiveTensors() as live:
        kept = torch.empty(600, dtype=torch.uint8)
        view = before[:10]  # of memory that was there before
        dropped = torch.empty(1000, dtype=torch.uint8)
        half = kept[:300]
        del dropped
        assert (live.now, live.highest) == (600, 1600)
        del kept
        assert live.now == 600  # a view holds it
        del half, view
        assert live.now == 0
        live.count([before])
        assert live.now == 400


# ---------------------------------------------------------------- a whole backward


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Same(nn.Module):
    def forward(self, x):
        return Identity.apply(x)


def recomputing(block):
    recompute(block)
    return block


@pytest.mark.parametrize("end", [(), (Same(),)], ids=["", "and a Function"])
@pytest.mark.parametrize("wrap", [Checkpointed, recomputing], ids=["torch's checkpoint", "zbpp's"])
def test_bw_of_checkpointed_blocks_takes_the_memory_of_a_plain_backward_and_has_the_bits_of_b_and_w(
    wrap, end
):
    rows, hidden, num = 64, 128, 2
    x, y = torch.randn(2, num * rows, hidden)

    def block():
        layers = [nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)]
        return wrap(nn.Sequential(nn.LayerNorm(hidden), *layers))

    def model():
        torch.manual_seed(0)
        return nn.Sequential(*[block() for _ in range(6)], *end)

    def plain(model):
        for own in zip(x.chunk(num), y.chunk(num), strict=True):
            (nn.functional.mse_loss(model(own[0]), own[1]) / num).backward()

    models, peaks = [model() for _ in range(3)], []
    steps = [lambda: plain(models[0])]
    for module, schedule in zip(models[1:], ("1f1b", "zb_h1"), strict=True):
        pipeline = Pipeline({0: module}, plan(schedule, 1, num), nn.functional.mse_loss)
        steps.append(lambda pipeline=pipeline: pipeline.step(x, target=y))
    for step in steps:
        step()
        peaks.append(live_bytes(step, CPU).highest)
    _, whole, split = ([each.grad for each in module.parameters()] for module in models)
    assert all(map(torch.equal, whole, split))
    one_more = 4 * rows * 4 * hidden  # bytes: W of one block holds a dy, which a plain backward has dropped
    assert peaks[1] <= peaks[0] + one_more < peaks[2]


# ---------------------------------------------------------------- what a microbatch leaves on a stage


def test_a_linear_layer_keeps_x_until_b_and_x_and_dy_until_w():
    assert memory_of(nn.Linear(HIDDEN, HIDDEN, bias=False)) == StageMemory(saved=BYTES, deferred=2 * BYTES)


def test_the_last_stage_holds_what_the_loss_needs_and_the_loss():
    def square(output, target):
        return (output - target).square().mean()  # saves the difference

    found = memory_of(
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        loss_fn=square,
        target=torch.zeros(ROWS, HIDDEN),
        is_last=True,
    )
    scalars = 2 * 4  # the loss, and its gradient, which is made once for all microbatches
    assert found == StageMemory(saved=2 * BYTES + scalars, deferred=2 * BYTES + scalars)


def test_measuring_leaves_no_trace():
    module = nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, HIDDEN))
    grads = [torch.full_like(parameter, 3.0) for parameter in module.parameters()]
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        parameter.grad = grad
    state = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    assert memory_of(module).deferred > 0
    assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), grads, strict=True))
    assert all((grad == 3.0).all() for grad in grads)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_first_inputs_of_each_stage_are_copied_and_no_others():
    stages = {3: nn.ReLU(inplace=True), 5: nn.Tanh()}
    with first_inputs(stages) as inputs:
        for value in (1.0, 2.0):
            stages[3](torch.full((2,), value))
    stages[5](torch.ones(2))  # outside
    assert {index: [each.tolist() for each in found] for index, found in inputs.items()} == {3: [[1.0, 1.0]]}


# ---------------------------------------------------------------- many microbatches

WIDE = 256
BOUNDARY = 4 * WIDE  # bytes of what passes between two stages for one microbatch of one row
SCHEDULES = ["1f1b", "zb_h1", "zb_v"]
SIZES = [8, 16, 32]


def pipeline_for(rank, schedule, num_ranks, num_microbatches):
    timetable = plan(schedule, num_ranks, num_microbatches)
    model = Mlp(in_features=WIDE, hidden_size=WIDE, out_features=WIDE, num_layers=6)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    return Pipeline(stages, timetable, model.loss)


def at_the_peak(rank, num_ranks):
    """{(schedule, microbatches): (receive buffers, most bytes live in a step over those before it)}."""
    found = {}
    for schedule in SCHEDULES:
        for num_microbatches in SIZES:
            pipeline = pipeline_for(rank, schedule, num_ranks, num_microbatches)
            batch = torch.ones(num_microbatches, WIDE)
            for _ in range(NUM_COMPARED):  # they tell sizes and fingerprints, and make .grad and buffers
                pipeline.step(batch, target=batch)
            level = live_bytes(lambda p=pipeline, x=batch: p.step(x, target=x), CPU)
            found[schedule, num_microbatches] = len(pipeline._rank.executors["step"].pool), level.highest
    return found


@pytest.fixture(scope="module")
def peaks():
    return run_ranks(at_the_peak, 2, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_and_live_bytes_do_not_grow_with_the_number_of_microbatches(schedule, peaks):
    for rank in peaks:
        buffers, live = zip(*[rank[schedule, num] for num in SIZES], strict=True)
        assert len(set(buffers)) == 1
        assert buffers[0] > 0
        assert live[0] >= BOUNDARY
        # The losses, 4 bytes for each microbatch, are the caller's.
        assert max(live) - min(live) <= 4 * (SIZES[-1] - SIZES[0]) < BOUNDARY


# ---------------------------------------------------------------- the loss


def test_a_loss_that_returns_its_sum_and_count_is_measured_as_the_mean_is():
    """A trial weighs it as a step does; beside the same tensors it holds a few scalars."""

    def mean(output, target):
        return (output - target).square().sum() / target.numel()

    @mean_over(torch.numel)
    def sum_and_count(output, target):
        return (output - target).square().sum(), target.numel()

    options = {"is_last": True, "target": torch.zeros(ROWS, HIDDEN)}
    expected = memory_of(nn.Linear(HIDDEN, HIDDEN), loss_fn=mean, **options)
    found = memory_of(nn.Linear(HIDDEN, HIDDEN), loss_fn=sum_and_count, **options)
    assert found.saved == pytest.approx(expected.saved, abs=8)
    assert found.deferred == expected.deferred
