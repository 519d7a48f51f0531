#!/usr/bin/env python
"""A Trainer in a pipeline beside loops over a Pipeline, step by step: tokens per second, CPU time; two ranks.

    python scripts/dev/trainer_run.py
    python scripts/dev/trainer_run.py --steps 4 --tokens 32      to see that it runs

All train the same Llama with the same batches, AdamW and clipping. Each step of the Trainer is followed by
one of the loop, and by one of a loop whose batch is one microbatch, so that one rank runs at a time, as with
a device_map. They run in the same processes. CPU time is that of the process (time.process_time), so waits
do not count. The first steps of each are left out. The Trainer's has all that it does between two steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

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

ROWS, MICROBATCHES, VOCAB, WARM_UP = 1, 8, 512, 2
TRAINER, LOOP, ALONE = "Trainer", "loop", "one rank at a time"


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

    def __init__(self, data: list[Any], schedule: str, num_microbatches: int) -> None:
        self.pipeline = Pipeline(
            HuggingFace(config=config().to_dict()), schedule, num_microbatches=num_microbatches
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


class Taken(NamedTuple):
    """What a step took, in seconds: of the process's CPU, and of the clock."""

    cpu: float
    wall: float


class Turns(TrainerCallback):
    """A step of each loop after each step of the Trainer, and what all steps took, by name."""

    def __init__(self, loops: dict[str, Loop]) -> None:
        self._loops = loops
        self.taken: dict[str, list[Taken]] = {name: [] for name in (TRAINER, *loops)}
        self._began: Taken | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note(TRAINER, self._began)
        for name, loop in self._loops.items():
            dist.barrier()
            began = _now()
            loop.step()
            self._note(name, began)
        dist.barrier()
        self._began = _now()

    def _note(self, name: str, began: Taken | None) -> None:
        now = _now()
        if began is not None and self._began is not None:  # the Trainer's first step has no beginning
            self.taken[name].append(Taken(now.cpu - began.cpu, now.wall - began.wall))


def _now() -> Taken:
    return Taken(time.process_time(), time.perf_counter())


def timed(given: tuple[str, str, int, int]) -> Any:
    """For each rank what the steps took, by name."""
    folder, schedule, tokens, steps = given
    logging.disable(logging.INFO)
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": each} for each in torch.randint(VOCAB, (64, tokens), generator=draw)]
    with world(device="cpu"):
        loops = {LOOP: Loop(data, schedule, MICROBATCHES), ALONE: Loop(data, "1f1b", 1)}
        turns = Turns(loops)
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
        for loop in loops.values():
            loop.pipeline.close()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {name: each[WARM_UP:] for name, each in turns.taken.items()})
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
    tokens = ROWS * MICROBATCHES * given.tokens
    for name in (TRAINER, LOOP, ALONE):
        steps = [*zip(*(one[name] for one in by_rank), strict=True)]
        walls = [max(each.wall for each in step) for step in steps]  # it has ended when all ranks have
        cpu = [sum(each.cpu for each in step) for step in steps]
        if name == TRAINER:
            own, own_cpu = walls, cpu
        ratio = median(theirs / mine for theirs, mine in zip(walls, own, strict=True))
        print(
            f"{name:20s} {tokens / median(walls):7.0f} tokens/s; step / Trainer's {ratio:.3f}; CPU of all "
            f"ranks per step {1e3 * median(cpu):7.1f} ms, Trainer's / its {sum(own_cpu) / sum(cpu):.3f}"
        )


if __name__ == "__main__":
    main()
