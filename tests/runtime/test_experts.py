"""Experts that are spread over processes: losses and gradients are those of one process over all rows."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.tensors import drawn
from helpers.toy_lm import VOCAB, batch, rows_of
from zbpp import (
    OverlapExchange,
    Pipeline,
    Timetable,
    auxiliary_losses,
    backward_input,
    check_replicas,
    clip_grad_norm_,
    make_mesh,
    per_microbatch,
)
from zbpp.autograd.models.exchange import Exchange, through_experts
from zbpp.autograd.models.grouped_linear import grouped_linear
from zbpp.autograd.models.sharded import local_part
from zbpp.features.experts.experts import spread_experts
from zbpp.models.llama import Llama
from zbpp.runtime.processes.dtensors import is_spread
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.training.measured_steps import parameters_in_all, parameters_of_a_token

M, EXPERTS, ROWS = 4, 8, 16
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "zb_h2")
SIZES = {"vocab_size": VOCAB, "num_layers": 4, "hidden_size": 12, "num_heads": 2, "intermediate_size": 10}


class Scaled(nn.Module):
    """Experts of a user's own: a matrix and one number per expert, and a norm that all experts share."""

    def __init__(self):
        super().__init__()
        hidden = SIZES["hidden_size"]
        self.weight, self.scale = nn.Parameter(drawn(EXPERTS, hidden, hidden)), nn.Parameter(drawn(EXPERTS))
        self.norm, self.exchange = nn.LayerNorm(hidden), Exchange()

    def forward(self, x, chosen):
        weight, scale = local_part(self.weight), local_part(self.scale)

        def compute(rows, counts):
            scales = scale.repeat_interleave(counts).unsqueeze(1)
            return self.norm(grouped_linear(rows, weight.mT, counts)) * scales

        return through_experts(x, chosen, EXPERTS, self.exchange, compute)


class Mixture(Llama):
    """A small Llama with experts, in float64. tied: two layers of a stage share a parameter of theirs."""

    def __init__(self, *, scaled=False, tied=False, **options):
        super().__init__(**SIZES, sequence_length=8, experts=EXPERTS, **options)
        self.is_scaled, self.is_tied = scaled, tied

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        layers = [each for name, each in stage.named_children() if name.startswith("layer_")]
        if self.is_scaled:
            for layer in layers:
                layer.mlp.experts = Scaled()
        if self.is_tied:
            for one, other in zip(layers[::2], layers[1::2], strict=True):
                other.mlp.experts.down = one.mlp.experts.down
        return stage.double()


def alone(num_microbatches, steps=2, **model_options):
    """Losses and gradients of plain autograd in one process, microbatch by microbatch, and their norm."""
    model = Mixture(**model_options)
    whole = model.build_stage(0, 1)
    losses = []
    for step in range(steps):
        for inputs, target in zip(*(each.chunk(num_microbatches) for each in batch(step, ROWS)), strict=True):
            with auxiliary_losses() as found:
                loss = model.loss(whole(inputs), target)
            (loss + sum(found.values())).div(num_microbatches).backward()
            losses.append(loss.item())
    grads = {name: each.grad for name, each in whole.named_parameters()}
    return losses, grads, torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def in_mesh(rank, degrees, schedules, *, model_options=(), overlap=False, **options):
    """Per schedule what `alone` returns, as this process has it; and facts."""
    found = {}
    for schedule in schedules:
        model, mesh = Mixture(**dict(model_options)), make_mesh(**degrees)
        options["extras"] = [OverlapExchange()] if overlap else []
        with Pipeline(model, schedule, num_microbatches=M, mesh=mesh, **options) as pipeline:
            losses = []
            for step in range(2):
                inputs, target = rows_of(pipeline.place, *batch(step, ROWS))
                losses += [each.item() for each in pipeline.step(inputs, target=target)]
            norm = clip_grad_norm_(pipeline, 1e9).item()
            check_replicas(pipeline)
            assert parameters_in_all(pipeline) == sum(
                each.numel() for each in model.build_stage(0, 1).parameters()
            )
            assert parameters_of_a_token(pipeline) is None
            grads = {name: whole_of(each.grad) for name, each in pipeline.named_parameters()}
            bytes_here = {
                name: each.to_local().nbytes for name, each in pipeline.named_parameters() if is_spread(each)
            }
        found[schedule] = losses, grads, norm, pipeline.place.data_part, bytes_here
    return found


def check_against_one_process(everyone, num_parts, *, split=2, **model_options):
    """Losses in the order of the rows: parts stand side by side in the batch of each step.

    split: over how many processes each expert's weights are divided.
    """
    expected, expected_grads, expected_norm = alone(M * num_parts, **model_options)
    sizes = {name: each.nbytes for name, each in expected_grads.items()}
    for schedule in everyone[0]:
        losses, seen = {}, set()
        for found in everyone:
            some, grads, norm, part, bytes_here = found[schedule]
            assert norm == pytest.approx(expected_norm, rel=1e-12)
            losses.setdefault(part, []).extend(some)
            for name, grad in grads.items():
                seen.add(name)
                scale = expected_grads[name].abs().max().item()
                torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=1e-12 * scale)
            assert bytes_here
            for name, count in bytes_here.items():
                assert "experts" in name
                assert count * split == sizes[name]
        assert seen == expected_grads.keys()
        in_order = [x for step in (0, 1) for part in range(num_parts) for x in losses[part][step * M :][:M]]
        assert in_order == pytest.approx(expected, rel=1e-12)


def check_equal_bits(everyone):
    for found in everyone:
        for one, other in pairwise(found):
            if len(found[one][1]) == len(found[other][1]):  # not zb_v, whose ranks have other stages
                assert found[one][0] == found[other][0]
                for name, grad in found[one][1].items():
                    assert torch.equal(grad, found[other][1][name]), name


def test_two_processes_share_the_experts():
    everyone = run_ranks(in_mesh, 4, {"replicate": 2, "expert": 2}, SCHEDULES)
    check_against_one_process(everyone, 2)
    check_equal_bits(everyone)


def test_shards_share_the_experts():
    everyone = run_ranks(in_mesh, 4, {"shard": 2, "expert": 2}, ("zb_v", "zb_h1", "zb_h2"))
    check_against_one_process(everyone, 2)
    check_equal_bits(everyone)


def of_a_users_own(rank):
    """In replicas and in shards."""
    return [
        in_mesh(rank, {others: 2, "expert": 2}, ("zb_h1",), model_options={"scaled": True})
        for others in ("replicate", "shard")
    ]


def test_experts_of_a_users_own_are_shared():
    for everyone in zip(*run_ranks(of_a_users_own, 4), strict=True):
        check_against_one_process(everyone, 2, scaled=True)


def test_layers_that_share_a_parameter_of_their_experts_share_its_part():
    function, schedules = partial(in_mesh, model_options={"tied": True}), ("zb_h1",)
    everyone = run_ranks(function, 4, {"replicate": 2, "expert": 2}, schedules)
    check_against_one_process(everyone, 2, tied=True)
    with pytest.raises(Exception, match="two layers share a parameter of their experts"):
        run_ranks(function, 4, {"shard": 2, "expert": 2}, schedules)


def test_shards_that_free_their_weights_after_each_microbatch_share_the_experts():
    balanced = {"balance_loss": 0.0}  # this reshard refuses auxiliary losses
    degrees = {"shard": 2, "expert": 2}
    function = partial(in_mesh, model_options=balanced, reshard="microbatch")
    everyone = run_ranks(function, 4, degrees, ("1f1b", "zb_h1"))
    check_against_one_process(everyone, 2, **balanced)
    check_equal_bits(everyone)


def test_shards_that_compute_in_16_bits_compute_experts_so():
    """Each token goes to all experts: else rounding would send some to others."""
    every = {"experts_per_token": EXPERTS}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    function = partial(in_mesh, model_options=every, mp_policy=policy)
    everyone = run_ranks(function, 4, {"shard": 2, "expert": 2}, ("zb_h1",))
    _, expected, norm = alone(2 * M, **every)
    for found in everyone:
        _, grads, mine, *_ = found["zb_h1"]
        assert norm != mine == pytest.approx(norm, rel=0.01)
        for name, grad in grads.items():
            assert grad.dtype == torch.float64
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=0.05 * scale, msg=name)


def without_and_with_overlap(rank):
    """For replicas and shards: what `in_mesh` has found."""
    return [
        {
            name: in_mesh(rank, {others: 2, "expert": 2}, ("zb_h2",), overlap=overlap)["zb_h2"]
            for name, overlap in {"without": False, "overlapped": True}.items()
        }
        for others in ("replicate", "shard")
    ]


def test_weight_gradients_in_the_exchanges_change_no_bit():
    for found in run_ranks(without_and_with_overlap, 4):
        check_equal_bits(found)


OF_FOUR = [  # degrees, over how many processes each expert's weights are divided
    ({"replicate": 4, "expert": 2}, 2),
    ({"shard": 4, "expert": 2}, 4),  # FSDP2 splits what copies of the same experts have
    ({"replicate": 2, "shard": 2, "expert": 2}, 4),
    ({"replicate": 2, "shard": 2, "expert": 4}, 4),
]


def in_meshes_of_four(rank):
    return [in_mesh(rank, degrees, ("zb_h1",)) for degrees, _ in OF_FOUR]


def test_four_processes_share_the_experts_or_have_copies_of_them():
    """In a pipeline of one rank."""
    for everyone, (_, split) in zip(zip(*run_ranks(in_meshes_of_four, 4), strict=True), OF_FOUR, strict=True):
        check_against_one_process(everyone, 4, split=split)


@pytest.mark.nightly
@pytest.mark.parametrize("degrees, split", OF_FOUR)
def test_four_processes_that_share_experts_have_the_same_bits_under_two_schedules(degrees, split):
    everyone = run_ranks(in_mesh, 8, degrees, ("1f1b", "zb_h1"))
    check_against_one_process(everyone, 4, split=split)
    check_equal_bits(everyone)


def test_through_experts_is_each_token_through_each_of_its_experts():
    """An expert gets no tokens."""
    weight = nn.Parameter(drawn(4, 5, 6, seed=1))
    x = drawn(7, 6, seed=2).requires_grad_()
    chosen = torch.stack(
        [torch.randperm(3, generator=torch.Generator().manual_seed(n))[:2] for n in range(7)]
    )

    def compute(rows, counts):
        return grouped_linear(rows, weight.mT, counts)

    y = through_experts(x, chosen, 4, Exchange(), compute)
    naive = torch.stack([torch.stack([weight[e] @ x[t] for e in chosen[t]]) for t in range(7)])
    torch.testing.assert_close(y, naive, rtol=1e-12, atol=0)
    dy = drawn(7, 2, 5, seed=3)
    expected = torch.autograd.grad(naive, [x, weight], dy)
    torch.testing.assert_close(torch.autograd.grad(y, [x, weight], dy, retain_graph=True), expected)
    (dx,), weight_grads = backward_input([y], [dy], [x])
    assert weight.grad is None  # it waits
    weight_grads.accumulate()
    torch.testing.assert_close((dx, weight.grad), expected)


class Stack(nn.Module):
    """One matrix per expert; all tokens of a process go to the experts it is told."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.weight = nn.Parameter(drawn(num_experts, 3, 3))
        self.exchange = Exchange()

    def forward(self, x, chosen):
        def compute(rows, counts):
            return grouped_linear(rows, local_part(self.weight).mT, counts)

        return through_experts(x, chosen, 4, self.exchange, compute)


CHOICES = ([[0], [1], [0]], [[1]])  # of two processes: nothing reaches the experts 2 and 3


def one_sided(rank):
    stage = Stack()
    spread_experts([stage], MeshPosition(make_mesh(replicate=2, expert=2)))
    chosen = torch.tensor(CHOICES[rank])
    x = drawn(len(chosen), 3, seed=rank).requires_grad_()
    y = stage(x, chosen)
    (dx,), weight_grads = backward_input([y], [torch.ones_like(y)], [x])
    weight_grads.accumulate()
    return y.detach(), dx, stage.weight.grad.full_tensor()


def test_a_process_whose_experts_get_no_tokens():
    """The processes send different numbers of rows, too."""
    whole, gradients = Stack(), []
    everyone = run_ranks(one_sided, 2)
    for rank, (y, dx, gradient) in enumerate(everyone):
        chosen = torch.tensor(CHOICES[rank])
        x = drawn(len(chosen), 3, seed=rank).requires_grad_()
        expected = whole(x, chosen)
        torch.testing.assert_close(y, expected)
        expected.sum().backward()
        torch.testing.assert_close(dx, x.grad)
        gradients.append(gradient)
    for gradient in gradients:
        torch.testing.assert_close(gradient, whole.weight.grad)


def refused(rank):
    found = []
    for degrees, stage in (
        ({"replicate": 2, "expert": 4}, Stack()),
        ({"replicate": 2, "expert": 0}, Stack()),
        ({"shard": 2, "expert": 4}, Stack()),
        ({"tensor": 2, "replicate": 2, "expert": 2}, Stack()),
        ({"replicate": 4, "expert": 4}, nn.Linear(3, 3)),
        ({"replicate": 4, "expert": 4}, Stack(6)),
    ):
        try:
            spread_experts([stage], MeshPosition(make_mesh(**degrees)))
        except ValueError as error:
            found.append(str(error))
    stage = Stack()
    spread_experts([stage], MeshPosition(make_mesh(replicate=4, expert=4)))
    with pytest.raises(ValueError) as error:
        Pipeline({0: stage}, "zb_h1", num_microbatches=2, mesh=make_mesh(replicate=4))
    return [*found, str(error.value)]


def test_what_can_not_be_spread_is_refused():
    expected = (
        "replicate=4",
        "expert=0",
        "shard=2",
        "write tensor=1",
        "no stage has experts",
        "divides 6",
        "mesh=zbpp.make_mesh",
    )
    for found in run_ranks(refused, 4):
        assert len(found) == len(expected)
        for message, text in zip(found, expected, strict=True):
            assert text in message
            assert "\n" not in message


PLACES = [0, 3]  # of the empty microbatch, by process
UNEVEN = "0F0 0F1 0BW0 0F2 0F3 0BW1 0BW2 0BW3"  # without 0 two F's more come before a BW, without 3 none


def leaves_one_out(rank):
    """Losses and gradients of a process that leaves another microbatch out than the other process."""
    own = [batch(3 * rank + number, 2) for number in range(3)]
    own.insert(PLACES[rank], (None, None))
    mesh = make_mesh(replicate=2, expert=2)
    with Pipeline(Mixture(), Timetable.parse(UNEVEN), mesh=mesh, timeout=30) as pipeline:
        x, target = (per_microbatch([each[part] for each in own]) for part in range(2))
        losses = [each.item() for each in pipeline.step(x, target=target)]
        return losses, {name: whole_of(each.grad) for name, each in pipeline.named_parameters()}


def test_processes_that_share_experts_may_leave_different_microbatches_out():
    """All exchange in each F and B: they run the same actions if they leave out as many."""
    whole, model, losses = Mixture().build_stage(0, 1), Mixture(), []
    for number in range(6):
        x, target = batch(number, 2)
        with auxiliary_losses() as found:
            loss = model.loss(whole(x), target)
        losses.append(loss.item() * 8 / 6)  # a step's loss is the mean over all targets
        (loss / 6 + sum(found.values()) / 8).backward()
    for rank, (own, grads) in enumerate(run_ranks(leaves_one_out, 2)):
        expected = losses[3 * rank : 3 * rank + 3]
        expected.insert(PLACES[rank], 0.0)
        assert own == pytest.approx(expected, rel=1e-12)
        assert_close(grads, {name: each.grad for name, each in whole.named_parameters()})
