"""The emulated accelerator itself: it computes what the CPU does, and refuses what a GPU refuses."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accelerator import build
from helpers.compiler import missing
from helpers.processes import outcomes, run_ranks
from zbpp.models.gpt import Gpt

DEVICES = ["cuda", "npu"]
on_both = pytest.mark.parametrize("device", DEVICES)


def run(function, device):
    (result,) = run_ranks(function, 1, device, device=device)
    return result


# ---------------------------------------------------------------- numbers


def loss_and_gradients(rank, device):
    torch.manual_seed(0)
    model = Gpt(vocab_size=31, num_layers=2, hidden_size=16, num_heads=2, sequence_length=8)
    stage = nn.Sequential(*(model.build_stage(index, 2) for index in range(2)))
    tokens = torch.randint(31, (4, 9))
    stage, tokens = stage.to(device), tokens.to(device)
    loss = model.loss(stage(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    assert loss.device.type == device
    return loss.item(), [each.grad.cpu() for each in stage.parameters()]


@on_both
def test_a_model_has_the_loss_and_gradients_of_the_cpu(device):
    loss, gradients = run(loss_and_gradients, device)
    expected, expected_gradients = loss_and_gradients(0, "cpu")
    assert loss == pytest.approx(expected, rel=1e-6)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)


def products(rank, device):
    a, b = (torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(2))
    total = torch.ones(4, 4)
    expected = total.addmm(a.float(), b.float())
    on = [each.to(device) for each in (total, a, b)]
    torch.addmm(*on, out_dtype=torch.float32, out=on[0])
    return torch.equal(on[0].cpu(), expected), torch.mm(*on[1:], out_dtype=torch.float32).dtype


@on_both
def test_products_of_bfloat16_are_added_to_float32(device):
    assert run(products, device) == (True, torch.float32)


def draws(rank, device):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = [torch.rand(3, device=f"{device}:{index}").cpu() for index in range(2)]
    dropped = F.dropout(torch.ones(64, device=device)).cpu()
    is_untouched = torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    again = [torch.rand(3, device=f"{device}:{index}").cpu() for index in range(2)]
    torch.manual_seed(1)
    other = F.dropout(torch.ones(64, device=device)).cpu()
    return is_untouched, torch.equal(*drawn), torch.equal(drawn[0], again[0]), torch.equal(dropped, other)


@on_both
def test_each_device_draws_from_its_own_generator(device):
    is_untouched, _, is_repeated, is_same_mask = run(draws, device)
    assert (is_untouched, is_repeated, is_same_mask) == (True, True, False)


# ---------------------------------------------------------------- devices


def mixed(rank, device):
    one = torch.ones(2, device=f"{device}:0")
    texts = []
    for other in ("cpu", f"{device}:1"):
        with pytest.raises(RuntimeError) as caught:
            one + torch.ones(2, device=other)
        texts.append(str(caught.value))
    return texts


@on_both
def test_tensors_of_two_devices_are_refused_in_the_words_of_cuda(device):
    words = "Expected all tensors to be on the same device, but found at least two devices, "
    assert run(mixed, device) == [f"{words}{device}:0 and {other}!" for other in ("cpu", f"{device}:1")]


def current_devices(rank, device):
    torch.accelerator.set_device_index(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.empty(1, device=device).device.index))
    thread.start()
    thread.join()
    return torch.empty(1, device=device).device.index, *found


@on_both
def test_each_thread_has_a_current_device(device):
    assert run(current_devices, device) == (1, 0)


class Where(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Where.thread = threading.get_ident()
        return g


def backward_elsewhere(rank, device):
    Where.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    return Where.thread != threading.get_ident()


@on_both
def test_backward_runs_on_a_thread_of_the_device(device):
    assert run(backward_elsewhere, device)


def memory(rank, device):
    before = [torch.accelerator.memory_allocated(index) for index in range(2)]
    held = torch.empty(1000, device=f"{device}:1")
    after = [torch.accelerator.memory_allocated(index) for index in range(2)]
    is_zero = bool((held == 0).any())
    del held
    end = torch.accelerator.memory_allocated(1)
    return [b - a for a, b in zip(before, after, strict=True)], is_zero, end - before[1]


@on_both
def test_memory_is_counted_by_device_and_begins_with_no_zeros(device):
    assert run(memory, device) == ([0, 4000], False, 0)


def waits_of_indexing(rank, device):
    """How often the host waits for the number of entries that an index selects."""
    from accelerator import reports

    mask, numbers, values = (torch.tensor(each, device=device) for each in ([True, False], [1, 0], [1.0]))
    found = []
    for index in (
        lambda: mask[numbers],
        lambda: numbers[mask],
        lambda: numbers.float().index_put_((mask,), values),
        lambda: numbers.float().index_put_((mask,), torch.tensor(1.0)),
    ):
        reports.waits.clear()
        index()
        found.append(sum(reports.waits.values()))
    return found


def test_the_host_waits_for_the_entries_of_a_mask_that_is_an_index():
    assert run(waits_of_indexing, "cuda") == [0, 1, 1, 0]


# ---------------------------------------------------------------- order


def late_copy(rank, device):
    from accelerator import reports

    reports.waits.clear()
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device=device), non_blocking=True)
    early = host.tolist()
    num_waits = sum(reports.waits.values())
    torch.accelerator.synchronize()
    return early == [1.0] * 4, num_waits, host.tolist() == [1.0] * 4, [*reports.waits]


@on_both
def test_a_copy_to_pinned_memory_has_no_result_before_the_host_has_waited(device):
    is_early, num_waits, is_there, (wait,) = run(late_copy, device)
    assert (is_early, num_waits, is_there) == (False, 0, True)
    assert "device synchronize" in wait
    assert "test_accelerator.py" in wait


def on_two_streams(rank, device, is_ordered):
    x = torch.ones(4, device=device)
    side = torch.Stream(device)
    if is_ordered:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    if is_ordered:
        torch.accelerator.current_stream().wait_stream(side)
    y.add_(1)
    return y.tolist()


@on_both
def test_an_access_that_no_event_orders_fails_the_function(device):
    assert run_ranks(on_two_streams, 1, device, True, device=device) == [[3.0] * 4]
    ((succeeded, text),) = outcomes(on_two_streams, 1, device, False, device=device)
    assert not succeeded
    fault = rf"no event orders aten::add.out on {device}:0 stream \d+ behind aten::fill_.Scalar \(writes\) on"
    assert re.search(fault, text), text


def freed_too_early(rank, device):
    side = torch.Stream(device)
    x = torch.ones(4, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    del x
    torch.empty(4, device=device)
    torch.accelerator.synchronize()
    del y


@on_both
def test_memory_that_another_stream_still_uses_may_not_be_freed(device):
    ((succeeded, text),) = outcomes(freed_too_early, 1, device, device=device)
    assert not succeeded
    assert "may be given out again" in text


# ---------------------------------------------------------------- CUDA graphs


def captured(rank, device):
    x, total = torch.ones(4, device=device), torch.zeros(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        total += y
    after_capture = total.tolist()
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
    return after_capture, y.tolist(), total.tolist()


def test_a_replay_computes_on_the_memory_of_the_capture_and_a_capture_has_no_effect():
    assert run(captured, "cuda") == ([0.0] * 4, [4.0] * 4, [6.0] * 4)


def capture_of_a_wait(rank, device):
    x = torch.ones(4, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def test_a_capture_refuses_what_waits_for_the_device():
    ((succeeded, text),) = outcomes(capture_of_a_wait, 1, "cuda", device="cuda")
    assert not succeeded
    assert "operation not permitted when stream is capturing" in text


# ---------------------------------------------------------------- the build

COMPILER = """#!/bin/sh
echo compiled >> "{log}"
sleep 0.5
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def test_who_starts_at_once_builds_one_library(tmp_path, monkeypatch):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(build.library.__wrapped__) for _ in range(2))
    assert first.result() == second.result()
    assert log.read_text() == "compiled\n"


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    assert missing(build.ACCELERATOR) == (
        "the emulated accelerator needs a C++ compiler, and there is no no-compiler: apt install g++"
    )
