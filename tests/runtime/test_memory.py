"""Measured bytes of live tensors are those that the shapes say."""

import pytest
import torch
from torch import nn

from zbpp.models.layers import token_loss
from zbpp.models.llama import Llama
from zbpp.runtime.measure.live_tensors import Level, live_bytes
from zbpp.runtime.measure.microbatch_memory import StageMemory, first_inputs, memory_per_stage, stage_memory

CPU = torch.device("cpu")
ROWS, HIDDEN = 4, 8
BYTES = ROWS * HIDDEN * 4  # of a float32 activation


def received():
    return torch.zeros(ROWS, HIDDEN, requires_grad=True)


def memory_of(module, x=None, index=1, **options):
    return stage_memory(index, module, (received() if x is None else x,), CPU, **options)


# ---------------------------------------------------------------- live bytes


def test_a_dropped_tensor_counts_at_the_peak_and_a_kept_one_also_afterwards():
    kept = []

    def run():
        dropped = torch.empty(1000, dtype=torch.uint8)
        kept.append(torch.empty(600, dtype=torch.uint8))
        del dropped
        kept.append(torch.empty(100, dtype=torch.uint8))

    assert live_bytes(run, CPU) == Level(highest=1600, after=700)


def test_after_a_run_that_failed_another_can_be_measured():
    with pytest.raises(ZeroDivisionError):
        live_bytes(lambda: 1 / 0, CPU)
    assert live_bytes(lambda: torch.empty(64, dtype=torch.uint8), CPU).highest == 64


def test_measuring_prints_nothing(capfd):
    live_bytes(lambda: torch.ones(3), CPU)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- what a microbatch leaves on a stage


def test_a_linear_layer_keeps_x_until_b_and_x_and_dy_until_w():
    assert memory_of(nn.Linear(HIDDEN, HIDDEN, bias=False)) == StageMemory(saved=BYTES, deferred=2 * BYTES)


def test_an_activation_function_keeps_its_output_until_b_and_nothing_more_until_w():
    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Tanh())
    assert memory_of(module) == StageMemory(saved=2 * BYTES, deferred=2 * BYTES)


def test_the_batch_that_stage_0_reads_is_not_counted():
    assert memory_of(
        nn.Linear(HIDDEN, HIDDEN, bias=False), torch.zeros(ROWS, HIDDEN), index=0
    ) == StageMemory(0, BYTES)


def test_the_last_stage_holds_what_the_loss_needs_and_the_loss():
    def square(output, target):
        return (output - target).square().mean()  # saves the difference

    found = memory_of(
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        loss_fn=square,
        target=torch.zeros(ROWS, HIDDEN),
        is_last=True,
    )
    scalars = 2 * 4  # the loss, and its gradient, which is made once for all microbatches
    assert found == StageMemory(saved=2 * BYTES + scalars, deferred=2 * BYTES + scalars)


def test_a_frozen_stage_keeps_nothing_for_w():
    assert memory_of(nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)).deferred == 0


def test_measuring_leaves_no_trace():
    module = nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, HIDDEN))
    grads = [torch.full_like(parameter, 3.0) for parameter in module.parameters()]
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        parameter.grad = grad
    state = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    assert memory_of(module).deferred > 0
    assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), grads, strict=True))
    assert all((grad == 3.0).all() for grad in grads)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_first_inputs_of_each_stage_are_copied_and_no_others():
    stages = {3: nn.ReLU(inplace=True), 5: nn.Tanh()}
    with first_inputs(stages) as inputs:
        for value in (1.0, 2.0):
            stages[3](torch.full((2,), value))
    stages[5](torch.ones(2))  # outside
    assert {index: [each.tolist() for each in found] for index, found in inputs.items()} == {3: [[1.0, 1.0]]}


def test_memory_per_stage_says_more_of_the_stage_with_the_head():
    model = Llama(num_layers=4, hidden_size=16, num_heads=2, sequence_length=8)
    stages = {index: model.build_stage(index, 2) for index in range(2)}
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with first_inputs(stages) as inputs:
        stages[1](stages[0](tokens))
    found = memory_per_stage(stages, inputs, 2, CPU, loss_fn=token_loss, target=tokens)
    assert [each.saved > 0 and each.deferred > 0 for each in found] == [True, True]
    # the same layers on both; the last one has the head and the loss besides, and its x
    assert found[1].saved > found[0].saved
