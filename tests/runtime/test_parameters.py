"""Parameters over stages and ranks: names, state, tied ones, the norm over all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import Pipeline, clip_grad_norm_, plan

VOCABULARY, SIZE, M = 11, 6, 4


def filled(module):
    """Weights drawn by name, so that a whole model and its stages have the same."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            seed = sum(map(ord, name))
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype))
    return module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Part(nn.Module):
    """Some blocks of a model of four, with whole-model names; first an embedding, last a head."""

    def __init__(self, numbers, embedding=None, head=None):
        super().__init__()
        self.embedding, self.head = embedding, head
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})
        self.double()

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def embedding():
    return nn.Embedding(VOCABULARY, SIZE)


def head():
    return nn.Linear(SIZE, VOCABULARY, bias=False)


def whole():
    return filled(Part(range(4), embedding(), head()))


def parts(timetable, rank):
    last = timetable.num_stages - 1
    layers = [range(4 * s // (last + 1), 4 * (s + 1) // (last + 1)) for s in range(last + 1)]
    return {
        s: filled(Part(layers[s], embedding() if s == 0 else None, head() if s == last else None))
        for s in timetable.stages_of(rank)
    }


def batch():
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(VOCABULARY, (2 * M,), generator=generator) for _ in range(2))


# ---------------------------------------------------------------- names, state and clipping, over two ranks


def stepped_and_clipped(rank, error_if_nonfinite=True):
    timetable, (ids, target) = plan("zb_v", 2, M), batch()
    pipeline = Pipeline(parts(timetable, rank), timetable, F.cross_entropy)
    with torch.no_grad():
        for p in pipeline.parameters():
            p.zero_()
    with pytest.raises(
        RuntimeError, match=r"missing here: \['.*; belonging to no stage: \['more'\]. strict=False loads"
    ):
        pipeline.load_state_dict({"more": torch.zeros(1)})
    pipeline.load_state_dict({"more": torch.zeros(1)}, strict=False)
    pipeline.load_state_dict(whole().state_dict())  # of which each rank takes its part
    pipeline.step(ids, target=target)
    norm = clip_grad_norm_(pipeline, 0.1)
    gradients = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
    again = float(clip_grad_norm_(pipeline, 0.1))
    if rank == 0:
        next(pipeline.parameters()).grad.view(-1)[0] = float("inf")
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf, so they were not clipped"):
        clip_grad_norm_(pipeline, 0.1, error_if_nonfinite=True)
    return pipeline.state_dict(), gradients, float(norm), again


@pytest.fixture(scope="module")
def of_two_ranks():
    return run_ranks(stepped_and_clipped, 2)


def plain():
    """The same step of the whole model, and torch's own clipping."""
    model, (ids, target) = whole(), batch()
    for x, y in zip(ids.chunk(M), target.chunk(M), strict=True):
        (F.cross_entropy(model(x), y) / M).backward()
    return model, nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_names_state_and_gradients_are_those_of_the_whole_model(of_two_ranks):
    model, _ = plain()
    (first, of_first, *_), (second, of_second, *_) = of_two_ranks
    assert first.keys() | second.keys() == model.state_dict().keys()
    assert not first.keys() & second.keys()
    assert_close(first | second, model.state_dict())
    assert_close(of_first | of_second, {name: p.grad for name, p in model.named_parameters()})


def test_the_norm_over_all_ranks_is_torchs_and_the_same_bits_on_every_rank_and_for_every_cut(of_two_ranks):
    _, expected = plain()
    norms = {norm for *_, norm, _ in of_two_ranks}
    for schedule, stages_per_rank in (("gpipe", None), ("interleaved_1f1b", 2)):
        timetable, (ids, target) = plan(schedule, 1, M, stages_per_rank=stages_per_rank), batch()
        pipeline = Pipeline(parts(timetable, 0), timetable, F.cross_entropy)
        pipeline.step(ids, target=target)
        norms.add(float(clip_grad_norm_(pipeline, 0.1)))
    (norm,) = norms
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for *_, again in of_two_ranks:
        assert again == pytest.approx(0.1, rel=1e-5)


# ---------------------------------------------------------------- one process


def test_names_that_stages_share_are_told_apart_by_the_stage():
    stages = {0: nn.Sequential(nn.Linear(2, 2)), 1: nn.Sequential(nn.Linear(2, 2))}
    pipeline = Pipeline(stages, plan("zb_v", 1, 2), F.mse_loss)
    names = ["stages.0.0.weight", "stages.0.0.bias", "stages.1.0.weight", "stages.1.0.bias"]
    assert [name for name, _ in pipeline.named_parameters()] == list(pipeline.state_dict()) == names
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    for p in pipeline.parameters():
        p.data.zero_()
    pipeline.load_state_dict(before)
    assert_close(pipeline.state_dict(), before, tolerance=0)


def test_clipping_counts_main_grads_and_takes_a_pipeline_only():
    stage = nn.Linear(2, 2)
    pipeline = Pipeline({0: stage}, plan("1f1b", 1, 1), F.mse_loss)
    stage.weight.main_grad, stage.bias.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 4.0])
    assert float(clip_grad_norm_(pipeline, 0.5)) == 5.0
    torch.testing.assert_close(stage.weight.main_grad[0], torch.tensor([0.3, 0.0]))
    with pytest.raises(TypeError, match="takes a Pipeline, not"):
        clip_grad_norm_(pipeline.parameters(), 1.0)


def test_a_loss_with_parameters_of_its_own_is_trained_clipped_and_saved():
    """They were in no list: an optimizer over `pipeline.parameters()` left them as they were."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, output, target):
            return self.scale * F.mse_loss(output, target)

    layer, loss_fn = nn.Linear(SIZE, SIZE).double(), Weighted()
    pipeline = Pipeline({0: layer}, plan("1f1b", 1, M), loss_fn)
    assert [name for name, _ in pipeline.named_parameters()] == ["weight", "bias", "loss.scale"]
    x, target = torch.randn(2, 2 * M, SIZE, dtype=torch.float64)
    pipeline.step(x, target=target)
    expected = torch.nn.utils.get_total_norm([p.grad for p in (*layer.parameters(), loss_fn.scale)])
    torch.testing.assert_close(clip_grad_norm_(pipeline, 1.0), expected)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    with torch.no_grad():
        loss_fn.scale.zero_()
    pipeline.load_state_dict(state)
    assert loss_fn.scale.item() == 2.0
    with pytest.raises(RuntimeError, match="missing here: .'loss.scale'.;"):
        pipeline.load_state_dict({name: value for name, value in state.items() if name != "loss.scale"})
