#!/usr/bin/env python
"""CPU time of a Trainer in a pipeline beside that of a loop over a Pipeline: two CPU ranks, in turn, by step.

    python scripts/dev/trainer_cpu.py
    python scripts/dev/trainer_cpu.py --steps 4 --tokens 32      to see that it runs

Both train the same Llama with the same batches, AdamW and clipping. Each step of the Trainer is followed by
one of the loop, in the same processes; CPU time is that of the process (time.process_time), so waits do not
count. The first steps of each are left out. The Trainer's has all that it does between two steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from zbpp.features.reductions.norm import clip_grad_norm_
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.hf import HuggingFace
from zbpp.runtime import Pipeline
from zbpp.transformers import in_pipeline

ROWS, MICROBATCHES, VOCAB, WARM_UP = 1, 4, 512, 2


def config() -> LlamaConfig:
    """A Llama of 8 layers."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
    return LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of rows; the labels are the tokens."""
    ids = torch.stack([each["input_ids"] for each in rows])
    return {"input_ids": ids, "labels": ids.clone()}


class Loop:
    """A loop over a Pipeline, one step at a time."""

    def __init__(self, data: list[Any], schedule: str) -> None:
        self.pipeline = Pipeline(
            HuggingFace(config=config().to_dict()), schedule, num_microbatches=MICROBATCHES
        )
        self._optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-3)
        self._batches = cycle(DataLoader(data, batch_size=ROWS * MICROBATCHES, collate_fn=collated))

    def step(self) -> None:
        """Train on the next batch."""
        batch = next(self._batches)
        self.pipeline.step(batch["input_ids"], labels=batch["labels"])
        clip_grad_norm_(self.pipeline, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Turns(TrainerCallback):
    """A step of the loop after each of the Trainer, and the CPU time of both, in seconds."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self.times = loop, ([], [])
        self._began: float | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = time.process_time()
        if self._began is not None:  # the first step has no beginning: the model is cut there
            self.times[0].append(ended - self._began)
        self._loop.step()
        between = time.process_time()
        if self._began is not None:
            self.times[1].append(between - ended)
        self._began = between


def timed(given: tuple[str, str, int, int]) -> Any:
    """For each rank the CPU times of the Trainer's steps and of the loop's, in seconds."""
    folder, schedule, tokens, steps = given
    logging.disable(logging.INFO)
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": each} for each in torch.randint(VOCAB, (64, tokens), generator=draw)]
    with world(device="cpu"):
        loop = Loop(data, schedule)
        turns = Turns(loop)
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICROBATCHES,
            max_steps=steps + WARM_UP + 1,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config())
        chosen = in_pipeline(Trainer, schedule=schedule)
        trainer = chosen(
            model=model, args=args, train_dataset=data, data_collator=collated, callbacks=[turns]
        )
        trainer.train()
        trainer.pipeline.close()
        loop.pipeline.close()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, [each[WARM_UP:] for each in turns.times])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_ranks(2, timed, (folder, given.schedule, given.tokens, given.steps))
    for rank, (trainer, loop) in enumerate(by_rank):
        ratio = median(a / b for a, b in zip(trainer, loop, strict=True))
        print(
            f"rank {rank}: CPU per step {1e3 * median(trainer):.1f} ms, loop {1e3 * median(loop):.1f} ms; "
            f"sum of {len(trainer)} steps {sum(trainer):.3f} s, loop {sum(loop):.3f} s, "
            f"{100 * (sum(trainer) / sum(loop) - 1):+.1f} %; median of the steps' ratios {ratio:.3f}"
        )
    own, other = (sum(sum(one[index]) for one in by_rank) for index in (0, 1))
    print(f"all ranks: {own:.3f} s, loop {other:.3f} s, {100 * (own / other - 1):+.1f} %")


if __name__ == "__main__":
    main()
