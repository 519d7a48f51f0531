"""What a step held, and what outlives it."""

import torch
from torch import nn

from helpers.memory_record import MemoryRecord
from zbpp import Pipeline
from zbpp.runtime.measure.live_tensors import LiveTensors

ROWS, HIDDEN, M = 4, 8, 2
SIZE = ROWS * HIDDEN * 4  # bytes of one microbatch's activation


def test_live_tensors_are_counted_once_and_until_they_are_freed():
    before = torch.ones(100)
    with LiveTensors() as live:
        kept = torch.empty(600, dtype=torch.uint8)
        view = before[:10]  # of memory that was there before
        dropped = torch.empty(1000, dtype=torch.uint8)
        half = kept[:300]
        del dropped
        assert (live.now, live.highest) == (600, 1600)
        del kept
        assert live.now == 600  # a view holds it
        del half, view
        assert live.now == 0
        live.count([before])
        assert live.now == 400


def recorded(pipeline):
    """The record of a pipeline's third step."""
    record = MemoryRecord(pipeline.device)

    def static():
        for each in pipeline.parameters():
            yield from (tensor for tensor in (each, each.grad) if tensor is not None)

    batch = torch.randn(M * ROWS, HIDDEN), torch.randn(M * ROWS, HIDDEN)
    for step in range(3):
        if step < 2:
            pipeline.step(batch[0], target=batch[1])
        else:
            with record.step(static), pipeline.using(record.recorder):
                pipeline.step(batch[0], target=batch[1])
    return record


def pipeline_of(stage):
    return Pipeline({0: stage}, "zb_h1", num_microbatches=M, loss_fn=nn.functional.mse_loss)


def test_each_action_has_its_levels_and_nothing_outlives_the_step():
    record = recorded(pipeline_of(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())))
    assert [str(span.action) for span in record.spans] == ["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"]
    first = record.spans[0]
    assert first.after > first.before
    assert first.highest >= first.after
    assert record.outliving == 0


def test_what_a_hook_keeps_outlives_the_step():
    layer, seen = nn.Linear(HIDDEN, HIDDEN), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.detach() * 1))
    assert recorded(pipeline_of(layer)).outliving == M * SIZE  # those of the last step
