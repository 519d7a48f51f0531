"""Parts of zbpp that depend on which device is used, on an accelerator: the results of the CPU or torch."""

import pytest
import torch
from torch import nn

import zbpp
from helpers.processes import run_ranks

on_both = pytest.mark.parametrize("device", ["cuda", pytest.param("npu", marks=pytest.mark.nightly)])


def gradients_of_a_closure(rank, device):
    """[the gradients of plain autograd, those of a checkpoint] of a block with dropout."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    found = []
    for wrap in (lambda forward: forward(), zbpp.checkpoint):
        torch.manual_seed(1)
        y = wrap(lambda: block(x))
        torch.rand(5, device=device)  # between forward and recompute the generator goes on
        y.sum().backward()
        found.append([each.grad.cpu() for each in block.parameters()])
        block.zero_grad()
    return found


@on_both
def test_a_checkpoint_of_a_closure_repeats_the_dropout_of_the_device(device):
    ((plain, checkpointed),) = run_ranks(gradients_of_a_closure, 1, device, device=device)
    assert all(map(torch.equal, plain, checkpointed))


def saved_weights(rank, device, folder):
    """[the weights, what a checkpoint has that was saved from another device than the current one]."""
    torch.manual_seed(0)
    stage = nn.Linear(64, 64).to(torch.device(device, 1))
    with zbpp.Pipeline({0: stage}, "gpipe", num_microbatches=1, loss_fn=nn.functional.mse_loss) as pipeline:
        torch.accelerator.set_device_index(0)
        weights = stage.weight.detach().cpu()
        zbpp.save(folder, pipeline, step=1, background=True).wait()
        with torch.no_grad():
            stage.weight.zero_()
        zbpp.load(folder, pipeline)
        return weights, stage.weight.detach().cpu()


@on_both
def test_a_background_save_from_a_device_that_is_not_the_current_one_has_finished_values(device, tmp_path):
    ((weights, saved),) = run_ranks(saved_weights, 1, device, tmp_path / "saved", device=device)
    assert torch.equal(weights, saved)


def losses_beside_a_stage_without_parameters(rank, device):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    stages = {rank: layers[rank].to(device)}
    x = torch.randn(4, 4)
    with zbpp.Pipeline(stages, "zb_h1", num_microbatches=2, loss_fn=nn.functional.mse_loss) as pipeline:
        x = x.to(pipeline.device)
        losses = pipeline.step(x, target=x)
        return pipeline.device.type, [each.item() for each in losses]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_stage_without_parameters_is_on_the_device_of_its_neighbours(backend):
    (_, (_, expected)) = run_ranks(losses_beside_a_stage_without_parameters, 2, "cpu")
    found = run_ranks(losses_beside_a_stage_without_parameters, 2, "cuda", device="cuda", backend=backend)
    assert found == [("cuda", []), ("cuda", expected)]
