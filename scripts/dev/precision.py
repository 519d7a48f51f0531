#!/usr/bin/env python
"""What each precision costs and gives: bytes per parameter, measured, and losses after a short training."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from zbpp.models.gpt import Gpt
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.norm import gradients_of
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.optimizer import adamw
from zbpp.training.optim.precision import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "float32": ("precision=float32",),
    "mixed_bfloat16": ("precision=mixed_bfloat16",),
    "mixed_float16": ("precision=mixed_float16",),
    "bfloat16": ("precision=bfloat16",),
    "bfloat16, Kahan": ("precision=bfloat16", "optimizer.kahan_sum=true"),
}
LAST = 20  # steps whose training losses are averaged at the end


class Bytes(NamedTuple):
    """Per parameter, from the storages of the tensors after a step; masters: those beside the weights."""

    weights: float
    gradients: float
    masters: float
    states: float


class Losses(NamedTuple):
    """The mean training loss of the last steps, the held-out loss, and how many steps were skipped."""

    trained: float
    held_out: float
    num_skipped: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=2, help="of 4 rows of 64 tokens")
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores\n")
    print("bytes per parameter   weights  gradients  masters  states   sum")
    for name, overrides in RUNS.items():
        found = bytes_per_parameter(overrides[0].partition("=")[2], kahan_sum=len(overrides) > 1)
        columns = zip(found, (9, 11, 9, 8), strict=True)
        print(f"{name:20}", *(f"{each:{width - 1}.1f}" for each, width in columns), f"{sum(found):5.1f}")
    print(
        f"\n{options.steps} steps of gpt_tiny on the default corpus, one rank: mean loss of the last {LAST} "
        "steps, held-out loss, each over float32's; steps skipped"
    )
    first: Losses | None = None
    for name, overrides in RUNS.items():
        losses = train(*overrides, f"steps={options.steps}", f"num_microbatches={options.microbatches}")
        first = first or losses
        trained, held_out = losses.trained / first.trained - 1, losses.held_out / first.held_out - 1
        print(
            f"{name:20} {losses.trained:.4f} ({trained:+.2%})  {losses.held_out:.4f} ({held_out:+.2%})  "
            f"{losses.num_skipped}",
            flush=True,
        )


def train(*overrides: str) -> Losses:
    """The losses of `zbpp train` with these overrides."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zbpp", "train", *overrides, f"run_dir={folder}/run"]
        more = ["evaluate_every=1000000", "evaluation_batches=8", "save_weights=false"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, env=environment)
        run = Path(folder) / "run"
        history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Losses(
        mean(float(each["loss"]) for each in history[-LAST:]),
        float(history[-1]["evaluation_loss"]),
        sum(each["skipped"] for each in history),
    )


def bytes_per_parameter(precision: str, *, kahan_sum: bool = False) -> Bytes:
    """Measure a small GPT after one step with AdamW."""
    chosen = PRECISIONS[precision]
    model = Gpt(num_layers=2, hidden_size=64, num_heads=2, sequence_length=8)
    stage = model.build_stage(0, 1).to(chosen.stored)
    parameters = list(stage.parameters())
    masters = MasterWeights(parameters, chosen.compute) if chosen.is_mixed else None
    optimized = list(parameters if masters is None else masters.parameters())
    optimizer = adamw(
        optimized, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, kahan_sum=kahan_sum
    )
    tokens = torch.arange(18).reshape(2, 9)
    Pipeline({0: stage}, "zb_h1", model.loss, num_microbatches=2).step(tokens[:, 1:], target=tokens[:, :-1])
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    tables = [each for each in states if isinstance(each, Tensor) and each.dim()]
    groups = (parameters, gradients_of(parameters), [] if masters is None else optimized, tables)
    num_parameters = sum(each.numel() for each in parameters)
    return Bytes(*(_num_bytes(group) / num_parameters for group in groups))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
