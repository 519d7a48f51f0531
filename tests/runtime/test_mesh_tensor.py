"""Tensor-parallel stages in a pipeline, alone and with replicas: the losses and gradients of one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import Pipeline, clip_grad_norm_, make_mesh, plan
from zbpp.models.llama import Llama

VOCAB, M, ROWS, TIME = 17, 4, 8, 6
TIED = (False, True)
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "interleaved_zb")


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


class InFloat64:
    """The model with stages in float64."""

    def __init__(self, model):
        self._model = model
        self.loss, self.parallelize = model.loss, model.parallelize

    def build_stage(self, index, num_stages):
        return self._model.build_stage(index, num_stages).double()

    def tied(self):
        return self._model.tied() if hasattr(self._model, "tied") else {}


def in_mesh(rank, degrees, schedules):
    """Per schedule and kind what `alone` returns, the part of the data, and the share of split gradients."""
    found = {}
    mesh = make_mesh(**degrees)
    with float64():
        for schedule in schedules:
            for is_tied in TIED:
                model = InFloat64(llama(is_tied))
                num_microbatches = M // degrees.get("replicate", 1)
                with Pipeline(model, schedule, num_microbatches=num_microbatches, mesh=mesh) as pipeline:
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
                    found[schedule, is_tied] = losses, grads, norm, pipeline.place.data_part, split
    return found


@pytest.mark.parametrize(
    "degrees, processes, schedules",
    [({"tensor": 2}, 4, SCHEDULES), ({"replicate": 2, "tensor": 2}, 8, ("zb_h1", "zb_v"))],
)
def test_tensor_parallel_pipelines_have_the_losses_and_gradients_of_one_process(
    degrees, processes, schedules
):
    everyone = run_ranks(in_mesh, processes, degrees, schedules, timeout=300)
    for is_tied in TIED:
        losses, grads, norm = alone(is_tied)
        for schedule in schedules:
            reported = {}  # data part -> its losses
            for found in everyone:
                some_losses, some_grads, some_norm, part, split = found[schedule, is_tied]
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


def test_plain_stages_in_a_mesh_with_a_tensor_dimension_are_refused():
    for told in run_ranks(unsplit, 2):
        assert "no parameter of the stages is split over it" in told
