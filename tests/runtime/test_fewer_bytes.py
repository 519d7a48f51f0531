"""Messages in fewer bytes: what the rounding may change, and that ranks and timetables change nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from helpers.processes import run_ranks
from zbpp import FewerBytes, Pipeline, Timetable, lower, plan
from zbpp.features.activation_offload.copies import Await, Placed, with_copies
from zbpp.features.fewer_bytes.codes import coded, coded_gradient, decoded
from zbpp.features.fewer_bytes.fewer_bytes import with_codes
from zbpp.models.gpt import Gpt
from zbpp.schedule.dataflow import Value

FORMS = ["bfloat16", "8bit"]
M, WORDS, HIDDEN = 4, 31, 16
SCHEDULES = {1: ["interleaved_1f1b"], 2: ["zb_v", "interleaved_zb"], 4: ["1f1b", "zb_h1"]}
"""By the number of ranks: those that cut a model into four stages."""


# ---- Codes


def numbers(dtype=torch.float32):
    """Rows of very different sizes, one of zeros."""
    rows = (
        torch.randn(6, 3, 50, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-4, 2)[:, None, None]
    )
    rows[2, 1] = 0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_8_bits_are_rounded_to_the_nearest_of_a_rows_levels(dtype):
    x = numbers(dtype).requires_grad_()
    codes, scale = coded((x,), "8bit")
    (found,) = decoded((codes, scale))
    step = x.detach().double().abs().amax(-1, keepdim=True) / 126
    assert (codes.dtype, scale.shape) == (torch.int8, (6, 3, 1))
    assert (found.dtype, found.requires_grad) == (dtype, True)
    rounding = x.abs() * torch.finfo(dtype).eps  # of the result
    assert ((found.double() - x.double()).abs() <= 0.5 * step * 1.01 + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_a_gradient_over_seeds_is_the_gradient(dtype):
    """Up to five standard deviations: one rounding by chance has at most half a level."""
    g, num = numbers(dtype), 2000
    _, scale = coded_gradient((g,), "8bit", 0)
    found = torch.stack([coded_gradient((g,), "8bit", seed)[0].double() for seed in range(num)])
    exact = g.double() / scale.double()
    assert ((found - exact).abs() < 1).all()
    assert ((found.mean(0) - exact).abs() <= 5 * 0.5 / num**0.5).all()
    assert (found.mean(0) - exact).mean().abs() <= 5 * 0.5 / (num * g.numel()) ** 0.5


def test_bfloat16_is_the_cast():
    g = numbers()
    for entries in (coded((g.clone().requires_grad_(),), "bfloat16"), coded_gradient((g,), "bfloat16", 0)):
        (found,) = decoded(entries)
        assert entries[0] is None
        assert torch.equal(entries[1], g.bfloat16())
        assert torch.equal(found, g.bfloat16().float())
        assert found.requires_grad == entries[1].requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_what_needs_exact_numbers_stays(form):
    """Whole numbers, a mask without a gradient, a number without a row, an output that is left out."""
    stays = torch.arange(5), torch.full((2, 5), -torch.inf), torch.tensor(0.3).requires_grad_(), None
    message = *stays, numbers().requires_grad_()
    found = decoded(coded(message, form))
    assert all(a is b for a, b in zip(found[:4], stays, strict=True))
    assert found[4].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_numbers_too_small_for_levels_keep_their_signs(dtype):
    x = torch.tensor([[2e-43, -1e-43, 0.0], [3e-37, -3e-37, 1e-38]]).to(dtype).requires_grad_()
    for found in (decoded(coded((x,), "8bit")), decoded(coded_gradient((x.detach(),), "8bit", 0))):
        assert (found[0].detach().double().sign() * x.detach().double().sign() >= 0).all()


def test_a_row_that_is_not_finite_stays_so():
    g = torch.ones(3, 4)
    g[0, 1], g[1, 2] = torch.inf, torch.nan
    (found,) = decoded(coded_gradient((g,), "8bit", 0))
    assert found.isfinite().tolist() == [[False] * 4, [False] * 4, [True] * 4]


# ---- Programs


def test_the_text_of_a_program_has_the_codes():
    """A V on two ranks: the message between stages 1 and 2 stays on rank 1, and is in codes, too."""
    timetable = Timetable.parse("0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0")
    assert str(with_codes(lower(timetable)[1], 4, {0, 1})).split("\n") == [
        "Recv x(1,0) from 0", "Decode x(1,0)", "1F0", "Encode x(2,0)", "Decode x(2,0)", "2F0",
        "Send x(3,0) to 0", "Recv g(2,0) from 0", "2BW0", "Encode g(1,0)", "Reduce 2", "Decode g(1,0)",
        "1BW0", "Encode g(0,0)", "Send g(0,0) to 0", "Reduce 1",
    ]  # fmt: skip


def test_a_copy_that_is_placed_later_leaves_a_decode_behind_its_receive():
    program = with_codes(lower(plan("1f1b", 2, 1))[1], 2, {0})
    text = str(with_copies(program, (Placed(0, True, Await(Value("saved", 1, 0))),)))
    assert text.startswith("Await saved(1,0)\nRecv x(1,0) from 0\nDecode x(1,0)\n1F0")


# ---- Whole steps


class Stage(nn.Module):
    """Two tensors in codes, of different widths, and two that are exact: tokens, and a float without grad."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.index, self.embedding = index, nn.Embedding(WORDS, HIDDEN)
        self.narrow, self.linear = nn.Linear(HIDDEN, 5), nn.Linear(HIDDEN + 5, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, *given):
        if self.index == 0:
            (tokens,) = given
            h, narrow, third = self.embedding(tokens), torch.ones(*tokens.shape, 5), tokens / 3
        else:
            h, narrow, tokens, third = given
            assert torch.equal(third, tokens / 3), "an exact message was rounded"
        h = h + torch.tanh(self.linear(torch.cat([h, narrow], -1))) + self.embedding(tokens)
        return self.head(h) if self.index == 3 else (h, self.narrow(h), tokens, third)


class Model:
    def build_stage(self, index, num_stages):
        return Stage(index)

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


def step_of(number):
    """Microbatches of different lengths, one of them empty, in every step another one."""
    generator = torch.Generator().manual_seed(number)
    lengths = [9, 4, 7, 5]
    lengths[number % M] = 0
    rows = [torch.randint(WORDS, (2, each + 1), generator=generator) if each else None for each in lengths]
    inputs = [None if each is None else each[:, :-1] for each in rows]
    return inputs, [None if each is None else each[:, 1:] for each in rows]


def of_lengths(schedule, num_ranks, *extras):
    pipeline = Pipeline(Model(), planned(schedule, num_ranks), extras=extras)
    steps = ([zbpp.per_microbatch(each) for each in step_of(number)] for number in range(3))
    return trained(pipeline, steps)


def of_slices(schedule, num_ranks, *extras):
    torch.manual_seed(0)
    model = Gpt(vocab_size=WORDS, num_layers=4, hidden_size=16, num_heads=2, sequence_length=12)
    timetable = planned(schedule, num_ranks, num_slices=3)
    pipeline = Pipeline(model, timetable, slice_bounds=(0, 5, 9, 12), extras=extras)
    tokens = [torch.randint(WORDS, (M, 13), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return trained(pipeline, ((each[:, :-1], each[:, 1:]) for each in tokens))


def planned(schedule, num_ranks, **options):
    stages = {} if num_ranks == 4 or schedule == "zb_v" else {"stages_per_rank": 4 // num_ranks}
    return plan(schedule, num_ranks, M, **stages, **options)


def trained(pipeline, steps):
    """(losses of steps and of an evaluation, weights at the end)."""
    parameters = {f"{s}.{n}": p for s, m in pipeline.stages.items() for n, p in m.named_parameters()}
    optimizer, losses = torch.optim.SGD(parameters.values(), lr=0.1), []
    assert pipeline.timetable.num_stages == 4
    for inputs, target in steps:
        optimizer.zero_grad()
        x = (inputs,) if 0 in pipeline.stages else ()
        losses += [each.item() for each in pipeline.step(*x, target=target if 3 in pipeline.stages else None)]
        optimizer.step()
    losses += [each.item() for each in pipeline.evaluate(*x, target=target)]
    pipeline.close()
    return losses, {name: each.detach() for name, each in parameters.items()}


CASES = [(run, form) for run in (of_lengths, of_slices) for form in FORMS]


def ranks_job(rank, num_ranks):
    return {
        (place, schedule): run(schedule, num_ranks, FewerBytes(form))
        for place, (run, form) in enumerate(CASES)
        for schedule in SCHEDULES[num_ranks]
        if not (run is of_slices and schedule == "interleaved_zb")
    }


def test_ranks_and_timetables_change_no_bit():
    expected = [run("interleaved_1f1b", 1, FewerBytes(form)) for run, form in CASES]
    for num_ranks in (2, 4):
        parts = run_ranks(ranks_job, num_ranks, num_ranks)
        for key in parts[0]:
            losses, weights = expected[key[0]]
            assert [each for part in parts for each in part[key][0]] == losses
            found = {name: each for part in parts for name, each in part[key][1].items()}
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weights[name]) for name in weights)


def linear(form, num_steps):
    """The gradients of x in some steps without change, the gradient between the two stages, and a weight."""
    torch.manual_seed(0)
    first, last = nn.Linear(7, 20, bias=False), nn.Linear(20, 9, bias=False)
    x, factors = torch.randn(6, 7).requires_grad_(), torch.randn(6, 9)
    pipeline = Pipeline(
        {0: first, 1: last},
        plan("interleaved_1f1b", 1, 1),
        loss_fn=lambda output, target: (output * target).sum(),
        extras=[FewerBytes(form)],
    )
    found = []
    for _ in range(num_steps):
        x.grad = None
        pipeline.step(x, target=factors)
        found.append(x.grad)
    return torch.stack(found), factors @ last.weight.detach(), first.weight.detach()


def test_the_gradient_of_x_is_that_of_rounded_messages():
    """bfloat16: that of the cast. 8 bits: within a level in each step, and the mean over steps is exact."""
    found, g, weight = linear("bfloat16", 1)
    torch.testing.assert_close(found[0], g.bfloat16().float() @ weight)
    found, g, weight = linear("8bit", 1000)
    level = g.abs().amax(-1, keepdim=True) / 126
    bound = level * weight.abs().sum(0)
    error = found - g @ weight
    assert (error.abs() <= bound).all()
    assert error.abs().max() > 0.01 * bound.min()
    spread = 0.5 * level * weight.square().sum(0).sqrt()
    assert (error.mean(0).abs() <= 5 * spread / 1000**0.5).all()


def test_an_evaluation_and_other_boundaries_are_exact():
    exact = of_lengths("interleaved_1f1b", 1)
    nowhere, one, everywhere = (
        of_lengths("interleaved_1f1b", 1, FewerBytes("8bit", boundaries)) for boundaries in ([], [1], None)
    )
    assert nowhere[0] == exact[0]
    assert len({tuple(each[0]) for each in (exact, one, everywhere)}) == 3
    pipeline, plain = (
        Pipeline(Model(), planned("interleaved_1f1b", 1), extras=extras)
        for extras in ([FewerBytes("8bit")], [])
    )
    inputs, target = (zbpp.per_microbatch(each) for each in step_of(0))
    assert pipeline.evaluate(inputs, target=target) == plain.evaluate(inputs, target=target)


def test_refusals():
    with pytest.raises(ValueError, match="write one of 'bfloat16', '8bit'"):
        FewerBytes("4bit")
    with pytest.raises(ValueError, match="write numbers from 0 to 2, or None"):
        Pipeline(Model(), planned("interleaved_1f1b", 1), extras=[FewerBytes("8bit", [3])])
