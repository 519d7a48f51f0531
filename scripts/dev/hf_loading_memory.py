#!/usr/bin/env python
"""Print how much memory a rank takes while it reads its stages of a folder, beside the bytes of these stages.

It saves a model of a few hundred MiB, then builds each stage in a process of its own, as the ranks of a
pipeline do. The peak is that of the process (VmHWM: what it has allocated, and files that it maps), less what
it had before: interpreter, torch and transformers. The trial of the cut on a small copy is counted apart; its
memory is given back to the system before reading begins, so that reading can't seem cheaper than it is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

_SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 16384}
_EXPERTS = {**_SIZES, "intermediate_size": 512, "num_key_value_heads": 8, "num_local_experts": 8}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, float32": ("llama", _SIZES, "float32"),
    "llama, tied, bfloat16 file": ("llama", {**_SIZES, "tie_word_embeddings": True}, "bfloat16"),
    "mixtral, float32": ("mixtral", _EXPERTS, "float32"),
}


class Peak(NamedTuple):
    """Bytes: of the stage's tensors, the most while reading them, and the most while the cut was tried."""

    own: int
    reading: int
    trial: int


def saved(kind: str, sizes: dict[str, Any], dtype: str, num_layers: int, folder: Path) -> int:
    """Save a model with random weights; its number of bytes in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(4 * each.numel() for each in model.parameters())


def build(folder: str, index: int, num_stages: int) -> Peak:
    """Build one stage in this process."""
    import torch

    from zbpp.models.hf import HuggingFace

    torch.set_num_threads(1)
    model = HuggingFace(path=folder)
    trial = _peak_of(lambda: model.layer_counts(num_stages))
    stages: list[Any] = []
    reading = _peak_of(lambda: stages.append(model.build_stage(index, num_stages)))
    tensors = {id(each): each for each in (*stages[0].parameters(), *stages[0].buffers())}
    return Peak(sum(each.numel() * each.element_size() for each in tensors.values()), reading, trial)


def _peak_of(call: Any) -> int:
    """How far the memory of this process rises during a call, in bytes."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _level("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    call()
    return _level("VmHWM") - before


def _level(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measured(case: str, num_stages: int, num_layers: int) -> tuple[int, list[Peak]]:
    """(bytes of the whole model, the peaks of each stage)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(1, maxtasksperchild=1) as pool:
        kind, sizes, dtype = CASES[case]
        whole = pool.apply(saved, (kind, sizes, dtype, num_layers, Path(folder)))
        return whole, [pool.apply(build, (folder, index, num_stages)) for index in range(num_stages)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    print(f"{'':30}stage  own MiB  peak while reading  of own  trial of the cut")
    for case in CASES:
        whole, peaks = measured(case, options.stages, options.layers)
        print(f"{case} ({whole / 2**20:.0f} MiB in float32)")
        for index, (own, reading, trial) in enumerate(peaks):
            ratio, (o, r, t) = reading / own, (each / 2**20 for each in (own, reading, trial))
            print(f"{'':30}{index:5}{o:9.0f}{r:20.0f}{ratio:8.2f}{t:18.0f}")


if __name__ == "__main__":
    main()
