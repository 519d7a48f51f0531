"""Texts of very different lengths, without padding: packed into rows, which run in a good order.

torchrun --standalone --nproc-per-node 2 lengths.py

In the trainer `data.batching=tokens data.tokens_per_batch=...` does all of this.
"""

import torch
import torch.distributed as dist
from torch import nn

import zbpp
from zbpp.models.llama import Llama
from zbpp.packing import longest_first
from zbpp.stage_api import mean_over_tokens

NUM_MICROBATCHES = 4
MODEL = Llama(vocab_size=64, num_layers=4, hidden_size=32, num_heads=4, sequence_length=256)
# What one microbatch of 100 tokens costs: the parts that grow with its length, and with its square.
LINEAR, QUADRATIC = zbpp.Costs(f=9.0, b=9.0, w=10.0), zbpp.Costs(f=1.0, b=2.0, w=0.0)


def sequences(step: int) -> list[torch.Tensor]:
    """Twelve texts, most of them short. Every rank makes the same ones."""
    draw = torch.Generator().manual_seed(step)
    lengths = (torch.empty(12).log_normal_(3.2, 1.0, generator=draw).long() + 4).clamp(max=250)
    return [torch.arange(int(length)) * 3 % 64 for length in lengths]


def packed(group: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: inputs, positions (each text begins at 0: attention keeps texts apart), and targets."""
    inputs = torch.cat([text[:-1] for text in group])
    positions = torch.cat([torch.arange(len(text) - 1) for text in group])
    target = torch.cat([text[1:] for text in group])
    return inputs[None], positions[None], target[None]


@mean_over_tokens  # each token of the step weighs the same, whichever microbatch it is in
def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    timetable = zbpp.plan("zb_v", dist.get_world_size(), NUM_MICROBATCHES)
    stages = {
        stage: MODEL.build_stage(stage, timetable.num_stages)
        for stage in timetable.stages_of(dist.get_rank())
    }
    with zbpp.Pipeline(stages, timetable, loss_fn=loss_fn) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        for step in range(10):
            texts = sequences(step)
            groups = longest_first([len(text) for text in texts], NUM_MICROBATCHES)
            rows = [packed([texts[index] for index in group]) for group in groups]
            tokens = [row[0].shape[1] for row in rows]
            costs = zbpp.Costs.of_lengths([count / 100 for count in tokens], LINEAR, QUADRATIC)
            order = zbpp.order_microbatches(timetable, costs, time_limit=0.02)
            inputs, positions, targets = zip(*rows, strict=True)
            losses = pipeline.step(
                zbpp.per_microbatch(list(inputs), order),
                zbpp.per_microbatch(list(positions)),
                target=zbpp.per_microbatch(list(targets)),
            )
            zbpp.clip_grad_norm_(pipeline, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                print(f"step {step}  loss {sum(losses) / len(losses):.4f}  tokens {tokens}, order {order}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
