"""Saved tensors that leave and come back: the same gradients, less memory, changes in place noticed."""

import pytest
import torch
from torch import nn

from zbpp import backward_input
from zbpp.autograd.offload.host_copier import Copier
from zbpp.autograd.offload.saved_activations import SavedActivations
from zbpp.measure.live_tensors import live_bytes
from zbpp.runtime.boundary import graph_input
from zbpp.runtime.buffers import BufferPool
from zbpp.runtime.layout import TensorLayout

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


def trained(*, is_away=True, fetched=True):
    """The gradients of one F, B, W; all that may leave is away in between, or nothing is."""
    module = layers()
    torch.manual_seed(1)
    if not is_away:
        output = module(tokens())
    else:
        copier = Copier(CPU)
        saved, output = activations_of(module, copier, lambda: module(tokens()), least_bytes=SMALLEST)
        assert saved.nbytes > 10 * ROWS * SIZE * 4
        saved.offload()
        saved.drop()
        if fetched:
            saved.fetch()
    _, weight_grads = backward_input(output, torch.ones_like(output), ())
    tasks = [type(each).__name__ for each in weight_grads._tasks]
    weight_grads.accumulate()
    if is_away:
        copier.close()
    return gradients(module), tasks


@pytest.mark.parametrize("fetched", [True, False])
def test_gradients_are_equal_to_the_last_bit_and_the_same_weights_wait(fetched):
    """A tensor that nobody has fetched comes back when autograd unpacks it."""
    expected, tasks = trained(is_away=False)
    found, found_tasks = trained(fetched=fetched)
    assert found_tasks == tasks
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_a_storage_leaves_once_and_its_device_memory_is_free_until_it_is_fetched():
    """torch's profiler counts the allocations; host memory is not torch's here."""
    module = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(512, 256)
    copier = Copier(CPU)
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
    saved, output = activations_of(module, Copier(CPU), lambda: module(received[0]), least_bytes=SMALLEST)
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


@pytest.mark.parametrize("when", ["before", "copied", "away", "back"])
def test_a_change_in_place_is_noticed_as_autograd_notices_it(when):
    """Plain autograd raises in B, whenever it happened; so does what was away."""
    copier = Copier(CPU)
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
