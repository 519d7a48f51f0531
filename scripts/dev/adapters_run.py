#!/usr/bin/env python
"""Adapters on two CPU ranks: zb_v in slices against 1F1B, and against a split that runs one rank at a time.

    python scripts/dev/adapters_run.py                            a base of float32
    python scripts/dev/adapters_run.py --quantize nf4             4 bits per weight
    python scripts/dev/adapters_run.py --tokens 64 --repeats 1    to see that it runs

The three train the same Llama on the same batch, in turn, step by step: tokens per second of the median step,
the most bytes of live tensors on each rank above those before the step, counted in a step of its own, and the
mean loss of the last step. One at a time is a pipeline of one microbatch, which holds the whole batch.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure.live_tensors import live_bytes
from zbpp.models.hf import HuggingFace
from zbpp.planning import balanced_bounds, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs
from zbpp.training.fine_tuned import FineTuned

ROWS, VOCAB, HIDDEN, LAYERS = 8, 512, 512, 8
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RUNS = (("zb_v", 8, 4), ("1f1b", 8, 1), ("1f1b", 1, 1))  # schedule, microbatches, slices
TITLES = ("zb_v, 8 microbatches, 4 slices", "1f1b, 8 microbatches", "one rank at a time")


def save_base(folder: str) -> None:
    """A Llama with random weights, as transformers writes it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 1408}
    heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


def trained(given: tuple[str, str | None, int, int]) -> list[Any]:
    """For each of RUNS (the times of its steps in s, live bytes by rank, mean loss of the last step)."""
    folder, quantize, tokens, repeats = given
    logging.disable(logging.INFO)
    ids = torch.randint(VOCAB, (ROWS, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with world(device="cpu"), ExitStack() as stack:
        pipelines = [stack.enter_context(_pipeline(folder, quantize, tokens, *run)) for run in RUNS]
        optimizers = [
            torch.optim.AdamW([each for each in one.parameters() if each.requires_grad]) for one in pipelines
        ]
        times: list[list[float]] = [[] for _ in RUNS]
        losses: list[Any] = [None for _ in RUNS]
        for _ in range(repeats + 1):
            for index, (pipeline, optimizer) in enumerate(zip(pipelines, optimizers, strict=True)):
                dist.barrier()
                begin = time.perf_counter()
                losses[index] = pipeline.step(batch[0], target=batch[1])
                optimizer.step()
                optimizer.zero_grad()
                dist.barrier()
                times[index].append(time.perf_counter() - begin)
        found = []
        for pipeline, own, last in zip(pipelines, times, losses, strict=True):
            level = live_bytes(
                lambda pipeline=pipeline: pipeline.step(batch[0], target=batch[1]), pipeline.device
            )
            loss = [sum(last).item() / len(last)] if last else []
            found.append((own[1:], pipeline.place.gather(level.highest), pipeline.place.gather(loss)))
        return found


def _pipeline(
    folder: str, quantize: str | None, tokens: int, schedule: str, number: int, num_slices: int
) -> Pipeline:
    lora = {"r": 8, "lora_alpha": 16, "target_modules": NAMES}
    model = FineTuned(HuggingFace(path=folder, quantize=quantize), lora=lora)
    timetable = plan(schedule, 2, number, num_slices=num_slices)
    # A token takes 4 x 512 x 1408 products in a layer, and 512 for half of the tokens of its sequence.
    linear = HIDDEN * (3 * HIDDEN + 3 * 1408)
    costs = Costs(f=linear, b=linear, w=0, quadratic=Costs(f=HIDDEN * tokens, b=2 * HIDDEN * tokens, w=0))
    bounds = balanced_bounds(num_slices, tokens, costs) if num_slices > 1 else ()
    return Pipeline(model, timetable, slice_bounds=bounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantize", choices=["nf4", "fp4", "int8"])
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--repeats", type=int, default=6, help="timed steps of each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_base(folder)
        found = on_ranks(2, trained, (folder, given.quantize, given.tokens, given.repeats))
    first = found[0][0]
    for title, (times, levels, losses) in zip(TITLES, found, strict=True):
        speed = ROWS * given.tokens / median(times)
        ratio = median(own / other for own, other in zip(times, first, strict=True))
        mib = ", ".join(f"{level / 2**20:.1f}" for level in levels)
        (loss,) = (each for of_rank in losses for each in of_rank)
        run = f"{title:31} {speed:6.0f} tokens/s; step / zb_v's {ratio:.3f}"
        print(f"{run}; live MiB by rank {mib}; loss {loss:.6f}")


if __name__ == "__main__":
    main()
