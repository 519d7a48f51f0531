"""linear_cross_entropy beside torch's linear and cross_entropy, in values, gradients and memory."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.compiler import needs_inductor
from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import backward_input, checkpoint, linear_cross_entropy, make_mesh
from zbpp.autograd.models import linear_cross_entropy as head
from zbpp.autograd.models import loss_kernels as kernels
from zbpp.autograd.models.linear_cross_entropy import logits_cross_entropy
from zbpp.autograd.weight_grads import ChangedInPlace
from zbpp.measure.live_tensors import LiveTensors

TOKENS, HIDDEN, WORDS = 64, 16, 101
FORMS = pytest.mark.parametrize("keep_logits", [True, False], ids=["keep logits", "logits again"])


def torch_losses(x, weight, target, label_smoothing=0.0, z_loss=0.0):
    """In float32 at least, as token_loss has computed them."""
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * logits.logsumexp(-1).square() * (target != -100)


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, HIDDEN, generator=generator, dtype=torch.float64) for size in (TOKENS, WORDS)
    )
    target = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    target[::7] = -100
    return (x / 2).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def by_split(losses, x, weight, *, num_targets=64):
    (dx,), weight_grads = backward_input(losses.sum() / num_targets, None, x)
    assert weight.grad is None
    weight_grads.accumulate()
    return losses.detach(), dx, weight.grad


def by_torch(x, weight, target, dtype=None, **options):
    dtype = dtype or x.dtype
    x, weight = (each.detach().to(dtype).requires_grad_() for each in (x, weight))
    losses = torch_losses(x, weight, target, **options)
    (losses.sum() / 64).backward()
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}], ids=str)
@pytest.mark.parametrize("is_split", [True, False], ids=["B and W", "one backward"])
@FORMS
def test_losses_and_gradients_are_torchs(keep_logits, is_split, options, monkeypatch):
    monkeypatch.setattr("zbpp.autograd.models.linear_cross_entropy._CPU_CACHE", 10 * 8 * WORDS)  # 7 chunks
    x, weight, target = drawn()
    losses = linear_cross_entropy(x, weight, target, keep_logits=keep_logits, **options)
    if is_split:
        found = by_split(losses, x, weight)
    else:
        (losses.sum() / 64).backward()
        found = losses.detach(), x.grad, weight.grad
    for mine, expected in zip(found, by_torch(x, weight, target, **options), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FORMS
def test_rounding_errors_are_torchs(keep_logits, dtype):
    """With 64 targets, dy is a power of two, and dx is rounded once in either form."""
    x, weight, target = drawn(dtype)
    found = by_split(linear_cross_entropy(x, weight, target, keep_logits=keep_logits), x, weight)
    plain, exact = by_torch(x, weight, target), by_torch(x, weight, target, torch.float64)
    for mine, other, right in zip(found, plain, exact, strict=True):
        assert (mine - right).norm() <= 1.05 * (other - right).norm()


@pytest.mark.parametrize("is_split", [True, False], ids=["B and W", "one backward"])
def test_chunks_of_tokens_round_the_weights_gradient_once(is_split):
    """32k words, 64 chunks: the error in bf16 is that of plain. A sum in bf16 had 1.6 times as much."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=generator).bfloat16() for size in (256, 2**15))
    target = torch.randint(0, 8, (256,), generator=generator)
    found = x.requires_grad_(), weight.requires_grad_(), target
    losses = linear_cross_entropy(*found, keep_logits=False, chunk_mib=0.5)
    if is_split:
        *_, mine = by_split(losses, x, weight)
    else:
        (losses.sum() / 64).backward()
        mine = weight.grad
    *_, plain = by_torch(*found)
    *_, exact = by_torch(*found, torch.float64)
    assert (mine - exact).norm() <= 1.05 * (plain - exact).norm()


def test_chunks_may_be_half_a_mib_and_have_a_size():
    x, weight, target = drawn()
    found = by_split(linear_cross_entropy(x, weight, target, keep_logits=False, chunk_mib=0.5), x, weight)
    for mine, expected in zip(found, by_torch(x, weight, target), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    for size in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=r"chunk_mib=.*: give MiB above 0"):
            linear_cross_entropy(x, weight, target, chunk_mib=size)


@pytest.mark.parametrize("wrong", [WORDS, -1])
@FORMS
def test_a_target_that_is_no_word_is_named(keep_logits, wrong):
    x, weight, target = drawn()
    target[3] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):  # torch's
        torch_losses(x, weight, target)
    said = f"a target is {wrong}, and the logits are of {WORDS} words: write 0 to {WORDS - 1}, or -100"
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(x, weight, target, keep_logits=keep_logits)


# ---------------------------------------------------------------- one kernel per pass, as on a GPU


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}], ids=str)
@FORMS
def test_the_kernels_functions_round_as_torch_does(keep_logits, options, monkeypatch):
    """On the CPU, one operation after the other; a GPU runs the same functions compiled."""
    for name, value in {"has_kernels": lambda logits: True, "compiled": lambda function: function}.items():
        monkeypatch.setattr(head, name, value)
    x, weight, target = drawn(torch.bfloat16)
    found = by_split(linear_cross_entropy(x, weight, target, keep_logits=keep_logits, **options), x, weight)
    plain = by_torch(x, weight, target, **options)
    exact = by_torch(x, weight, target, torch.float64, **options)
    for mine, other, right in zip(found, plain, exact, strict=True):
        assert (mine - right).norm() <= 1.05 * (other - right).norm()


@needs_inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own
def test_the_functions_compile_and_write_over_the_logits_by_one_kernel():
    """A softmax in the function was a second pass over the logits; Inductor's CPU code for it failed."""
    from torch._inductor import metrics

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 1000, generator=generator).bfloat16()
    labels, scale = torch.randint(1000, (32, 1), generator=generator), torch.full((32, 1), 0.5)
    losses, lse = kernels.compiled(kernels.losses_and_lse)(logits, labels, 0.0)
    torch.testing.assert_close(
        losses[:, 0], F.cross_entropy(logits.float(), labels[:, 0], reduction="none"), rtol=1e-5, atol=1e-5
    )
    rest = labels, -torch.ones(32, 1), scale, lse, 0.0
    expected = torch.empty_like(logits)
    kernels.write_gradient(logits, expected, *rest)
    metrics.reset()
    kernels.compiled(kernels.write_gradient)(logits, logits, *rest)
    assert metrics.generated_kernel_count <= 1  # 0: from Inductor's cache
    torch.testing.assert_close(logits, expected)


def test_a_compiler_that_fails_leaves_the_functions_uncompiled(monkeypatch, caplog):
    def failing(function):
        def run(*args):
            raise RuntimeError("no C compiler")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    kernels.compiled.cache_clear()
    negative = kernels.compiled(torch.neg)
    assert [negative(torch.ones(())).item() for _ in range(2)] == [-1.0, -1.0]
    assert [each.getMessage() for each in caplog.records] == [
        "neg runs uncompiled: torch.compile fails: no C compiler"
    ]
    kernels.compiled.cache_clear()


@pytest.mark.parametrize("number, rows", [(1, 132), (130, 132), (133, 132), (264, 264), (1000, 924)])
def test_a_gpu_gets_rows_for_all_its_multiprocessors(number, rows, monkeypatch):
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 132)
    assert kernels.whole_waves(number, torch.device("cuda")) == rows
    assert kernels.whole_waves(number, torch.device("cpu")) == number


# ---------------------------------------------------------------- composition


class Head(nn.Module):
    """An embedding, a linear layer and a head; loss(x, weight, target) -> losses."""

    def __init__(self, is_tied=False):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, loss=linear_cross_entropy, **options):
        hidden = self.linear(self.embedding(tokens))
        return loss(hidden, self.head.weight, tokens.roll(1, -1), **options).mean()


def freeze(*names):
    def change(model):
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return change


def with_hooks(model):
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    return model


CASES = {
    "plain": lambda model: model,
    "tied": lambda model: Head(is_tied=True),
    "frozen head": freeze("head.weight"),
    "frozen input": freeze("embedding.weight", "linear.weight", "linear.bias"),
    "hooks": with_hooks,
}


def made(name):
    with float64():
        torch.manual_seed(0)
        return CASES[name](Head())


@pytest.mark.parametrize("name", CASES)
@FORMS
def test_it_composes(keep_logits, name):
    model, plain = (made(name) for _ in range(2))
    tokens = torch.randint(0, WORDS, (3, 11), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, keep_logits=keep_logits)
    backward_input(loss, None, ())[1].accumulate()
    plain(tokens, torch_of_any_shape).backward()
    for (_, mine), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if expected.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-10, atol=1e-12)


def torch_of_any_shape(x, weight, target, **options):
    return torch_losses(x.flatten(0, -2), weight, target.flatten(), **options)


@FORMS
def test_it_is_recomputed_and_runs_under_autocast(keep_logits):
    x, weight, target = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = checkpoint(linear_cross_entropy, x, weight, target, keep_logits=keep_logits)
        expected = torch_losses(x, weight, target)
    assert losses.dtype == torch.float32
    found = by_split(losses, x, weight)
    (expected.sum() / 64).backward(inputs=[x])
    torch.testing.assert_close(found[0], expected.detach())
    torch.testing.assert_close(found[1], x.grad, rtol=0.02, atol=1e-4)
    assert weight.grad.dtype == torch.float32


@FORMS
def test_a_main_grad_gets_the_sum_in_float32(keep_logits):
    x, weight, target = drawn(torch.bfloat16)
    weight.main_grad = torch.zeros(WORDS, HIDDEN)
    loss = linear_cross_entropy(x, weight, target, keep_logits=keep_logits).sum() / 64
    backward_input(loss, None, x)[1].accumulate()
    assert weight.grad is None
    *_, expected = by_torch(x, weight, target, torch.float64)
    assert (weight.main_grad - expected).norm() <= 0.01 * expected.norm()


def test_without_kept_logits_w_reads_the_weight():
    x, weight, target = drawn()
    losses = linear_cross_entropy(x, weight, target, keep_logits=False)
    _, weight_grads = backward_input(losses.sum(), None, x)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(ChangedInPlace, match="weight of shape"):
        weight_grads.accumulate()


@FORMS
def test_a_second_derivative_is_refused(keep_logits):
    x, weight, target = drawn()
    losses = linear_cross_entropy(x, weight, target, keep_logits=keep_logits)
    with pytest.raises(RuntimeError, match="create_graph=True goes through linear_cross_entropy"):
        torch.autograd.grad(losses.sum(), x, create_graph=True)


# ---------------------------------------------------------------- words that two processes share


class ShardedHead(nn.Module):
    """A head whose weight and x are DTensors; tied, the embedding has the same shard of the words."""

    def __init__(self, model, mesh, is_tied):
        super().__init__()
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        self.mesh, self.model = mesh, model
        if is_tied:
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(model.embedding, mesh, style, src_data_rank=None)
            weight = model.embedding.weight
        else:
            whole = model.head.weight.detach()
            weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        model.head.weight = weight

    def forward(self, tokens, **options):
        return self.model(tokens, self.losses, **options)

    def losses(self, x, weight, target, **options):
        from torch.distributed.tensor import DTensor, Replicate

        x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return linear_cross_entropy(x, weight, target, **options).to_local()


SHARDED = [
    (keep_logits, is_tied, z_loss)
    for keep_logits in (True, False)
    for is_tied in (False, True)
    for z_loss in (0.0, 0.01)
]


def sharded(rank):
    """For each of SHARDED: how many collectives W makes, the leaves that wait, the error of each gradient."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, found = make_mesh(tensor=2)["tensor"], []
    # 1 MiB holds the logits of 2,570 tokens and 51 words, those of the first rank; the second has 50 words.
    tokens = torch.randint(0, WORDS, (3, 1000), generator=torch.Generator().manual_seed(1))
    for keep_logits, is_tied, z_loss in SHARDED:
        model, plain = (made("tied" if is_tied else "plain") for _ in range(2))
        expected = plain(tokens, torch_of_any_shape, z_loss=z_loss)
        expected.backward()
        head = ShardedHead(model, mesh, is_tied)
        loss = head(tokens, keep_logits=keep_logits, z_loss=z_loss, chunk_mib=1)
        _, weight_grads = backward_input(loss, None, ())
        waits = any(task.leaf is model.head.weight for task in weight_grads._tasks)
        with CommDebugMode() as communication:
            weight_grads.accumulate()
        errors = {"loss": float((loss - expected).abs())}
        for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            gradient = getattr(mine.grad, "full_tensor", lambda mine=mine: mine.grad)()
            errors[name] = float((gradient - other.grad).abs().max())
        found.append((communication.get_total_counts(), waits, errors))
    return found


def test_ranks_share_the_words():
    for found in run_ranks(sharded, 2):
        for case, (num_messages, waits, errors) in zip(SHARDED, found, strict=True):
            assert max(errors.values()) < 1e-12, (case, errors)
            assert (waits, num_messages) == (True, 0), case


# ---------------------------------------------------------------- what it costs


@FORMS
def test_b_watches_no_gradients_for_it(keep_logits, monkeypatch):
    """A Function of a user may change gradients in place, and costs hooks on every site."""
    made = []
    monkeypatch.setattr("zbpp.autograd.split.num_hooks_made", lambda: 0)
    monkeypatch.setattr("zbpp.autograd.split.GradientGuard", lambda *args: made.append(args))
    x, weight, target = drawn()
    by_split(linear_cross_entropy(x, weight, target, keep_logits=keep_logits), x, weight)
    assert made == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FORMS
def test_memory(keep_logits, dtype, monkeypatch):
    """With chunks of 1 MiB. The weight has 1 MiB in float32, and W makes nothing of that size."""
    monkeypatch.setattr("zbpp.autograd.adding._WIDENED", 2**18)
    tokens, hidden, words = 512, 64, 4096
    chunk, token_bytes, logits = 2**20, tokens * hidden * dtype.itemsize, tokens * words * dtype.itemsize
    weight = torch.randn(words, hidden, dtype=dtype).requires_grad_()
    if dtype == torch.bfloat16:
        weight.main_grad = torch.zeros(words, hidden)
    else:
        weight.grad = torch.zeros(words, hidden)
    target = torch.randint(0, words, (tokens,))
    few = 64 * tokens  # some numbers for each token
    with LiveTensors() as live:
        x = torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
        loss = linear_cross_entropy(x, weight, target, keep_logits=keep_logits, chunk_mib=1).mean()
        kept = token_bytes + (logits if keep_logits else token_bytes)
        assert live.now <= kept + few
        (dx,), weight_grads = backward_input(loss, None, x)
        del loss
        assert live.now <= (logits if keep_logits else 0) + 2 * token_bytes + few
        del x, dx
        assert weight_grads.held_bytes <= (logits if keep_logits else 0) + token_bytes + few
        assert live.highest <= (logits if keep_logits else 0) + 3 * token_bytes + 2 * chunk + few
        live.mark()
        weight_grads.accumulate()
    widened = 0 if dtype == torch.float32 else 2 * token_bytes + 2**18
    again = 0 if keep_logits else 2 * chunk
    assert live.highest <= (logits if keep_logits else 0) + token_bytes + again + widened + few


# ---------------------------------------------------------------- logits that others hold, too


def masked(logits, losses):
    logits.register_hook(lambda gradient: gradient * (logits.detach() > 0))
    return losses(logits)


READERS = {
    "a hook": masked,
    "a loss before": lambda logits, losses: logits.logsumexp(-1).square() + losses(logits),
    "a loss behind": lambda logits, losses: losses(logits) + logits.logsumexp(-1).square(),
    "two losses": lambda logits, losses: losses(logits) + 2 * losses(logits),
    "a soft cap": lambda logits, losses: losses(2 * torch.tanh(logits / 2)),
    "expanded": lambda logits, losses: losses(logits[:1].expand_as(logits)),
}


@pytest.mark.parametrize("name", READERS)
def test_b_overwrites_no_logits_that_something_else_reads(name):
    found = []
    for losses in (logits_cross_entropy, partial(F.cross_entropy, reduction="none")):
        x, weight, target = drawn()
        of_target = partial(losses, target=target.clamp(min=0))
        total = READERS[name](F.linear(x, weight), of_target)
        found.append(by_split(total, x, weight))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_logits_that_a_metric_keeps_stay():
    x, weight, target = drawn()
    logits = F.linear(x, weight)
    kept, copy = logits.detach(), logits.detach().clone()
    losses = logits_cross_entropy(logits, target)
    del logits
    by_split(losses, x, weight)
    assert torch.equal(kept, copy)


def test_b_overwrites_logits_that_nobody_else_holds():
    x, weight, target = drawn()
    with LiveTensors() as live:
        losses = logits_cross_entropy(F.linear(x, weight), target, ignore_index=-100).sum()
        before = live.mark()
        backward_input(losses, None, x)
    chunk = TOKENS * WORDS * 8  # of numbers in B; a dz of its own would be as much again
    assert live.highest < before + 1.5 * chunk


REFUSED = {
    "few targets": (lambda x, w, t: linear_cross_entropy(x, w, t[:1]), "shape"),
    "other order": (lambda x, w, t: linear_cross_entropy(x.view(4, -1, HIDDEN), w, t.view(-1, 4)), "shape"),
    "a column": (lambda x, w, t: linear_cross_entropy(x, w, t[:, None]), "shape"),
    "logits": (lambda x, w, t: logits_cross_entropy(F.linear(x, w), t[:1]), "shape"),
    "smoothing": (lambda x, w, t: linear_cross_entropy(x, w, t, label_smoothing=2.0), "label_smoothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, key = REFUSED[name]
    with pytest.raises(ValueError, match=key):
        call(*drawn())
