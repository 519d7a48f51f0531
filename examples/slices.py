"""Long sequences in slices: less idle time, and a fraction of the activations.

torchrun --standalone --nproc-per-node 2 slices.py
"""

import torch
import torch.distributed as dist
from torch import nn

import zbpp
from zbpp.models.llama import Llama
from zbpp.stage_api import mean_over_tokens

TOKENS, NUM_MICROBATCHES, NUM_SLICES = 64, 2, 4
MODEL = Llama(vocab_size=64, num_layers=4, hidden_size=32, num_heads=4, sequence_length=TOKENS)


@mean_over_tokens  # each slice is told how many targets it has
def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        for slices in (1, NUM_SLICES):
            plan = zbpp.plan("zb_v", num_ranks, NUM_MICROBATCHES, num_slices=slices)
            line = zbpp.simulate(plan, zbpp.Costs(f=1 / slices, b=1 / slices, w=1 / slices, saved=1 / slices))
            print(f"{slices} slices: bubble rate {line.bubble_rate:.3f}, held {max(line.peak_memory):.2f}")

    timetable = zbpp.plan("zb_v", num_ranks, NUM_MICROBATCHES, num_slices=NUM_SLICES)
    stages = {
        stage: MODEL.build_stage(stage, timetable.num_stages)
        for stage in timetable.stages_of(dist.get_rank())
    }
    # Attention's work grows along a sequence. So the first slices are longer than the last:
    # zbpp.planning.balanced_bounds finds such bounds from measured costs.
    bounds = [0, 20, 36, 51, TOKENS]
    with zbpp.Pipeline(stages, timetable, loss_fn=loss_fn, slice_bounds=bounds) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        tokens = torch.arange(4 * (TOKENS + 1)).reshape(4, -1) * 3 % 64
        for step in range(10):
            losses = pipeline.step(tokens[:, :-1], target=tokens[:, 1:])  # targets come shifted
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                print(f"step {step}  loss {sum(losses) / len(losses):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
