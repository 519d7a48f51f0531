"""Float32 master weights: torch's own optimizer over float32 copies, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import MasterWeights, Pipeline, clip_grad_norm_, plan

M, ROWS, SIZE = 4, 8, 6
NARROW = [torch.bfloat16, torch.float16]


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, SIZE))


def batches(num, dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 2, ROWS, SIZE, generator=generator).to(dtype)


def mse(output, target):
    return F.mse_loss(output.float(), target.float())


def plain_loop(dtype, data):
    """Losses, masters: a 16-bit copy for autograd, float32 weights for torch's AdamW and clipping."""
    masters = module()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)
    losses = []
    for x, target in data:
        computing = copy.deepcopy(masters).to(dtype)
        for p in masters.parameters():
            p.grad = torch.zeros_like(p)
        for part, wanted in zip(x.chunk(M), target.chunk(M), strict=True):
            computing.zero_grad()
            loss = mse(computing(part), wanted)
            (loss / M).backward()
            losses.append(loss.item())
            for p, q in zip(masters.parameters(), computing.parameters(), strict=True):
                p.grad += q.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.1)
        optimizer.step()
    return losses, [p.detach() for p in masters.parameters()]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_users_loop_follows_a_plain_loop_with_float32_copies(dtype, is_before):
    """MasterWeights may be made before the Pipeline or after it."""
    stages, data = {0: module()}, batches(6, dtype)
    masters = MasterWeights(stages[0].parameters(), dtype) if is_before else None
    pipeline = Pipeline(stages, plan("zb_h1", 1, M), mse)
    masters = masters or MasterWeights(pipeline.parameters(), dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)
    losses = []
    for x, target in data:
        masters.zero_grad()
        assert not any(p.main_grad.any() for p in pipeline.parameters())
        losses += [loss.item() for loss in pipeline.step(x, target=target)]
        clip_grad_norm_(pipeline, 0.1)
        optimizer.step()
        masters.update()
        assert all(torch.equal(p, masters.of(p).to(dtype)) for p in pipeline.parameters())
    expected_losses, expected = plain_loop(dtype, data)
    assert losses == pytest.approx(expected_losses, rel=1e-2)
    for found, wanted in zip(masters.parameters(), expected, strict=True):
        assert found.dtype == torch.float32
        # Adam moves every weight by about lr a step, whatever its gradient's size.
        torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=0.01)
    moved = [(p - q).abs().max() for p, q in zip(masters.parameters(), module().parameters(), strict=True)]
    assert min(moved) > 0.03


class Mixture(nn.Module):
    """A frozen weight, a tied one, a buffer, integers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.register_buffer("mean", torch.ones(3))


def test_trainable_parameters_get_one_master_frozen_ones_are_cast_and_buffers_stay():
    stage = Mixture()
    masters = MasterWeights([*stage.one.parameters(), *stage.parameters()], torch.float16)
    assert len(list(masters.parameters())) == 1
    assert stage.one.weight is stage.other.weight
    assert stage.one.weight.main_grad is next(masters.parameters()).grad
    assert (stage.one.weight.dtype, stage.frozen.weight.dtype) == (torch.float16, torch.float16)
    assert (stage.number.dtype, stage.mean.dtype) == (torch.int64, torch.float32)
    assert torch.equal(masters.of(stage.frozen.weight), Mixture().frozen.weight)
    nothing = MasterWeights(nn.Linear(2, 2).requires_grad_(False).parameters(), torch.float16)
    nothing.zero_grad()
    nothing.update()


def plain_stage():
    """(a stage, a function in front of the pipeline, the parameters that have masters)."""
    stage = module()
    return stage, lambda x: x.requires_grad_(), [*stage.parameters()]


def reentrant_stage():
    stage, front, parameters = plain_stage()
    forward = stage.forward
    stage.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=True)
    return stage, front, parameters


def module_in_front():
    torch.manual_seed(1)
    front, stage = nn.Linear(SIZE, SIZE).to(torch.bfloat16), module()
    return stage, lambda x: front(x), [*front.parameters(), *stage.parameters()]


def sums_of(make):
    """What a step adds to the masters' gradients."""
    stage, front, parameters = make()
    masters = MasterWeights(parameters, torch.bfloat16)
    ((x, target),) = batches(1, torch.bfloat16)
    Pipeline({0: stage}, plan("zb_h1", 1, M), mse).step(front(x), target=target)
    assert all(each.grad is None for each in parameters)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)
    optimizer.step()
    masters.update()
    return [each.main_grad for each in parameters if each.requires_grad]


def test_masters_get_the_gradients_of_plain_backwards():
    """They went to .grad: the norm was 0, and no step trained anything."""
    found, expected = sums_of(reentrant_stage), sums_of(plain_stage)
    assert all(each.any() for each in expected)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # gradients in bfloat16
    in_front = sums_of(module_in_front)
    assert all(each.any() for each in in_front)


def test_gradients_that_a_backward_of_the_users_own_adds_beside_the_masters_are_refused():
    stage, _, parameters = plain_stage()
    masters = MasterWeights(parameters, torch.bfloat16)
    ((x, target),) = batches(1, torch.bfloat16)
    mse(stage(x), target).backward()
    with pytest.raises(RuntimeError, match=r"gradient in .grad, .* let the pipeline compute the loss"):
        masters.update()


def test_what_can_have_no_master_is_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"master weights are for torch.bfloat16 or torch.float16"):
        MasterWeights(layer.parameters(), torch.float32)
    with pytest.raises(ValueError, match=r"trainable parameter of torch.complex64 .*: freeze it"):
        MasterWeights([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], torch.bfloat16)


def test_an_optimizer_that_lost_its_gradients_is_noticed():
    """optimizer.zero_grad() sets .grad to None: every later step of the optimizer would do nothing."""
    masters = MasterWeights(nn.Linear(2, 2).parameters(), torch.bfloat16)
    optimizer = torch.optim.SGD(masters.parameters())
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call MasterWeights.zero_grad\(\) before each step"):
        masters.update()
    masters.zero_grad()
    masters.update()


def test_weights_loaded_past_their_masters_are_noticed():
    """The next update would overwrite them."""
    layer = nn.Linear(2, 2)
    masters = MasterWeights(layer.parameters(), torch.bfloat16)
    layer.load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(RuntimeError, match="load weights before MasterWeights is made"):
        masters.update()


# ---------------------------------------------------------------- DTensor


def sharded(rank):
    """Whole masters and weights of a tensor-parallel layer after two steps, and how they are placed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stage = module()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(stage, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    weight = stage[0].weight
    weight.note = "mine"
    masters = MasterWeights(stage.parameters(), torch.bfloat16)
    assert stage[0].weight is weight
    assert weight.note == "mine"
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.25)
    for step in range(2):
        masters.zero_grad()
        for seed, p in enumerate(stage.parameters()):
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + seed))
            if isinstance(p, DTensor):
                assert p.main_grad.placements == p.placements
                from torch.distributed.tensor import distribute_tensor

                values = distribute_tensor(values, p.device_mesh, p.placements)
            p.main_grad.add_(values)
        optimizer.step()
        masters.update()
    pairs = [(masters.of(p).detach(), p.detach()) for p in stage.parameters()]
    return [[each.full_tensor() if isinstance(each, DTensor) else each for each in pair] for pair in pairs]


def test_masters_of_dtensors_are_those_of_the_whole_tensors():
    expected = sharded(0)
    for found in run_ranks(sharded, 2):
        for pair, wanted in zip(found, expected, strict=True):
            assert [each.dtype for each in pair] == [torch.float32, torch.bfloat16]
            assert all(torch.equal(one, other) for one, other in zip(pair, wanted, strict=True))
