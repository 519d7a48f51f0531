"""Hooks on parameters in a pipeline: once per microbatch, on the sum over stages; refused across ranks."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from helpers.leaf_hooks import KINDS, Seen, assert_same, assert_same_calls, total_of
from helpers.processes import run_ranks
from helpers.split import double, float64
from zbpp import HeadAtOnce, Pipeline, plan
from zbpp.models.llama import Llama

M = 3
CASES = [*itertools.product(KINDS, (False, True))]  # kind of hook, main_grad


class Part(nn.Module):
    """One stage: a layer, and a norm, whose gradients B computes."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return torch.tanh(self.layer(self.norm(x)))


def parts_of(num_stages):
    """The first and the last stage are the same module."""
    torch.manual_seed(0)
    with float64():
        parts = [Part() for _ in range(num_stages - 1)]
    return [*parts, parts[0]]


def batch():
    return double(2 * M, 4).requires_grad_(), double(2 * M, 4, seed=1)


def prepared(kind, modules, *, has_main_grad):
    """Hooks on each of the modules."""
    seen = [Seen() for _ in modules]
    for each, module in zip(seen, modules, strict=True):
        each.register(kind, module)
        if has_main_grad:
            for parameter in module.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
    return seen


def in_one_process(kind, num_stages):
    """Per module: the calls of its hooks, the sums of its parameters' gradients."""
    parts = parts_of(num_stages)
    modules = parts[:-1]
    seen = prepared(kind, modules, has_main_grad=False)
    inputs, targets = batch()
    for x, target in zip(inputs.chunk(M), targets.chunk(M), strict=True):
        for part in parts:
            x = part(x)
        (F.mse_loss(x, target) / M).backward(retain_graph=True)
    return [(each.calls, totals(module)) for each, module in zip(seen, modules, strict=True)]


def totals(module):
    return [total_of(parameter) for parameter in module.parameters()]


def in_a_v(rank, num_ranks):
    """Rank 0 has the first and the last stage."""
    found = []
    for kind, has_main_grad in CASES:
        timetable = plan("zb_v", num_ranks, M)
        parts = parts_of(timetable.num_stages)
        stages = {index: parts[index] for index, owner in enumerate(timetable.rank_of) if owner == rank}
        modules = list(dict.fromkeys(stages.values()))
        seen = prepared(kind, modules, has_main_grad=has_main_grad)
        pipeline = Pipeline(stages, timetable, F.mse_loss)
        x, target = batch()
        pipeline.step(*([x] if rank == 0 else []), target=target if rank == 0 else None)
        found.append([(each.calls, totals(module)) for each, module in zip(seen, modules, strict=True)])
        pipeline.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_see_one_gradient_per_microbatch_of_all_stages_of_a_rank(num_ranks):
    """They saw the part of each stage: a clamp let larger entries through, an optimizer stepped twice."""
    ranks = run_ranks(in_a_v, num_ranks, num_ranks) if num_ranks > 1 else [in_a_v(0, 1)]
    for number, (kind, has_main_grad) in enumerate(CASES):
        expected = in_one_process(kind, 2 * num_ranks)
        found = [each for rank in ranks for each in rank[number]]
        for one, other in zip(found, expected, strict=True):
            assert_same_calls(one[0], other[0], kind, has_main_grad=has_main_grad)
            assert_same(one[1], other[1], has_main_grad=has_main_grad)


WORDS = 50


def tied_llama():
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "sequence_length": 4}
    with float64():
        return Llama(vocab_size=WORDS, tie_embeddings=True, **sizes)


def tokens():
    return torch.randint(WORDS, (2 * M, 5), generator=torch.Generator().manual_seed(0))


def seen_by_a_hook(weight):
    """The gradients that a hook sees, which it clamps."""
    seen = []
    weight.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-1e-2, 1e-2))
    return seen


@pytest.mark.parametrize("extras", [(), (HeadAtOnce,)])
@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b", "looped_bfs"])
def test_hooks_of_a_head_that_is_tied_on_one_rank_see_what_plain_autograd_shows(schedule, extras):
    """In B and W, in BW, and where the head's W runs at the end of its B."""
    model = tied_llama()
    whole = model.build_stage(0, 1)
    options = {} if schedule == "zb_v" else {"stages_per_rank": 2}
    pipeline = Pipeline(
        tied_llama(), plan(schedule, 1, M, **options), extras=[each() for each in extras], device="cpu"
    )
    assert len(pipeline.stages) == 2
    pipeline.load_state_dict(whole.state_dict())
    weights = [dict(each.named_parameters())["embedding.weight"] for each in (whole, pipeline)]
    expected, found = map(seen_by_a_hook, weights)
    for _ in range(2):
        pipeline.step(tokens()[:, :-1], target=tokens()[:, 1:])
        for chunk in tokens().chunk(M):
            (model.loss(whole(chunk[:, :-1]), chunk[:, 1:]) / M).backward()
    assert len(found) == len(expected) == 2 * M
    for one, other in zip([*found, weights[1].grad], [*expected, weights[0].grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def tied_across_ranks(rank, kind, hooked_rank):
    timetable = plan("zb_h1", 2, M)
    part = parts_of(2)[0]
    if rank:
        part.tied_parameters = {"layer.weight": (0, "layer.weight")}
    seen = Seen()
    if rank == hooked_rank:
        seen.register(kind, part)
    pipeline = Pipeline({rank: part}, timetable, F.mse_loss if rank else None)
    x, target = batch()
    try:
        pipeline.step(*([] if rank else [x]), target=target if rank else None)
    finally:
        assert seen.calls == [] or kind == "module"
        pipeline.close()


def ties_of_all_kinds(rank):
    """What is said for each kind of hook, on one of the copies."""
    said = []
    for number, kind in enumerate(KINDS):
        try:
            tied_across_ranks(rank, kind, number % 2)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_hooks_of_a_parameter_with_copies_on_several_ranks_are_refused_on_all_of_them():
    """Tensor hooks saw the gradient of one copy, and changed it alone. Hooks of modules are none of these."""
    for said in run_ranks(ties_of_all_kinds, 2):
        for kind, text in zip(KINDS, said, strict=True):
            assert (kind == "module") == (text == ""), kind
            assert kind == "module" or "layer.weight of stage 0 and layer.weight of stage 1 are tied" in text


def test_a_multi_grad_hook_over_several_stages_is_refused():
    parts = parts_of(3)
    for watched in ([parts[0], parts[1]], [parts[1], parts[2]]):
        handle = register_multi_grad_hook([each.layer.weight for each in watched], lambda grads: None)
        pipeline = Pipeline(
            dict(enumerate(parts)), plan("interleaved_zb", 1, M, stages_per_rank=3), F.mse_loss
        )
        with pytest.raises(ValueError, match=r"watches parameters of the stages 0, 1, 2, .* a hook for each"):
            pipeline.step(batch()[0], target=batch()[1])
        handle.remove()
