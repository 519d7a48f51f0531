"""A loop of your own: a module that you have, cut into stages, trained, evaluated and saved.

torchrun --standalone --nproc-per-node 2 own_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn

import zbpp

NUM_MICROBATCHES = 4


def encoder() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4))
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of noise, whose running mean the model shall learn. Every rank makes the same batch."""
    x = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(step))
    return x, x.cumsum(1) / torch.arange(1, 9)[:, None]


def main() -> None:
    dist.init_process_group("gloo")  # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), "nccl"
    timetable = zbpp.plan("zb_v", dist.get_world_size(), NUM_MICROBATCHES)
    # zbpp.trace_stages cuts a module that is no chain of layers.
    stages = zbpp.split_sequential(encoder(), timetable.num_stages)  # ZB-V has two stages per rank
    mine = {stage: stages[stage] for stage in timetable.stages_of(dist.get_rank())}

    with zbpp.Pipeline(mine, timetable, loss_fn=nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        for step in range(10):
            x, target = batch(step)
            losses = pipeline.step(x.to(pipeline.device), target=target.to(pipeline.device))
            norm = zbpp.clip_grad_norm_(pipeline, 1.0)  # the norm of all ranks' gradients
            optimizer.step()
            optimizer.zero_grad()
            if losses:  # on the last stage's rank, which ZB-V makes rank 0
                print(f"step {step}  loss {sum(losses) / len(losses):.4f}  norm {norm:.3f}")
        x, target = batch(1000)
        held_out = pipeline.evaluate(x.to(pipeline.device), target=target.to(pipeline.device))
        if held_out:
            print(f"held out  loss {sum(held_out) / len(held_out):.4f}")
        zbpp.save("checkpoints", pipeline, optimizer, step=10)  # zbpp.load takes it under any other cut
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
