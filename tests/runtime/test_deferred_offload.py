"""What waits for W leaves between B and W: less memory, the same gradients, and what others hold stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import ActivationOffload, Costs, Pipeline, Recorder, Timetable, simulate
from zbpp.autograd import recompute
from zbpp.autograd.copies import OffloadError
from zbpp.runtime.memory import live_bytes
from zbpp.schedule import Value, choose_offload

M, ROWS, SIZE, WIDE = 6, 64, 64, 512
# Nothing runs between F and B, so that saved stays; all that is deferred waits for the end.
LATE_W = Timetable.parse(
    " ".join(f"0F{m} 0B{m}" for m in range(M)) + " " + " ".join(f"0W{m}" for m in range(M))
)
COSTS = Costs(f=2, b=2, w=2, host=0.1)
OFFLOAD = ActivationOffload(costs=COSTS, least_bytes=1)


def mlp():
    return nn.Sequential(nn.Linear(SIZE, WIDE), nn.GELU(), nn.Linear(WIDE, SIZE))


def batch():
    return torch.randn(M * ROWS, SIZE, generator=torch.Generator().manual_seed(0))


def trained(make, offload, num_steps=2):
    """Losses, gradients, the highest level of a further step, bytes of a microbatch that left."""
    torch.manual_seed(0)
    stage, x, losses = make(), batch(), []
    with Pipeline({0: stage}, LATE_W, F.mse_loss, offload=offload) as pipeline:
        for _ in range(num_steps):
            losses += [each.item() for each in pipeline.step(x, target=x)]
        level = live_bytes(lambda: pipeline.step(x, target=x), torch.device("cpu"))
        assert level.after == 0 or isinstance(stage, Remembers)
        left = 0 if offload is None else pipeline.offloaded_bytes("deferred")[0]
        if offload is not None:
            assert pipeline._engine._activations.copier.used_bytes == 0
        return losses, [each.grad for each in stage.parameters()], level.highest, left


def equal(found, expected):
    return found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))


def test_device_bytes_fall_by_the_planned_amount(tmp_path):
    """In a file, so that what is away is in no tensor."""
    expected = trained(mlp, None)
    found = trained(mlp, ActivationOffload(costs=COSTS, least_bytes=1, to=tmp_path))
    assert equal(found, expected)
    wide, narrow = ROWS * WIDE * 4, ROWS * SIZE * 4
    assert found[3] >= 2 * wide + narrow  # x and dy of the second layer, dy of the first; its x is the batch
    costs = Costs(f=2, b=2, w=2, host=0.1).in_bytes(2 * wide + narrow, found[3])
    without = simulate(LATE_W, costs)
    left = simulate(LATE_W, costs, choose_offload(without, costs))
    planned = without.peak_memory[0] - left.peak_memory[0]
    assert planned >= 2 * found[3]
    # Costs know no temporaries. Without offload the peak is within a B, which makes two wide gradients; with
    # offload it may be where two values are on their way back.
    assert planned <= expected[2] - found[2] <= planned + 2 * wide


class Attention(nn.Module):
    """A convolution, a tied weight, a weight under a computed chain, dropout and a residual."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x):
        x = x + self.second(torch.relu(self.first(x)))
        x = self.mix(x.view(-1, 4, SIZE)).view(-1, SIZE)
        x = x @ self.scale.tanh() + F.linear(F.linear(x, self.first.weight), self.first.weight.T)
        return F.dropout(x, 0.1)


def recomputing():
    stage = nn.Sequential(mlp(), mlp())
    recompute(stage[0])
    return stage


class OnCpu(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.inside(x)


@pytest.mark.parametrize("make", [Attention, recomputing, OnCpu, lambda: mlp().to(torch.bfloat16).float()])
def test_losses_and_gradients_are_equal_to_the_last_bit(make):
    found = trained(make, OFFLOAD)
    assert equal(found, trained(make, None))
    assert found[3] > 0


class Remembers(nn.Module):
    """Keeps the activation that the second layer's W reads, and looks at it when W has not yet run."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)
        self.kept, self.sums = [], []

    def forward(self, x):
        self.sums += [each.sum().item() for each in self.kept[-2:]]
        y = self.first(x).relu()
        self.kept.append(y.detach())
        return self.second(y)


def test_what_somebody_else_holds_stays_and_keeps_its_values():
    stages = []

    def make():
        stages.append(Remembers())
        return stages[-1]

    found = trained(make, OFFLOAD, num_steps=1)
    assert equal(found, trained(make, None, num_steps=1))
    assert found[3] < 2 * ROWS * WIDE * 4  # the kept activation is not among what leaves
    assert stages[0].sums == stages[1].sums
    assert all(map(torch.equal, stages[0].kept, stages[1].kept))


def test_exactly_the_named_values_leave():
    offload = ActivationOffload(values=(Value("deferred", 0, each) for each in (1, 3)), least_bytes=1)
    with Pipeline({0: mlp()}, LATE_W, F.mse_loss, offload=offload) as pipeline:
        program = str(pipeline._engine._executors["step"]._program)
        pipeline.step(batch(), target=batch())
        following = pipeline.with_timetable(LATE_W)  # a generator would be empty now
    programs = program, str(following._engine._executors["step"]._program)
    for each in programs:
        found = [line for line in each.splitlines() if line.startswith("Offload")]
        assert found == ["Offload deferred(0,1)", "Offload deferred(0,3)"]
    following.close()


def test_a_change_in_place_while_away_is_noticed():
    """x of the first layer is the caller's batch; dy of the second layer is what the hook below gets."""
    held = []

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.first = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x):
            y = self.first(x)
            held.append(y.detach())  # shares its count of changes with what is saved
            if len(held) == M:
                held[0].zero_()
            return self.linear(y)

    with (
        Pipeline({0: Inside()}, LATE_W, F.mse_loss, offload=OFFLOAD) as pipeline,
        pytest.raises(RuntimeError, match="changed in place before W"),
    ):
        pipeline.step(batch(), target=batch())


def test_no_room_for_what_waits_leaves_gradients_as_they_were_and_the_next_step_is_whole():
    expected = trained(mlp, None, num_steps=1)
    torch.manual_seed(0)
    stage = mlp()
    with Pipeline({0: stage}, LATE_W, F.mse_loss, offload=OFFLOAD) as pipeline:
        copier, calls = pipeline._engine._activations.copier, []

        def full(nbytes):
            calls.append(nbytes)
            if len(calls) > 9:  # some of it has left already
                raise MemoryError("planted")
            return make(nbytes)

        make, copier._make_space = copier._make_space, full
        with pytest.raises(OffloadError, match="no room for"):
            pipeline.step(batch(), target=batch())
        assert {each.grad for each in stage.parameters()} == {None}
        assert copier.used_bytes == 0
        copier._make_space = make
        assert [each.item() for each in pipeline.step(batch(), target=batch())] == expected[0]


def test_copies_are_in_the_measured_timeline_beside_the_actions():
    with Pipeline({0: mlp()}, LATE_W, F.mse_loss, offload=OFFLOAD) as pipeline:
        pipeline.step(batch(), target=batch())
        with pipeline.using(Recorder()) as recorder:
            pipeline.step(batch(), target=batch())
        timeline = recorder.timeline()
    planned = simulate(LATE_W, COSTS, choose_offload(simulate(LATE_W, COSTS), COSTS))
    assert [each[:3] for each in timeline.copies] == [each[:3] for each in planned.copies]
    for each in timeline.copies:
        assert 0 <= each.start < each.end <= timeline.makespan
