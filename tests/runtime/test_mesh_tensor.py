"""Tensor-parallel stages in a pipeline, alone and with replicas: the losses and gradients of one process."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.processes import run_ranks
from zbpp import Pipeline, auxiliary_loss, clip_grad_norm_, make_mesh, plan
from zbpp.models.llama import Llama

VOCAB, M, ROWS, TIME = 17, 2, 4, 6
CASES = [*product(("zb_h1", "zb_v", "interleaved_zb"), (True,)), ("1f1b", False)]  # schedule, is it tied?
AT_NIGHT = [*product(("zb_h1", "zb_v", "interleaved_zb"), (False,)), ("1f1b", True)]
FEWER = [("1f1b", False), ("zb_v", True)]  # with replicas besides: what they add is the same for all plans


def llama(is_tied):
    return Llama(
        vocab_size=VOCAB, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24,
        sequence_length=TIME, **({"tie_embeddings": True} if is_tied else {}),
    )  # fmt: skip


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def alone(is_tied):
    """The losses of two steps, the gradients that they add up to, and their norm."""
    model = llama(is_tied)
    whole = model.build_stage(0, 1).double()
    losses = []
    for step in range(2):
        inputs, target = batch(step)
        loss = model.loss(whole(inputs), target)
        loss.backward()
        losses.append(loss.item())
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    return losses, grads, torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()


class InDouble:
    """The model with stages in float64."""

    def __init__(self, model):
        self._model, self.loss, self.parallelize = model, model.loss, model.parallelize
        self.tied = getattr(model, "tied", dict)

    def build_stage(self, index, num_stages):
        return self._model.build_stage(index, num_stages).double()


def in_mesh(rank, degrees, cases):
    """Per case what `alone` returns, the part of the data, and the number of split gradients."""
    found = {}
    mesh = make_mesh(**degrees)
    for case in cases:
        schedule, is_tied = case
        model = InDouble(llama(is_tied))
        with Pipeline(model, schedule, num_microbatches=M, mesh=mesh) as pipeline:
            losses = []
            for step in range(2):
                size = ROWS // pipeline.place.num_data_parts
                start = pipeline.place.data_part * size
                inputs, target = (each[start:][:size] for each in batch(step))
                some = pipeline.step(inputs, target=target)
                losses.append(float(sum(some) / len(some)) if some else None)
            norm = clip_grad_norm_(pipeline, 1e9).item()
            own = dict(pipeline.named_parameters())
            split = sum(isinstance(p.grad, DTensor) for p in own.values())
            grads = {
                name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                for name, p in own.items()
            }
            found[case] = losses, grads, norm, pipeline.place.data_part, split
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(({"tensor": 2}, 4, CASES), id="4 processes"),
        pytest.param(({"replicate": 2, "tensor": 2}, 8, FEWER), id="8 processes", marks=pytest.mark.nightly),
        pytest.param(({"tensor": 2}, 4, AT_NIGHT), id="more cases", marks=pytest.mark.nightly),
    ],
)
def everyone(request):
    """What each process of a mesh has found. All cases run in the same processes."""
    degrees, processes, cases = request.param
    return run_ranks(in_mesh, processes, degrees, cases, timeout=300)


def test_tensor_parallel_pipelines_have_the_losses_and_gradients_of_one_process(everyone):
    for case in everyone[0]:
        losses, grads, norm = alone(case[1])
        reported = {}  # data part -> its losses
        for found in everyone:
            some_losses, some_grads, some_norm, part, split = found[case]
            assert split > 4
            assert some_norm == pytest.approx(norm, rel=1e-12)
            if None not in some_losses:
                reported[part] = some_losses
            for name, grad in some_grads.items():
                scale = grads[name].abs().max().item()
                torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-12 * scale, msg=name)
        means = [sum(each) / len(each) for each in zip(*reported.values(), strict=True)]
        assert means == pytest.approx(losses, rel=1e-12)


def unsplit(rank):
    model = llama(is_tied=False)
    timetable = plan("zb_h1", 1, 2)
    try:
        Pipeline({0: model.build_stage(0, 1)}, timetable, model.loss, mesh=make_mesh(tensor=2))
    except ValueError as error:
        return str(error)


class OnHalf(torch.nn.Module):
    """Two tensor-parallel layers; `loss` gets what lies between them, of which each process has a half."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.loss = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), loss

    def forward(self, x):
        between = self.up(x)
        return self.loss(between, self.down(between))


def report(between, output):
    auxiliary_loss("balance", between.square().mean())
    return output


def losses_of_halves(rank):
    mesh, said = make_mesh(tensor=2), []
    for loss in (report, lambda between, output: between):
        stage = parallelize_module(
            OnHalf(loss), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        pipeline = Pipeline({0: stage}, "1f1b", lambda y, _: y.square().mean(), mesh=mesh, num_microbatches=2)
        with pytest.raises(ValueError) as caught:
            pipeline.step(torch.arange(16.0).view(4, 4), target=torch.zeros(4))
        said.append(str(caught.value))
    return said


def test_a_loss_of_a_part_of_an_activation_is_refused():
    for auxiliary, main in run_ranks(losses_of_halves, 2):
        assert "balance differs between tensor-parallel processes" in auxiliary
        assert "the loss differs between tensor-parallel processes" in main


def test_plain_stages_in_a_mesh_with_a_tensor_dimension_are_refused():
    for told in run_ranks(unsplit, 2):
        assert "no parameter of the stages is split over it" in told
