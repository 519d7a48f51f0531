"""Jobs of two processes on an accelerator have the losses and weights of the CPU.

All jobs of a device and a backend run in the same two processes, one after the other. They also show that an
event orders any two accesses to the same memory, in each operation of these steps: see tests/accelerator.
"""

import functools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import zbpp
from helpers import sliced_toy
from helpers.processes import outcomes, run_ranks
from zbpp import ActivationOffload, CudaGraphs, GradientRelease, Pipeline, PostValidation, make_mesh
from zbpp.autograd import recompute
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.models.llama import Llama

VOCAB, TIME, ROWS, M, STEPS, CLIP = 17, 4, 16, 8, 3, 0.5
WITH_GRAPHS = 5  # steps: two eager ones, a capture, which is replayed, and two replays


class Job(NamedTuple):
    """A schedule, the degrees of the mesh, and what is switched on."""

    schedule: str
    degree: str = ""
    on: str = ""

    @property
    def name(self):
        return "-".join(filter(None, self))


BY_DAY = [
    Job("1f1b"),
    *(Job("zb_v", degree) for degree in ("shard", "tensor")),
    *(Job("zb_v", on=on) for on in ("offload", "offload_weights", "release")),
    *(Job("zb_h1", on=on) for on in ("validation", "dynamic_shapes", "evaluate", "slices", "graphs")),
]
EVERY = [
    *(Job(schedule) for schedule in zbpp.planning.SCHEDULES),
    *(Job(schedule, degree) for schedule in ("1f1b", "zb_h1") for degree in ("replicate", "shard", "tensor")),
    *(Job("zb_h1", on=on) for on in ("offload", "offload_weights", "recompute", "release")),
    *(Job("zb_v", on=on) for on in ("validation", "dynamic_shapes", "evaluate", "slices", "graphs")),
    *(Job("zb_v", "replicate"), Job("zb_v", on="recompute")),
]
BY_DAY_ON_NPU = [Job("zb_v", "shard"), Job("zb_h1", on="validation"), Job("zb_v", on="offload")]
ON = [("cuda", "nccl"), ("npu", "hccl")]
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1500)]


class Model:
    """A llama in float64; with recompute, its layers compute their activations again."""

    def __init__(self, on):
        self._on = on
        self._model = Llama(
            vocab_size=VOCAB, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24,
            sequence_length=TIME,
        )  # fmt: skip
        self.loss, self.parallelize = self._model.loss, self._model.parallelize

    def build_stage(self, index, num_stages):
        stage = self._model.build_stage(index, num_stages).double()
        if self._on == "recompute":
            recompute(stage)
        return stage


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def made(job, device):
    """A pipeline and its optimizer."""
    if job.on == "slices":
        return made_sliced(job, device)
    mesh = make_mesh(**{job.degree: 2}, device_type=device) if job.degree else None
    num_parts = 2 if job.degree in ("replicate", "shard") else 1
    timetable = zbpp.plan(job.schedule, 1 if job.degree else 2, M // num_parts)
    model = stages = Model(job.on)
    options = {"dynamic_shapes": job.on == "dynamic_shapes", "device": device}
    if job.on == "offload":
        options["extras"] = [ActivationOffload(zbpp.Costs(host=1e-6), least_bytes=1)]
    if job.on == "graphs":
        options["extras"] = [CudaGraphs()]  # elsewhere than on CUDA it runs eagerly
    if job.on == "offload_weights":
        del options["device"]
        stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(dist.get_rank())}
        OffloadedWeights(stages, device)
    pipeline = Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=60.0, **options)
    # On an accelerator torch takes `foreach` by itself, which refuses DTensors and plain tensors together.
    options = {"foreach": False} if job.degree == "tensor" else {}
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.5, **options)
    if job.on == "release":
        pipeline.use(GradientRelease(optimizer))
    return pipeline, optimizer


def made_sliced(job, device):
    timetable = zbpp.plan(job.schedule, 2, M, num_slices=2)
    pipeline = Pipeline(
        sliced_toy.Toy(), timetable, device=device, slice_bounds=[0, TIME // 2, TIME], timeout=60.0
    )
    return pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.5)


def trained(job, device):
    """The losses of a few steps ([] where the last stage is not), and {name: weight}."""
    pipeline, optimizer = made(job, device)
    step = pipeline.step
    if job.on == "validation":
        step = PostValidation(pipeline, optimizer, clip_norm=CLIP).step
    losses = []
    num_steps = WITH_GRAPHS if job.on == "graphs" else STEPS
    for number in range(num_steps):
        size = ROWS // pipeline.place.num_data_parts
        rows = slice(pipeline.place.data_part * size, (pipeline.place.data_part + 1) * size)
        inputs, target = (each[rows].to(pipeline.device) % sliced_toy.WORDS for each in batch(number))
        if job.on == "evaluate":
            pipeline.evaluate(inputs[:M], target=target[:M])
            pipeline.predict(inputs[:3])
        found = step(inputs, target=target)
        losses += [torch.stack(found).mean().item()] if found else []
        if job.on not in ("release", "validation"):
            zbpp.clip_grad_norm_(pipeline, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert pipeline.device.type == torch.device(device).type
    if job.on == "graphs" and device == "cuda":
        (graphs,) = (each for each in pipeline.extras if isinstance(each, CudaGraphs))
        assert graphs.num_replays == 3
    pipeline.close()
    return losses, {name: whole(each) for name, each in pipeline.named_parameters()}


def whole(parameter):
    full = parameter.detach()
    return (full.full_tensor() if hasattr(full, "full_tensor") else full).cpu()


def of_jobs(rank, jobs, device):
    """{name of a job: its losses and weights}."""
    return {job.name: trained(job, device) for job in jobs}


@functools.cache
def on_the_cpu(jobs):
    return run_ranks(of_jobs, 2, jobs, "cpu", timeout=600)


def possible(jobs, device):
    """OffloadedWeights refuses a device of PrivateUse1, see below."""
    return tuple(job for job in jobs if device == "cuda" or job.on != "offload_weights")


def offloaded_weights(rank, device):
    OffloadedWeights({0: torch.nn.Linear(2, 2)}, device)


def test_offloaded_weights_refuse_a_device_where_no_parameter_of_the_cpu_can_have_its_memory():
    ((succeeded, text),) = outcomes(offloaded_weights, 1, "npu", device="npu")
    assert not succeeded
    assert "ValueError: weights can't be offloaded from npu: torch does not let a CPU parameter's" in text


@pytest.mark.parametrize(
    "jobs, device, backend",
    [
        pytest.param(tuple(BY_DAY), "cuda", "nccl", id="some-cuda", marks=pytest.mark.slow),
        pytest.param(tuple(BY_DAY_ON_NPU), "npu", "hccl", id="some-npu", marks=pytest.mark.slow),
        *(pytest.param(tuple(EVERY), *on, id=f"more-{on[0]}", marks=NIGHTLY) for on in ON),
        pytest.param(tuple(BY_DAY), "cuda", "gloo", id="some-gloo", marks=NIGHTLY),
    ],
)
def test_jobs_on_an_accelerator_have_the_losses_and_weights_of_the_cpu(jobs, device, backend):
    given = possible(jobs, device)
    found = run_ranks(of_jobs, 2, given, device, device=device, backend=backend, timeout=600)
    known = tuple(BY_DAY) if {*jobs} <= {*BY_DAY} else jobs  # computed once for all tests of the day
    for rank, expected in enumerate(on_the_cpu(known)):
        for name in [job.name for job in given]:
            losses, weights = expected[name]
            assert found[rank][name][0] == pytest.approx(losses, rel=1e-12), name
            for key, weight in weights.items():
                torch.testing.assert_close(found[rank][name][1][key], weight, rtol=1e-9, atol=1e-12)
