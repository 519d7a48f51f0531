"""Which stream does what and waits for whom, recorded on the CPU; each rule is also seen to be broken.

None of this has run on a GPU: helpers/recorded_streams.py says what is recorded and what is not.
"""

from collections import Counter, deque
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.recorded_streams import FakeEvent, FakeStream, recorded
from zbpp import ActivationOffload, Costs, Pipeline, Timetable, plan
from zbpp.autograd.offload.host_copier import Copier, Copy
from zbpp.autograd.offload.saved_activations import SavedActivations
from zbpp.devices import urgent_options
from zbpp.features.activation_offload.activation_offload import offload_of
from zbpp.features.weight_offload.weight_buffers import DeviceBuffers
from zbpp.features.weight_offload.weight_offload import OffloadedWeights, ToHost
from zbpp.observers.recorder import Recorder
from zbpp.runtime.buffers import BufferPool
from zbpp.runtime.host_links import HostLink
from zbpp.runtime.links import Inbox, Outbox
from zbpp.schedule import Value

M, SIZE, WIDE = 4, 16, 64
CPU = torch.device("cpu")
ALL_LATE = Timetable.parse(" ".join(f"0{op}{microbatch}" for op in "FBW" for microbatch in range(M)))
EVERYTHING = ActivationOffload(costs=Costs(f=2, b=2, w=2, host=0.1), least_bytes=1)


def stage():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(SIZE, WIDE), nn.GELU(), nn.Linear(WIDE, SIZE)) for _ in range(3)]
    )


def batch():
    return torch.randn(2 * M, SIZE, generator=torch.Generator().manual_seed(0))


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


def plain_gradients():
    """Those of plain autograd, of two steps, whose loss is the mean over microbatches."""
    module = stage()
    for _ in range(2):
        for x in batch().chunk(M):
            (F.mse_loss(module(x), x) / M).backward()
    return gradients(module)


# ---- Activations


def offloaded_steps(timetable=ALL_LATE):
    """The device, the stage and how often the host waited in the second step."""
    with recorded() as device:
        module, x = stage(), batch()
        with Pipeline({0: module}, timetable, F.mse_loss, extras=[EVERYTHING]) as pipeline:
            pipeline.step(x, target=x)
            before = device.num_waits
            pipeline.step(x, target=x)
            waits = device.num_waits - before
            assert offload_of(pipeline).nbytes[0] > 0
    return device, module, waits


@pytest.mark.parametrize("timetable", [ALL_LATE, plan("gpipe", 1, M)], ids=["all W late", "gpipe"])
def test_activations_leave_and_come_back_in_order_and_the_host_waits_for_nothing(timetable):
    device, module, waits = offloaded_steps(timetable)
    assert device.faults == []
    assert waits == 0
    assert [each.name for each in device.streams] == ["compute", "offload 1"]
    torch.testing.assert_close(gradients(module), plain_gradients())


def test_a_copy_that_nobody_waits_for_is_found(monkeypatch):
    monkeypatch.setattr(Copy, "wait", lambda copy: None)
    faults = set(offloaded_steps()[0].faults)
    assert "addmm_ on compute reads memory that copy_ on offload 1 writes: no event orders them" in faults
    assert "memory of compute is freed, and copy_ on offload 1 may still use it" in faults


def abandoned():
    """F has offloaded its tensors; before they are dropped the graph goes, as in a step that fails."""
    with recorded() as device:
        copier = Copier(CPU)
        activations = SavedActivations(copier, least_bytes=1)
        with activations.saving():
            y = stage()(batch().requires_grad_())
        activations.offload()
        del y
        device.look()
    return device


def test_memory_that_a_copy_reads_is_not_freed_before_the_copy_has_ended(monkeypatch):
    """It was: the copy read freed memory."""
    assert abandoned().faults == []
    monkeypatch.setattr(Copy, "wait", lambda copy: None)
    assert set(abandoned().faults) == {"memory of compute is freed, and copy_ on offload 1 may still use it"}


# ---- Weights


def steps_with_weights_on_the_host():
    """The device, the stage after two steps, and how often the host waited in a step and an evaluation."""
    with recorded() as device:
        module, x, waits = stage(), batch(), []
        OffloadedWeights({0: module}, CPU)
        with Pipeline({0: module}, "zb_h1", F.mse_loss, num_microbatches=M) as pipeline:
            for call in (pipeline.step, pipeline.step, pipeline.evaluate):
                before = device.num_waits
                call(x, target=x)
                waits.append(device.num_waits - before)
            found = gradients(module)
            with torch.no_grad():
                for parameter in module.parameters():  # as an optimizer on the host, or a swap of weights
                    parameter.mul_(2.0)
    return device, found, waits


def test_host_memory_of_weights_and_gradients_is_the_callers_when_a_call_returns():
    device, found, waits = steps_with_weights_on_the_host()
    assert device.faults == []
    assert waits == [2, 2, 1]  # for copies of gradients and of weights, at the end; nothing on the way
    torch.testing.assert_close(found, plain_gradients())


def test_gradients_of_offloaded_weights_go_to_the_host_once_per_step(monkeypatch):
    """They went there and came back for each microbatch, on the computation's stream."""
    sent = Counter()
    copy = ToHost._copy

    def counted(self, parameter, home):
        sent[id(parameter)] += 1
        return copy(self, parameter, home)

    monkeypatch.setattr(ToHost, "_copy", counted)
    device, found, _ = steps_with_weights_on_the_host()
    assert [*sent.values()] == [2] * len(found)  # two steps of M microbatches
    assert [each.name for each in device.streams] == ["compute", "weights 1", "gradients 2"]


@pytest.mark.parametrize(
    "owners, fault",
    [
        # Before: an evaluation returned while its copies still read weights.
        ([DeviceBuffers], "mul_ on host writes memory that copy_ on weights 1 reads"),
        ([ToHost], "clone on host reads memory that copy_ on gradients 2 writes"),
    ],
)
def test_host_memory_that_a_copy_still_uses_is_found(monkeypatch, owners, fault):
    for owner in owners:
        monkeypatch.setattr(owner, "finish", lambda self: None)
    device, *_ = steps_with_weights_on_the_host()
    assert f"{fault}: no event orders them" in device.faults


# ---- Messages


class _Work:
    def __init__(self, device, stream):
        self.device, self.ended = device, stream.record_event()

    def wait(self, limit=None):
        self.device.current().wait_event(self.ended)


class _Link:
    """A group of two ranks in one process: works as NCCL's streams do."""

    def __init__(self, device):
        self.device, self.stream, self.sent = device, device.side("messages"), deque()

    def send(self, tensors, peer, tag):
        return self._run(lambda: self.sent.append(tensors[0].clone()))

    def recv(self, tensors, peer, tag):
        return self._run(lambda: tensors[0].copy_(self.sent.popleft(), non_blocking=True))

    def _run(self, work):
        self.stream.wait_stream(self.device.main)
        with self.device.use(self.stream), torch.no_grad():
            work()
        return _Work(self.device, self.stream)


class _Gloo:
    """A group of two ranks in one process, which reads and writes host memory, as gloo does."""

    def __init__(self, device):
        self.device, self.sent = device, Queue()

    def send(self, tensors, peer, tag):
        with self.device.recording():  # the link's own thread
            self.sent.put(tensors[0].clone())
        return self

    def recv(self, tensors, peer, tag):
        return _Arriving(self.sent, tensors[0])

    def wait(self, limit=None):
        """Nothing: what was sent has been copied."""


class _Arriving:
    def __init__(self, sent, host):
        self.sent, self.host = sent, host

    def wait(self, limit=None):
        self.host.copy_(self.sent.get(timeout=20))


def _host_link(device):
    return HostLink(_Gloo(device), CPU)


def exchanged(num_messages=6, made=_Link):
    """Messages of one channel: computed, sent, two messages later released, received and used."""
    with recorded() as device:
        link, total = made(device), torch.zeros(SIZE)
        outbox = Outbox(1, link, CPU)
        inbox = Inbox(0, link, BufferPool(CPU))
        for number in range(num_messages + 2):
            if number < num_messages:
                outbox.send(Value("x", 1, number), (torch.full((SIZE,), float(number)),))
            if 1 <= number <= num_messages:  # the message that is taken next, and the one behind it
                inbox.post(Value("x", 1, number))
            if number < 2:
                continue
            outbox.release()
            (received,) = inbox.receive()
            total += received
            del received
        outbox.finish()
        if isinstance(link, HostLink):
            link.close()
    assert total.tolist() == [float(sum(range(num_messages)))] * SIZE
    assert len(inbox.pool) <= 2
    return device


def test_messages_are_read_when_they_have_arrived_and_freed_when_they_are_sent(monkeypatch):
    assert exchanged().faults == []
    monkeypatch.setattr(_Work, "wait", lambda work, limit: None)
    faults = set(exchanged().faults)
    assert "add_ on compute reads memory that copy_ on messages 1 writes: no event orders them" in faults
    assert "memory of compute is freed, and clone on messages 1 may still use it" in faults


def test_messages_through_host_memory_are_in_order_and_only_the_sending_thread_waits_for_the_device():
    device = exchanged(made=_host_link)
    assert device.faults == []
    assert set(device.waits) == {"event in zbpp sends_0"}


@pytest.mark.parametrize(
    ("owner", "name", "does", "fault"),
    [
        # gloo sends before the copy has ended
        (FakeEvent, "synchronize", lambda event: None, "clone on host reads memory that copy_ on messages 1"),
        # the consumer does not wait for the copy back
        (
            HostLink,
            "let_current_stream_wait",
            lambda *_: None,
            "add_ on compute reads memory that copy_ on messages 1",
        ),
        # a copy starts before its tensor is computed, and into a buffer that still has readers
        (FakeStream, "wait_event", lambda *_: None, "copy_ on messages 1 reads memory that full on compute"),
        (FakeStream, "wait_event", lambda *_: None, "copy_ on messages 1 writes memory that add_ on compute"),
    ],
)
def test_a_missing_wait_of_a_link_through_host_memory_is_found(monkeypatch, owner, name, does, fault):
    monkeypatch.setattr(owner, name, does)
    assert any(each.startswith(fault) for each in exchanged(made=_host_link).faults)


def test_links_on_nccl_have_streams_of_high_priority(monkeypatch):
    class Group:
        class Options:
            is_high_priority_stream, _timeout = False, None
            config = SimpleNamespace(max_ctas=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    limit = timedelta(seconds=5)
    options = urgent_options("nccl", limit)
    assert options.is_high_priority_stream is True
    assert options.config.max_ctas == 8
    assert options._timeout == limit  # torch warns of another one
    assert urgent_options("gloo", limit) is None


# ---- Timelines


def test_a_recorded_step_waits_for_nothing_and_its_times_are_read_after_one_wait():
    with recorded() as device:
        module, x = stage(), batch()
        with Pipeline({0: module}, plan("zb_h1", 1, M), F.mse_loss) as pipeline:
            pipeline.step(x, target=x)
            before = device.num_waits
            with pipeline.using(Recorder()) as recorder:
                pipeline.step(x, target=x)
            assert device.num_waits == before
            timeline = recorder.timeline()
            assert device.waits[before:] == ["synchronize in MainThread", "event in MainThread"]
            recorder.timeline()
            assert device.num_waits == before + 2
    assert (timeline.ends[0] > timeline.starts[0]).all()
    assert (timeline.starts[0][1:] >= timeline.ends[0][:-1]).all()
