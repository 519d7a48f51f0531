#!/usr/bin/env python
"""Does a model learn as well where messages travel in fewer bytes? A small GPT on real text, four stages.

    python scripts/dev/fewer_bytes_run.py              300 steps of each run
    python scripts/dev/fewer_bytes_run.py --seed 1     other weights and batches
    python scripts/dev/fewer_bytes_run.py --steps 3    to see that it runs

The text: the Python standard library's sources, bytes. All runs have the same weights, batches and cut; the
8 bit run is repeated under another schedule on two ranks, and its losses must be equal to the last bit.
With a learning rate of 3e-3 in place of 1e-3 such a run can't tell anything: an exact one with another eps of
AdamW differs from the first exact one by half a percent, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

RUNS = {  # name: (ranks, schedule, parallel.messages)
    "exact": (4, "zb_h1", "exact"),
    "bfloat16": (4, "zb_h1", "bfloat16"),
    "8bit": (4, "zb_h1", "8bit"),
    "8bit, zb_v": (2, "zb_v", "8bit"),
}
LAST = 20  # steps whose losses are averaged


def trained(
    folder: Path, ranks: int, schedule: str, messages: str, steps: int, seed: int
) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    command = [sys.executable, "-m", "zbpp", "train", "-n", str(ranks), f"schedule={schedule}"]
    command += ["model=gpt_tiny", f"steps={steps}", f"evaluate_every={steps}"]
    command += [f"parallel.messages={messages}", "parallel.device=cpu", f"run_dir={folder}", f"seed={seed}"]
    command += ["evaluation_batches=20", "save_weights=false", "checkpoint.every=0", "measure_every=0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    steps = given.steps
    print(f"$ python scripts/dev/fewer_bytes_run.py --steps {steps} --seed {given.seed}\n")
    print("A GPT of 0.8 M parameters in four stages on the Python standard library's sources, bytes;")
    print(f"torch {torch.__version__}, Python {platform.python_version()}. No speeds.\n")
    print(f"{'messages':12}  mean of the last {LAST} losses          held-out loss")
    losses, exact = {}, (0.0, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, run) in enumerate(RUNS.items()):
            lines = trained(Path(folder) / str(number), *run, steps, given.seed)
            losses[name] = [each["loss"] for each in lines if "loss" in each]
            last = losses[name][-LAST:]
            held_out = [each["evaluation_loss"] for each in lines if "evaluation_loss" in each][-1]
            found = sum(last) / len(last), held_out
            exact = found if name == "exact" else exact
            shown = [f"{a:.4f} ({100 * (a / b - 1):+.2f} %)" for a, b in zip(found, exact, strict=True)]
            print(f"{name:12}  {shown[0]:34}  {shown[1]}", flush=True)
    assert losses["8bit"] == losses["8bit, zb_v"], "ranks and timetables change losses"
    print("\n8 bits, zb_h1 on 4 ranks and zb_v on 2: all losses are equal to the last bit")


if __name__ == "__main__":
    main()
