"""Saved tensors that leave and come back: the same gradients, less memory, changes in place noticed."""

import copy
import errno
import resource
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from helpers.processes import outcomes
from zbpp import ActivationOffload, Pipeline, backward_input, plan
from zbpp.autograd import host_memory
from zbpp.autograd.copies import OffloadError, _ThreadCopy, copier_for
from zbpp.autograd.deferred_offload import DeferredTensors
from zbpp.autograd.offload import SavedActivations
from zbpp.runtime.boundary import graph_input
from zbpp.runtime.layout import TensorLayout
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.p2p import BufferPool

CPU = torch.device("cpu")
ROWS, SIZE = 64, 32
SMALLEST = 1  # bytes: everything leaves


class Layers(nn.Module):
    """Products, a convolution, norms, a softmax, dropout, views of one storage, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.convolution = nn.Conv1d(SIZE, SIZE, 3, padding=1)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.register_buffer("scale", torch.rand(ROWS, SIZE))

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.dropout(torch.softmax(q @ k.mT, -1), 0.1, True) @ v
        x = torch.tanh(self.convolution(x.mT[None])[0].mT)
        return self.out(x)


def layers():
    torch.manual_seed(0)
    return Layers()


def tokens():
    return torch.arange(ROWS) % 16


def activations_of(module, copier, call, **options):
    saved = SavedActivations(copier, **options)
    saved.keep([*module.parameters(), *module.buffers()])
    with saved.saving():
        output = call()
    return saved, output


def gradients(module):
    return {name: each.grad for name, each in module.named_parameters()}


def trained(to=None, *, fetched=True):
    """The gradients of one F, B, W; with a place to go, all that may leave is away in between."""
    module = layers()
    torch.manual_seed(1)
    if to is None:
        output = module(tokens())
    else:
        copier = copier_for(CPU, to)
        saved, output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
        assert saved.nbytes > 10 * ROWS * SIZE * 4
        saved.offload()
        saved.drop()
        if fetched:
            saved.fetch()
    _, weight_grads = backward_input(output, torch.ones_like(output), ())
    tasks = [type(each).__name__ for each in weight_grads._tasks]
    weight_grads.accumulate()
    if to is not None:
        assert copier.used_bytes == 0
        copier.close()
    return gradients(module), tasks


@pytest.mark.parametrize("fetched", [True, False])
@pytest.mark.parametrize("where", ["host", "file"])
def test_gradients_are_equal_to_the_last_bit_and_the_same_weights_wait(where, fetched, tmp_path):
    """A tensor that nobody has fetched comes back when autograd unpacks it."""
    expected, tasks = trained()
    found, found_tasks = trained("host" if where == "host" else tmp_path, fetched=fetched)
    assert found_tasks == tasks
    for name, each in expected.items():
        assert torch.equal(found[name], each), name
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_storage_leaves_once_and_its_device_memory_is_free_until_it_is_fetched(tmp_path):
    """torch's profiler counts the allocations; what is in the file is no tensor."""
    module = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(512, 256)
    copier = copier_for(CPU, tmp_path)
    wide = 512 * 1024 * 4
    kept = []

    def away():
        saved, output = activations_of(module, copier, lambda: module(x))
        saved.offload()
        saved.drop()
        kept.extend((saved, output))
        assert saved.nbytes == 2 * wide + x.nbytes  # GELU's input and output, which are saved twice, and x

    assert live_bytes(away, CPU).after == 512 * 256 * 4  # the output
    assert live_bytes(lambda: (kept[0].fetch(), kept[0].wait()), CPU).after == 2 * wide + x.nbytes
    copier.close()


def test_parameters_buffers_and_what_the_caller_keeps_stay():
    module, copier = layers(), copier_for(CPU)
    x = torch.randn(ROWS, SIZE)
    saved, output = activations_of(
        module, copier, lambda: module.scale * module.out(x) * module.out.weight[0], least_bytes=SMALLEST
    )
    assert saved.nbytes == x.nbytes + output.nbytes  # and scale * out(x)
    saved.leave_out([x])
    assert saved.nbytes == output.nbytes


def taken_and_filled(pool, layout, value):
    with torch.no_grad():
        return pool.take(layout).fill_(value)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_received_buffer_is_in_use_until_w_where_offload_alone_holds_it(requires_grad):
    """W's x is the received x, and the pool gives a buffer out again once nothing uses its storage."""
    module, pool = nn.Linear(SIZE, SIZE), BufferPool(CPU)
    layout = TensorLayout(torch.float32, (ROWS, SIZE), requires_grad)
    received = [graph_input(taken_and_filled(pool, layout, 1))]
    address = received[0].data_ptr()
    saved, output = activations_of(module, copier_for(CPU), lambda: module(received[0]), least_bytes=SMALLEST)
    saved.leave_out(received)
    if not requires_grad:
        received.clear()
    first = taken_and_filled(pool, layout, 7)
    _, weight_grads = backward_input(output, torch.ones_like(output), received, [*module.parameters()])
    received.clear()
    del output
    second = taken_and_filled(pool, layout, 8)
    weight_grads.accumulate()
    assert torch.equal(module.weight.grad, torch.full((SIZE, SIZE), float(ROWS)))
    assert address not in {first.data_ptr(), second.data_ptr()}
    assert pool.take(layout).data_ptr() == address  # W was its last user


def test_a_storage_that_another_b_still_needs_does_not_leave_until_w():
    """The output of one stage is the x of the next one; both are on one rank, and both offload."""
    below, above = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), nn.Linear(SIZE, SIZE)
    copier, options = copier_for(CPU), {"least_bytes": SMALLEST}
    first, y = activations_of(below, copier, lambda: below(torch.ones(ROWS, SIZE)), **options)
    message = y.detach()
    first.leave_out([message])
    second, output = activations_of(above, copier, partial(above, message), **options)
    second.leave_out([message])
    edge = get_gradient_edge(y)
    del message, y  # from here on the graphs and offload alone hold it
    _, weight_grads = backward_input(output, torch.ones_like(output), [], [*above.parameters()])
    del output
    deferred = DeferredTensors(weight_grads, copier, **options)
    deferred.offload()
    deferred.drop()
    backward_input([edge], [torch.ones(ROWS, SIZE)], [], [*below.parameters()])[1].accumulate()
    deferred.fetch()
    deferred.wait()
    weight_grads.accumulate()
    expected = nn.Sequential(copy.deepcopy(below), copy.deepcopy(above))
    expected.zero_grad()
    inside = expected[0](torch.ones(ROWS, SIZE))
    inside.backward(torch.ones(ROWS, SIZE))
    expected[1](inside.detach()).backward(torch.ones(ROWS, SIZE))
    found = nn.Sequential(below, above)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(found.parameters(), expected.parameters(), strict=True)
    )


def test_small_storages_stay():
    module, copier = nn.Linear(8, 8), copier_for(CPU)
    saved, _ = activations_of(module, copier, lambda: module(torch.randn(4, 8)))
    assert saved.nbytes == 0


def test_above_its_limit_a_copier_takes_nothing():
    module, copier = layers(), copier_for(CPU)
    copier.most_bytes = 100
    saved, output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
    saved.offload()
    saved.drop()
    assert copier.total_bytes == 0
    backward_input(output, torch.ones_like(output), ())[1].accumulate()


@pytest.mark.parametrize("when", ["before", "copied", "away", "back"])
def test_a_change_in_place_is_noticed_as_autograd_notices_it(when):
    """Plain autograd raises in B, whenever it happened; so does what was away."""
    copier = copier_for(CPU)
    x = torch.randn(5, 4)
    layer = nn.Linear(4, 4)
    saved, output = activations_of(layer, copier, lambda: torch.tanh(layer(x)), least_bytes=SMALLEST)
    change = x.zero_
    steps = {
        "before": [change, saved.offload, saved.drop, saved.fetch],
        "copied": [saved.offload, change, saved.drop, saved.fetch],
        "away": [saved.offload, saved.drop, change, saved.fetch],
        "back": [saved.offload, saved.drop, saved.fetch, change],
    }
    for step in steps[when]:
        step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_input(output, torch.ones(5, 4), ())


def test_a_change_in_place_between_b_and_w_is_noticed():
    copier = copier_for(CPU)
    x = torch.randn(5, 4)
    layer = nn.Linear(4, 4)
    saved, output = activations_of(layer, copier, lambda: layer(x), least_bytes=SMALLEST)
    saved.offload()
    saved.drop()
    _, weight_grads = backward_input(output, torch.ones(5, 4), ())
    x.zero_()
    with pytest.raises(RuntimeError, match=r"the input that AddmmBackward0 saved .*changed in place"):
        weight_grads.accumulate()


def test_an_activation_that_is_never_used_gives_its_space_back():
    module, copier = layers(), copier_for(CPU)
    saved, output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
    saved.offload()
    saved.drop()
    assert copier.used_bytes > 0
    del output
    assert copier.used_bytes == 0
    number = copier.num_spaces
    saved, _output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
    saved.offload()
    assert copier.num_spaces == number


def test_host_memory_that_runs_out_is_said_with_what_to_write():
    module, copier = layers(), copier_for(CPU)

    def full(nbytes):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    copier._make_space = full
    saved, output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
    with pytest.raises(OffloadError, match=r"no room for \d+ more bytes .* in host memory.*memory.offload"):
        saved.offload()
    backward_input(output, torch.ones_like(output), ())[1].accumulate()  # all is still here


def with_a_small_disk(rank, folder):
    """A file may not grow above 1 MiB in this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    module = nn.Linear(256, 1024)
    x = torch.randn(2048, 256, requires_grad=True) * 1
    copier = copier_for(CPU, folder)
    saved, _ = activations_of(module, copier, lambda: module(x))
    saved.offload()


def test_a_full_disk_is_said(tmp_path):
    ((succeeded, text),) = outcomes(with_a_small_disk, 1, tmp_path)
    assert not succeeded
    assert "OffloadError: no room for 2097152 more bytes of offloaded activations in a file in" in text
    assert f"Errno {errno.EFBIG}" in text


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(OffloadError, match="activations can't be offloaded to .*missing"):
        copier_for(CPU, tmp_path / "missing")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_gradients_are_equal_to_the_last_bit():
    """NOT RUN ON A GPU YET."""
    device = torch.device("cuda", 0)

    def grads(is_away):
        module = layers().to(device)
        torch.manual_seed(1)
        saved = SavedActivations(copier_for(device), least_bytes=SMALLEST)
        saved.keep([*module.parameters(), *module.buffers()])
        with saved.saving():
            output = module(tokens().to(device))
        if is_away:
            saved.offload()
            saved.drop()
            saved.fetch()
            saved.wait()
        _, weight_grads = backward_input(output, torch.ones_like(output), ())
        weight_grads.accumulate()
        return gradients(module)

    expected, found = grads(False), grads(True)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


# ---------------------------------------------------------------- pools


def steps_of(copier, sizes_of_steps):
    """For each step the bytes that the pool holds afterwards."""
    held = []
    for sizes in sizes_of_steps:
        spaces = [(copier.space(size), size) for size in sizes]
        for space, size in spaces:
            copier.give_back(space, size)
        copier.trim()
        held.append(copier.total_bytes)
    return held


@pytest.mark.parametrize("where", ["host", "file"])
def test_a_pool_holds_what_three_steps_need_at_most_when_shapes_change(where, tmp_path):
    """Forty steps, each with larger tensors; nothing is given up while the sizes stay."""
    copier = copier_for(CPU, "host" if where == "host" else tmp_path)
    steps = [[1000 * (step + 5)] * 6 for step in range(40)]
    held = steps_of(copier, steps)
    for last, (step, total) in enumerate(zip(steps, held, strict=True)):
        recent = [sum(each) for each in steps[max(0, last - 2) : last + 1]]
        assert total <= 1.125 * sum(recent)
        assert where == "file" or total >= sum(step)  # a file is given up as a whole
    steady = steps_of(copier, [steps[-1]] * 5)
    assert steady[-1] == steady[-2] <= 1.125 * sum(steps[-1])
    number = copier.num_spaces
    assert number == 6
    alternating = steps_of(copier, [[50_000], steps[-1]] * 5)
    assert alternating[-1] == alternating[-3]  # two lengths in turns: both are kept
    assert copier.num_spaces == number + 1
    copier.close()


def test_a_space_fits_a_little_less_than_it_was_made_for():
    copier = copier_for(CPU)
    steps_of(copier, [[1_000_000], [990_000], [985_000]])
    assert copier.num_spaces == 1
    assert copier.total_bytes <= 1.125 * 1_000_000


def test_more_memory_than_the_machine_has_left_is_refused(monkeypatch):
    """Linux would hand it out, and end the process when it is written to."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1_000_000)
    copier = copier_for(CPU)
    copier.space(500_000)
    with pytest.raises(OffloadError, match=r"no room for .* in host memory.*1000000 are available"):
        copier.space(2_000_000)


def test_what_is_available_is_what_linux_and_the_container_say(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert host_memory.available_bytes() == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() == 50 * 1024
    (tmp_path / "memory.max").write_text("40000\n")
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 2000\n")
    assert host_memory.available_bytes() == 12_000


def test_a_saved_tensor_that_is_freed_in_the_copiers_thread_does_not_wait_for_it():
    """Python's garbage collection may run there: the thread waited for itself for ever."""
    copier = copier_for(torch.device("cpu"), "host")
    never = _ThreadCopy(Future())
    assert copier._thread.submit(never.wait).result(timeout=30) is None
    copier.close()


class Dual(nn.Linear):
    """Adds the derivative of its output in one direction, by forward mode."""

    def forward(self, x):
        with forward_ad.dual_level():
            output = super().forward(forward_ad.make_dual(x, torch.ones_like(x))).tanh()
            return sum(forward_ad.unpack_dual(output))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at the first dual
def test_what_forward_mode_computes_with_stays():
    """The copy of a dual tensor's storage crashed the process."""
    sides = []
    for offload in (None, ActivationOffload(gib=1.0, to="host", least_bytes=0)):
        torch.manual_seed(0)
        stages = {stage: nn.Sequential(Dual(8, 8), Dual(8, 8)) for stage in range(2)}
        x, y = torch.randn(2, 8, 8)
        with Pipeline(stages, plan("zb_v", 1, 4), nn.functional.mse_loss, offload=offload) as pipeline:
            for _ in range(4):
                pipeline.step(x, target=y)
        sides.append([each.grad for stage in stages.values() for each in stage.parameters()])
    for found, expected in zip(*sides, strict=True):
        assert torch.equal(found, expected)
