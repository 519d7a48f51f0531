"""Under NCCL's rules, which a backend of the tests keeps on the CPU, nothing deadlocks and no number changes.

What the backend can't emulate is listed in helpers/nccl_rules.py.
"""

import random
import sys
from itertools import count, islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbpp
from helpers.nccl_rules import wait_for_device
from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from zbpp import ActivationOffload, GradientRelease, Pipeline, PostValidation, clip_grad_norm_, make_mesh
from zbpp.autograd import recompute
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.models.llama import Llama
from zbpp.runtime import links
from zbpp.runtime.processes import groups
from zbpp.schedule import Timetable
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.passes.posts import ON_HOST

VOCAB, TIME, ROWS, M, STEPS, CLIP = 17, 4, 16, 8, 3, 0.5
SOME = ("1f1b", "zb_h1", "zb_v", "interleaved_zb")

# (schedule, degrees of the mesh, what is on)
EVERY_CASE = [
    *((schedule, (), "") for schedule in FAMILIES),
    *((schedule, (degree,), "") for schedule in SOME for degree in ("replicate", "shard", "tensor")),
    *(("zb_h1", pair, "") for pair in (("replicate", "shard"), ("replicate", "tensor"), ("shard", "tensor"))),
    *(("zb_v", (), on) for on in ("offload", "offload_weights", "recompute", "release", "validation")),
    *(("zb_h1", (), on) for on in ("dynamic_shapes", "evaluate", "tied", "validation")),
    ("interleaved_zb", ("replicate",), "validation"),
    ("zb_h1", ("shard",), "evaluate"),
    ("1f1b", ("replicate",), "tied"),
]
A_FEW = [("zb_v", (), ""), ("zb_h1", ("replicate",), ""), ("zb_h1", (), "validation")]
CASES = [
    pytest.param(A_FEW, id="a few", marks=pytest.mark.slow),
    pytest.param(EVERY_CASE, id="every", marks=[pytest.mark.nightly, pytest.mark.timeout(1000)]),
]


class Model:
    """A llama in float64, with recomputed layers or one weight for embedding and head if wanted."""

    def __init__(self, on=""):
        self._on = on
        ties = {"tie_embeddings": True} if on == "tied" else {}
        self._model = Llama(
            vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24,
            sequence_length=TIME, **ties,
        )  # fmt: skip
        self.loss, self.parallelize = self._model.loss, self._model.parallelize
        self.tied = getattr(self._model, "tied", dict)

    def build_stage(self, index, num_stages):
        stage = self._model.build_stage(index, num_stages).double()
        if self._on == "recompute":
            recompute(stage)
        return stage


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def alone(is_tied):
    """The losses of one process and of torch's own backward, with a held-out one behind the last step."""
    model = Model("tied" if is_tied else "")
    whole = model.build_stage(0, 1)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.5)
    losses = []
    for step in range(STEPS):
        inputs, target = batch(step)
        loss = model.loss(whole(inputs), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
    return losses


def trained(case):
    """The losses of a few steps; [] where the last stage is not."""
    schedule, degrees, on = case
    mesh = make_mesh(**dict.fromkeys(degrees, 2)) if degrees else None
    num_ranks = dist.get_world_size() // 2 ** len(degrees)
    timetable = zbpp.plan(schedule, num_ranks, M // 2 ** sum(each != "tensor" for each in degrees))
    model, options = Model(on), {"dynamic_shapes": on == "dynamic_shapes"}
    stages = model
    if on == "offload":
        options["extras"] = [ActivationOffload(zbpp.Costs(host=1e-6), least_bytes=1)]
    if on == "offload_weights":
        stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(dist.get_rank())}
        OffloadedWeights(stages, "cpu")
    pipeline = Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=30.0, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.5)
    if on == "release":
        pipeline.use(GradientRelease(optimizer))
    step = PostValidation(pipeline, optimizer, clip_norm=CLIP).step if on == "validation" else pipeline.step
    losses = []
    for number in range(STEPS):
        size = ROWS // pipeline.place.num_data_parts
        inputs, target = (each[pipeline.place.data_part * size :][:size] for each in batch(number))
        if on == "evaluate":
            pipeline.evaluate(
                inputs[: timetable.num_microbatches], target=target[: timetable.num_microbatches]
            )
            pipeline.predict(inputs[:3])
        found = step(inputs, target=target)
        losses += [torch.stack(found).mean().item()] if found else []
        if on not in ("release", "validation"):
            clip_grad_norm_(pipeline, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return losses


def of_cases(rank, cases):
    return [trained(case) for case in cases]


@pytest.mark.parametrize("cases", CASES)
def test_schedules_meshes_and_switches_train_under_nccls_rules(cases):
    everyone = run_ranks(of_cases, 4, cases, timeout=900, backend="strict")
    expected = {is_tied: torch.tensor(alone(is_tied), dtype=torch.float64) for is_tied in (False, True)}
    for number, (schedule, degrees, on) in enumerate(cases):
        name = f"{schedule} {degrees} {on}"
        found = [torch.tensor(each[number], dtype=torch.float64) for each in everyone if each[number]]
        assert found, name
        mean = torch.stack(found).mean(0)  # of all parts of the data
        if on == "release":  # which can't clip
            assert mean[0].item() == pytest.approx(expected[False][0].item(), rel=1e-12), name
        else:
            tolerance = 1e-8 if on == "validation" else 1e-12  # torch's clipping adds 1e-6 to the norm
            torch.testing.assert_close(mean, expected[on == "tied"], rtol=tolerance, atol=0.0, msg=name)


def small_pipeline(timeout=30.0):
    """Two linear stages of two ranks, whose plan sends in both directions."""
    timetable = zbpp.plan("zb_h1", 2, 4)
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
    rank = dist.get_rank()
    return Pipeline({rank: stages[rank]}, timetable, nn.functional.mse_loss, timeout=timeout)


def losses_of_two_steps(timeout=30.0):
    pipeline = small_pipeline(timeout)
    x = torch.ones(4, 3, dtype=torch.float64)
    found = [torch.stack(losses).sum().item() for _ in range(2) if (losses := pipeline.step(x, target=-x))]
    return found, [parameter.grad.sum().item() for parameter in pipeline.parameters()]


def with_one_group_for_both_directions(rank):
    """What a rank says if x and g share a communicator."""
    make, close = groups.link_groups, groups.close_groups

    def make_one(*arguments):
        made = make(*arguments)
        return dict.fromkeys(made, next(iter(made.values())))

    replace(make, make_one)
    replace(close, lambda made: close(dict.fromkeys(made)))
    return said(lambda: losses_of_two_steps(timeout=3.0))


def replace(function, other):
    """In all modules that have imported the function."""
    for module in [each for name, each in sys.modules.items() if name.startswith("zbpp")]:
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, other)


def with_a_sent_tensor_that_is_changed(rank):
    send = links.Outbox.send

    def send_and_change(outbox, channel, message):
        send(outbox, channel, message)
        message[0].detach().mul_(2)

    links.Outbox.send = send_and_change
    return said(lambda: losses_of_two_steps(timeout=3.0))


def without_waits(rank):
    """The loss of a step whose receives are not waited for, on the rank of the last stage."""
    receive, leaves_out, kept = links.Inbox.receive, False, []

    def receive_at_once(inbox):
        if leaves_out:
            kept.extend(inbox._posted[0].works)
            inbox._posted[0] = inbox._posted[0]._replace(works=[])
        return receive(inbox)

    links.Inbox.receive = receive_at_once
    pipeline = small_pipeline()
    x = torch.ones(4, 3, dtype=torch.float64)
    losses = []
    for step in range(2):
        leaves_out = step == 1  # the first messages have headers, which are read at once
        losses += [float(sum(found)) for found in [pipeline.step(x, target=-x)] if found]
    dist.barrier()
    return losses


class WaitsForTheDevice(nn.Module):
    """A layer whose forward and backward wait for the whole device at random places, as a tuner does."""

    def __init__(self, seed, share):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.random, self.share, self.num_waits = random.Random(f"{seed} {dist.get_rank()}"), share, 0

    def forward(self, x):
        self.maybe_wait()
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.maybe_wait())
        return y

    def maybe_wait(self):
        if self.random.random() < self.share:
            self.num_waits += 1
            wait_for_device()


def first_step_with_waits(rank, cases, timeout):
    """For each (timetable, seed, share): how often this rank waited for the device in its first step."""
    found = []
    for text, seed, share in cases:
        timetable = Timetable.parse(text)
        stages = {stage: WaitsForTheDevice(seed + stage, share) for stage in timetable.stages_of(rank)}
        x = torch.ones(timetable.num_microbatches, 3, dtype=torch.float64)
        with Pipeline(stages, timetable, nn.functional.mse_loss, timeout=timeout) as pipeline:
            pipeline.step(x, target=-x)
            found.append(sum(stage.num_waits for stage in stages.values()))
            for stage in stages.values():
                stage.share = 0.0  # later steps wait for nothing
            pipeline.step(x, target=-x)
    return found


def first_step_as_on_gloo(rank, cases):
    """What a rank says if its first step starts as many receives ahead as the plan has in flight."""
    sys.modules["zbpp.runtime.rank"].ON_DEVICE = ON_HOST
    return said(lambda: first_step_with_waits(rank, cases, 3.0))


def random_cases(num_ranks, num_random):
    """Every schedule, and random timetables and placements, with waits at some or all actions."""
    for number, name in enumerate(FAMILIES):
        yield str(zbpp.plan(name, num_ranks, 2 * num_ranks)), number, (0.2, 1.0)[number % 2]
    drawn = (random_timetable(random.Random(seed), most_ranks=num_ranks) for seed in count())
    whole = (each for each in drawn if each.num_ranks == num_ranks)
    for number, timetable in enumerate(islice(whole, num_random)):
        yield str(timetable), number, (0.2, 0.6, 1.0)[number % 3]


@pytest.mark.parametrize(
    ("num_ranks", "num_random"),
    [pytest.param(2, 5, marks=pytest.mark.nightly), (4, 2), pytest.param(4, 40, marks=pytest.mark.nightly)],
)
def test_no_wait_for_the_device_hangs_a_first_step(num_ranks, num_random):
    cases = [*random_cases(num_ranks, num_random)]
    waits = run_ranks(first_step_with_waits, num_ranks, cases, 60.0, backend="strict")
    total = sum(map(sum, waits))
    print(f"{len(cases)} first steps on {num_ranks} ranks, {total} waits for the device")
    assert total > 10 * len(cases)


def third_step_with_waits(rank, timeout):
    """How often this rank waits for the device in its third step, as compiled stages whose guards fail do."""
    timetable = zbpp.plan("zb_h1", 2, 6)
    stages = {stage: WaitsForTheDevice(stage, 0.0) for stage in timetable.stages_of(rank)}
    for stage in stages.values():
        stage._compiled_call_impl = stage._call_impl  # as module.compile()
    x = torch.ones(6, 3, dtype=torch.float64)
    with Pipeline(stages, timetable, nn.functional.mse_loss, timeout=timeout) as pipeline:
        for share in (0.0, 0.0, 1.0):
            for stage in stages.values():
                stage.share = share
            pipeline.step(x, target=-x)
    return [stage.num_waits for stage in stages.values()]


def test_no_wait_for_the_device_hangs_a_later_step_of_compiled_stages():
    assert run_ranks(third_step_with_waits, 2, 5.0, backend="strict") == [[12], [12]]


def programs_of_steps(rank):
    """The programs that run in an ordinary step, in two recorded ones, and in the next one."""
    found = []
    with small_pipeline() as pipeline:
        x = torch.ones(4, 3, dtype=torch.float64)

        def step():
            pipeline.step(x, target=-x)
            found.append(str(pipeline._rank.executors["step"].program))

        step()
        step()
        with pipeline.using(zbpp.Recorder()):
            step()
            step()
        step()
    return found


def test_a_recorded_step_starts_its_receives_as_an_ordinary_step():
    for first, *others in run_ranks(programs_of_steps, 2, backend="strict"):
        assert len({*others}) == 1
        assert first != others[0]


def evaluations(rank):
    """Of each evaluation: its program, and how many messages have a header."""
    found, headers = [], []
    stages = {rank: nn.Linear(3, 3)}
    with zbpp.Pipeline(stages, "gpipe", num_microbatches=2, loss_fn=nn.functional.mse_loss) as pipeline:
        executor = pipeline._rank.executors["evaluate"]
        learn = executor.layouts.learn
        executor.layouts.learn = lambda *known: (headers.append(known), learn(*known))
        for is_cast in (False, False, True, True, False):
            headers.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                pipeline.evaluate(torch.ones(4, 3), target=torch.ones(4, 3))
            found.append((str(executor.program), len(headers)))
    return found


def test_evaluations_after_the_first_one_have_no_headers_and_start_receives_ahead():
    """Under autocast messages have other dtypes."""
    for found in run_ranks(evaluations, 2, backend="strict"):
        assert [headers for _, headers in found] == [1, 0, 1, 0, 0]
        programs = [program for program, _ in found]
        is_waiting = [each == programs[0] for each in programs]
        assert is_waiting == ([True, False, True, False, False] if "Recv" in programs[0] else [True] * 5)


def test_a_wait_for_the_device_hangs_a_first_step_whose_receives_start_ahead():
    cases = [(str(zbpp.plan("zb_h1", 2, 4)), 0, 1.0)]
    found = run_ranks(first_step_as_on_gloo, 2, cases, backend="strict", fresh=True)
    assert any("imed out" in each or "NCCL would hang" in each for each in found), found


def with_another_dtype(rank):
    group = dist.new_group([0, 1])
    tensor = torch.ones(2, dtype=torch.float64 if rank else torch.float32)
    return said(lambda: (dist.recv if rank else dist.send)(tensor, 1 - rank, group=group))


class Codes(nn.Module):
    """Returns its input and, of each row, the number of a bin."""

    def __init__(self, dtype):
        super().__init__()
        self.layer, self.dtype = nn.Linear(3, 3, dtype=torch.float64), dtype

    def forward(self, x):
        return self.layer(x), torch.arange(len(x)).to(self.dtype) * 300


class WeighedByCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, codes):
        return self.layer(x) * codes.double()[:, None]


def losses_with_codes(rank, dtype):
    torch.manual_seed(0)
    stages = [Codes(dtype), WeighedByCodes()]
    x = torch.ones(4, 3, dtype=torch.float64)
    with Pipeline({rank: stages[rank]}, zbpp.plan("1f1b", 2, 2), nn.functional.mse_loss) as pipeline:
        return [loss.item() for _ in range(2) for loss in pipeline.step(x, target=x)]


def test_messages_may_have_dtypes_that_nccl_lacks():
    """Integers of 16 bits, as dictionaries of codes and packed masks have."""
    _, expected = run_ranks(losses_with_codes, 2, torch.int64, backend="strict")
    _, found = run_ranks(losses_with_codes, 2, torch.int16, backend="strict")
    assert found == expected
    assert len(found) == 4


def with_16_bit_integers(rank):
    return said(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)))


def said(call):
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_one_group_for_both_directions_hangs():
    found = run_ranks(with_one_group_for_both_directions, 2, backend="strict")
    # The first rank that gives up breaks the connection of the other one.
    assert any("imed out" in each or "NCCL would hang" in each for each in found), found
    assert all("CommunicationError" in each for each in found), found


def test_a_buffer_that_is_used_too_early_is_noticed():
    (first, _) = run_ranks(with_a_sent_tensor_that_is_changed, 2, backend="strict")
    assert "the buffer of a send was changed before its wait()" in first


def test_a_wait_that_is_left_out_gives_wrong_numbers():
    right, wrong = run_ranks(without_waits, 2, backend="strict")[1]
    assert right < 100 < wrong


def test_messages_of_another_dtype_and_dtypes_that_nccl_lacks_are_refused():
    _, second = run_ranks(with_another_dtype, 2, backend="strict", fresh=True)
    assert "is received" in second
    found = run_ranks(with_16_bit_integers, 2, backend="strict")
    assert set(found) == {"TypeError: NCCL has no torch.int16"}
