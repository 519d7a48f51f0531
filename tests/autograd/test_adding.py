"""How W adds: to gradients of 16 bits, to float32 ones beside 16-bit factors, for embeddings and experts.

What only a GPU has is stood in for on the CPU: aten operations that have no kernel there get one, in float64.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from zbpp import backward_input
from zbpp.autograd import adding
from zbpp.autograd.adding import add_grouped_product, add_product, add_rows
from zbpp.autograd.models.grouped_linear import _add_grouped_product, grouped_linear

# ---------------------------------------------------------------- embeddings

WORDS, WIDTH, TOKENS = 50, 16, 2048


def error_of(gradient, expected):
    return (gradient.double() - expected).norm().item()


def errors_of_embedding(kind, dtype, num_microbatches):
    """Against float64: the error of W's gradient, of plain autograd's here, and of plain autograd's on a GPU.

    A GPU sums a microbatch in float32 and rounds once; on a CPU torch's backward rounds each sum.
    """
    torch.manual_seed(0)
    options = {"padding_idx": 3} if kind == "padding" else {}
    split, plain, exact = (
        nn.Embedding(WORDS, WIDTH, **options, dtype=each) for each in (dtype, dtype, torch.float64)
    )
    if kind == "main_grad":
        split.weight.main_grad = torch.zeros(WORDS, WIDTH)
    gpu, before = torch.zeros(WORDS, WIDTH, dtype=dtype), torch.zeros(WORDS, WIDTH).double()
    for _ in range(num_microbatches):
        tokens = torch.randint(WORDS, (2, TOKENS // 2))
        tokens[torch.rand(tokens.shape) < 0.3] = 7  # seen 600 times
        dy = (torch.randn(2, TOKENS // 2, WIDTH) + 0.5).to(dtype)  # gradients share a mean
        _, weight_grads = backward_input(split(tokens), dy, ())
        weight_grads.accumulate()
        plain(tokens).backward(dy)
        exact(tokens).backward(dy.double())
        gpu += (exact.weight.grad - before).to(dtype)  # each microbatch's gradient is rounded once
        before = exact.weight.grad.clone()
    found = split.weight.grad if kind != "main_grad" else split.weight.main_grad
    if kind == "padding":
        assert not found[3].any()
    return [error_of(each, exact.weight.grad) for each in (found, plain.weight.grad, gpu)]


@pytest.mark.parametrize("num_microbatches", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "padding", "main_grad"])
def test_an_embedding_in_16_bits_is_as_exact_as_plain_autograd(kind, dtype, num_microbatches):
    """Rows were added one by one to a gradient of 16 bits, in no fixed order on a GPU."""
    found, plain, gpu = errors_of_embedding(kind, dtype, num_microbatches)
    assert found <= 1.05 * plain
    assert found <= 1.05 * gpu * (1e-2 if kind == "main_grad" else 1)


def test_w_of_an_embedding_takes_no_memory_of_the_vocabularys_size():
    module = nn.Embedding(50_000, WIDTH, dtype=torch.bfloat16)
    module.weight.grad = torch.zeros_like(module.weight)
    tokens = torch.randint(50_000, (300,))
    _, weight_grads = backward_input(module(tokens), torch.randn(300, WIDTH).bfloat16(), ())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        weight_grads.accumulate()
    assert max(each.cpu_memory_usage for each in profiled.events()) <= 8 * 300 * WIDTH


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_tokens", [0, 1, 200])
def test_sums_per_token_as_a_gpu_takes_them(num_tokens, index):
    torch.manual_seed(0)
    tokens, rows = torch.randint(20, (num_tokens,)).to(index), torch.randn(num_tokens, 5).double()
    found, sums = adding._sums_per_token(tokens, rows, torch.float64)
    expected = torch.zeros(20, 5).double().index_add_(0, tokens, rows)
    torch.testing.assert_close(torch.zeros(20, 5).double().index_add_(0, found, sums), expected)
    used = sums.any(1)  # each location of the sum is written once: no order to depend on
    assert len(found[used].unique()) == int(used.sum()) == len(tokens.unique())


def test_rows_in_float32_are_added_in_their_order_as_ever():
    torch.manual_seed(0)
    tokens, rows, target = torch.randint(20, (4, 50)), torch.randn(4, 50, 5), torch.randn(20, 5)
    expected = target.clone().index_add_(0, tokens.flatten(), rows.flatten(0, 1))
    add_rows(target, tokens, rows)
    assert torch.equal(target, expected)


# ---------------------------------------------------------------- float32 sums of 16-bit products


def fused(total, left, right, dtype, *, beta=1, alpha=1, out):
    assert (total.data_ptr(), total.dtype, alpha) == (out.data_ptr(), dtype, 1)
    product = left.double() @ right.double()
    return out.copy_(product if beta == 0 else beta * out + product)


def product_of(left, right, dtype):
    return (left.double() @ right.double()).to(dtype)


KERNELS = {
    "this torch": {"addmm.dtype_out": fused, "baddbmm.dtype_out": fused},
    "an older torch": {"mm.dtype": product_of, "bmm.dtype": product_of},
}


@contextmanager
def kernels(which):
    """Within it the CPU has a GPU's kernels; yields {operation: the dtypes of its factors in each call}."""
    calls = {}
    library = torch.library.Library("aten", "IMPL")

    def counted(name, kernel):
        def run(*args, **options):
            calls.setdefault(name, []).append([each.dtype for each in args if isinstance(each, torch.Tensor)])
            return kernel(*args, **options)

        return run

    for name, kernel in KERNELS[which].items():
        library.impl(name, counted(name, kernel), "CPU")
    adding.has_kernel.cache_clear()
    try:
        yield calls
    finally:
        library._destroy()
        adding.has_kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (5,)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("which", KERNELS)
def test_no_product_of_16_bit_factors_is_one_of_float32_factors_where_there_are_kernels(
    which, is_fresh, shape, dtype, monkeypatch
):
    """Of batches it was: products in float32, without tensor cores."""
    torch.manual_seed(0)
    left, right = torch.randn(*shape, 30, 8).to(dtype), torch.randn(*shape, 8, 4).to(dtype)
    target = torch.full((*shape, 30, 4), torch.nan if is_fresh else 2.0)
    expected = left.double() @ right.double() + (0 if is_fresh else 2)
    monkeypatch.setattr(adding, "_WIDENED", 4 * 4 * (30 if shape else 7))
    with kernels(which) as calls:
        add_product(target, left, right, is_fresh)
    torch.testing.assert_close(target, expected.float())
    ((name, dtypes),) = calls.items()
    assert name == [*KERNELS[which]][len(shape)]
    assert all(each[-2:] == [dtype, dtype] for each in dtypes)
    assert len(dtypes) == (1 if which == "this torch" else 5)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float64)])
def test_sums_that_no_kernel_has_are_taken_of_cast_factors(dtypes):
    left, right = torch.randn(30, 8).to(dtypes[0]), torch.randn(8, 4).to(dtypes[0])
    target = torch.zeros(30, 4, dtype=dtypes[1])
    with kernels("this torch") as calls:
        add_product(target, left, right, False)
    assert not calls
    torch.testing.assert_close(target, left.double() @ right.double())


def test_w_of_a_linear_layer_is_one_call_into_its_main_grad():
    module = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(4, 8)
    x, dy = torch.randn(6, 8).bfloat16(), torch.randn(6, 4).bfloat16()
    with kernels("this torch") as calls:
        _, weight_grads = backward_input(module(x), dy, ())
        weight_grads.accumulate()
    assert [*map(len, calls.values())] == [1]
    torch.testing.assert_close(module.weight.main_grad, dy.float().T @ x.float())


# ---------------------------------------------------------------- experts


def test_experts_without_rows_get_no_gradient_from_a_kernel_that_writes_numbers_there(monkeypatch):
    """On Blackwell it does: pytorch #172439."""
    own, counts = torch._grouped_mm, torch.tensor([5, 0, 3, 0])
    ends = counts.cumsum(0, dtype=torch.int32)
    x, dy = torch.randn(8, 16).bfloat16(), torch.randn(8, 8).bfloat16()
    expected = own(x.t(), dy, offs=ends).float()

    def blackwell(*args, **options):
        gradient = own(*args, **options)
        gradient[counts == 0] = torch.nan
        return gradient

    monkeypatch.setattr(torch, "_grouped_mm", blackwell)
    monkeypatch.setattr(adding, "_may_fill_empty_groups", lambda device: True)
    for is_fresh in (True, False):
        target = torch.zeros(4, 16, 8)
        add_grouped_product(target, x, dy, ends, is_fresh)
        assert torch.equal(target, expected)
        assert not target[counts == 0].any()


def test_w_of_experts_reads_no_number_of_the_device():
    """Meta tensors have no numbers; with a float32 gradient W read the counts."""
    x, dy = (
        torch.empty(8, 16, dtype=torch.bfloat16, device="meta"),
        torch.empty(8, 8, device="meta").bfloat16(),
    )
    counts = torch.empty(4, dtype=torch.int64, device="meta")
    for dtype in (torch.float32, torch.bfloat16):
        _add_grouped_product(torch.empty(4, 16, 8, dtype=dtype, device="meta"), (x, counts), dy, False)


def test_experts_sum_float32_gradients_of_the_right_size():
    torch.manual_seed(0)
    weight = torch.randn(4, 16, 8).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(4, 16, 8)
    x, counts, dy = torch.randn(8, 16).bfloat16(), torch.tensor([5, 0, 3, 0]), torch.randn(8, 8).bfloat16()
    _, weight_grads = backward_input(grouped_linear(x, weight, counts), dy, ())
    weight_grads.accumulate()
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 8))):
        torch.testing.assert_close(weight.main_grad[expert], x[rows].float().T @ dy[rows].float())


# ---------------------------------------------------------------- Functions that add to main_grad themselves


class FusedLinear(torch.autograd.Function):
    """As Transformer Engine's with fuse_wgrad_accumulation, and Megatron's."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(dy.T @ x)
        weight.grad_added_to_main_grad = True
        return dy @ weight, torch.full_like(weight, torch.nan)  # without meaning


def test_a_function_that_adds_to_main_grad_itself_is_refused_by_name():
    """W would add the returned gradient, which has no meaning, to what is complete already."""
    weight = nn.Parameter(torch.randn(4, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 8), False
    with pytest.raises(RuntimeError, match=r"backward of FusedLinear .* write fuse_wgrad_accumulation=False"):
        backward_input(FusedLinear.apply(torch.randn(3, 8), weight), torch.randn(3, 4), ())
