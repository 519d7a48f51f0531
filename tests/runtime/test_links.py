"""Links between real processes: order, layouts, and memory that is used again."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.processes import run_ranks
from zbpp.runtime.buffers import BufferPool
from zbpp.runtime.host_links import HostLink, needs_host_link
from zbpp.runtime.layout import TensorLayout
from zbpp.runtime.links import Inbox, Outbox
from zbpp.schedule import Value

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

# ---------------------------------------------------------------- links

X = Value("x", 1, 0)

CHANNELS = ["x", "x", "g", "x", "g", "g", "x", "x"]


def message(channel, number, rank):
    """What `rank` sends as its message `number`; x has a float and an int64, g a hole."""
    if channel == "x":
        return torch.full((2, 3), 100.0 * rank + number).requires_grad_(), torch.tensor([number] * 4)
    return None, torch.full((5,), 100.0 * rank + number, dtype=torch.float64), None


def exchange(rank, num_passes, depth):
    """Both ranks send and receive all of CHANNELS at once, several times over the same links."""
    peer = 1 - rank
    inbox = Inbox(peer, dist.group.WORLD, BufferPool(CPU))
    outbox = Outbox(peer, dist.group.WORLD, CPU)
    received = []
    for _ in range(num_passes):
        ahead, others = CHANNELS[:depth], iter(CHANNELS[depth:])
        for channel in ahead:
            inbox.post(Value(channel, 1, 0))
        for number, channel in enumerate(CHANNELS):
            outbox.send(Value(channel, 1, number), message(channel, number, rank))
        for _ in CHANNELS:
            for channel in islice(others, 1):
                inbox.post(Value(channel, 1, 0))
            received.append([_seen(tensor) for tensor in inbox.receive()])
        outbox.finish()
    return received


def _seen(tensor):
    return None if tensor is None else (tensor.dtype, tensor.tolist(), tensor.requires_grad)


@pytest.mark.parametrize("depth", [0, 1, 5, 100])
def test_both_directions_deliver_every_channel_in_order_with_layouts_holes_and_flags(depth):
    for rank, received in enumerate(run_ranks(exchange, 2, 3, depth)):
        sent = [[_seen(each) for each in message(*it, 1 - rank)] for it in _numbered(CHANNELS)]
        assert received == sent * 3


def _numbered(channels):
    return [(channel, number) for number, channel in enumerate(channels)]


def any_tensors():
    drawn = torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(0))
    return (
        *(drawn.to(dtype) for dtype in DTYPES),
        drawn.double().t(),  # not contiguous
        torch.tensor(3.5),
        torch.empty(0, 7),
    )


def receive_two(link, read):
    """What two messages of one channel say, whose receives start together."""
    inbox = Inbox(0, link, BufferPool(CPU))
    for _ in range(2):
        inbox.post(X)
    return [read(inbox.receive()) for _ in range(2)]


def carry_any_tensors(rank, through_host):
    link = HostLink(dist.group.WORLD, CPU) if through_host else dist.group.WORLD
    if rank == 0:
        outbox = Outbox(1, link, CPU)
        for _ in range(2):
            outbox.send(X, any_tensors())
        outbox.finish()
        return None
    return receive_two(link, lambda message: message)[1]


@pytest.mark.parametrize("through_host", [False, True])
def test_every_dtype_and_strided_scalar_and_empty_tensors_travel(through_host):
    received = run_ranks(carry_any_tensors, 2, through_host)[1]
    for tensor, expected in zip(received, any_tensors(), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def send_a_changed_layout(rank):
    if rank == 1:
        return receive_two(dist.group.WORLD, lambda message: message[0].tolist())
    outbox = Outbox(1, dist.group.WORLD, CPU)
    outbox.send(X, (torch.tensor([1.0, 2.0]),))
    complaints = []
    changed = [(torch.zeros(3),), (torch.zeros(2).double(),), (None,), (), (torch.zeros(2).requires_grad_(),)]
    for each in changed:
        try:
            outbox.send(X, each)
        except ValueError as error:
            complaints.append(str(error))
    outbox.send(X, (torch.tensor([3.0, 4.0]),))
    outbox.finish()
    return complaints


def test_a_changed_layout_is_refused_at_the_sender_before_anything_is_sent():
    complaints, received = run_ranks(send_a_changed_layout, 2)
    assert len(complaints) == 5
    assert complaints[0].startswith("the stage gave (float32[3]); the messages before promised")
    assert complaints[1].startswith("the stage gave (float64[2])")
    assert received == [[1.0, 2.0], [3.0, 4.0]]


def kinds_of_links(rank):
    return [needs_host_link(dist.group.WORLD, torch.device(each)) for each in ("cpu", "cuda")]


def test_on_gloo_messages_of_a_gpu_go_through_host_memory():
    """They did not: gloo read the device's pointer."""
    assert run_ranks(kinds_of_links, 2) == [[False, True]] * 2


# ---------------------------------------------------------------- memory

LAYOUT = TensorLayout(torch.float32, (3, 3), False)


def test_a_pool_hands_out_the_same_memory_once_nobody_refers_to_it():
    pool = BufferPool(CPU)
    first = pool.take(LAYOUT)
    address = first.data_ptr()
    second = pool.take(LAYOUT)
    assert second.data_ptr() != address
    del first
    assert pool.take(LAYOUT).data_ptr() == address
    assert len(pool) == 2


def test_memory_is_not_reused_while_a_view_of_it_lives():
    pool = BufferPool(CPU)
    view = pool.take(LAYOUT)[1:].t()
    assert pool.take(LAYOUT).data_ptr() not in {view.data_ptr(), view.untyped_storage().data_ptr()}
    del view
    pool.take(LAYOUT)
    assert len(pool) == 2


def test_memory_is_not_reused_while_autograd_has_it_saved():
    pool = BufferPool(CPU)
    linear = nn.Linear(3, 3)
    buffer = pool.take(LAYOUT).fill_(1)
    address = buffer.data_ptr()
    y = linear(buffer)  # saves its input for the weight's gradient
    del buffer
    pool.take(LAYOUT).fill_(7)
    assert len(pool) == 2
    y.sum().backward()
    assert linear.weight.grad.tolist() == [[3.0] * 3] * 3  # three rows of ones
    del y
    assert pool.take(LAYOUT).data_ptr() == address
