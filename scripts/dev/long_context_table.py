#!/usr/bin/env python
"""Plan steps of Llama-3-8B over long sequences, by schedule and number of slices: idle time and memory.

    python scripts/dev/long_context_table.py                    # the table of docs/long_context.md
    python scripts/dev/long_context_table.py --microbatches 16
    python scripts/dev/long_context_table.py --equal            # slices of equal length: the trap

Planned, not run. 32 layers on 8 ranks (no embedding, no head), bfloat16, flash attention with a causal mask;
times are FLOPs at 40 % of an H100's peak, a message takes none. A cell is the share of the step in which a
rank idles, the mean over ranks, and the most activations that a rank holds.
"""

from __future__ import annotations

import argparse

from zbpp.planning import RankCosts, balanced_bounds, plan
from zbpp.schedule import Timeline, simulate

HIDDEN, KV, INTERMEDIATE, LAYERS = 4096, 1024, 14336, 32
NUM_RANKS = 8
RATE = 400e12 / 1e3  # FLOPs per ms
GIB = 2**30


def costs_of(length: int) -> RankCosts:
    """What a rank's layers take of one sequence: ms, and GiB.

    F has 2 FLOPs per weight and token, and two products of attention, 4 * HIDDEN FLOPs per query and key. B
    has as many per weight, and five products of attention. W has no attention.
    """
    layers = LAYERS // NUM_RANKS
    weights = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INTERMEDIATE
    linear = layers * 2 * weights * length / RATE
    attention = layers * 4 * HIDDEN * length**2 / 2 / RATE
    # Numbers of 2 bytes, per token and layer: inputs of norms and products, queries, attention's output; keys
    # and values; gate, up, the activation and the product of both.
    saved = 7 * HIDDEN + 2 * KV + 4 * INTERMEDIATE
    # x and dy of the products of queries, keys and values, output, gate and up, down.
    deferred = (2 * HIDDEN + 2 * KV) + 2 * HIDDEN + (HIDDEN + 2 * INTERMEDIATE) + (INTERMEDIATE + HIDDEN)
    gib = layers * 2 * length / GIB
    return RankCosts(
        f=linear,
        b=linear,
        w=linear,
        quadratic=RankCosts(f=attention, b=2.5 * attention, w=0.0),
        saved=saved * gib,
        deferred=deferred * gib,
        past=2 * KV * gib,
        past_gradients=2 * 2 * KV * gib,  # summed in float32
    )


def planned(
    name: str, length: int, num_microbatches: int, num_slices: int, *, equal: bool = False
) -> Timeline:
    """The step's timeline, with slices that take equally long or have equal lengths."""
    costs = costs_of(length)
    bounds = range(num_slices + 1) if equal else balanced_bounds(num_slices, length, costs, multiple=128)
    timetable = plan(name, NUM_RANKS, num_microbatches, num_slices=num_slices)
    return simulate(timetable, costs.sliced(bounds).per_stage(timetable.num_stages, NUM_RANKS))


def idle_share(timeline: Timeline) -> float:
    """The share of the step in which a rank idles, the mean over ranks."""
    busy = sum(float((end - start).sum()) for start, end in zip(timeline.starts, timeline.ends, strict=True))
    return 1 - busy / NUM_RANKS / timeline.makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=8, help="sequences of a step (default 8)")
    parser.add_argument("--equal", action="store_true", help="slices of equal length")
    options = parser.parse_args()
    slices = (1, 2, 4, 8, 16)
    kind = "equal lengths" if options.equal else "equal times"
    print(
        f"Llama-3-8B, {NUM_RANKS} ranks, {options.microbatches} sequences, slices of {kind}: idle, GiB a rank"
    )
    print("| tokens | schedule |" + "".join(f" S={each} |" for each in slices))
    print("|---" * (len(slices) + 2) + "|")
    for length in (32_768, 131_072, 524_288):
        for name in ("1f1b", "zb_h1", "zb_v"):
            cells = []
            for num_slices in slices:
                timeline = planned(name, length, options.microbatches, num_slices, equal=options.equal)
                cells.append(f" {100 * idle_share(timeline):.0f} %, {max(timeline.peak_memory):.0f} |")
            print(f"| {length // 1024}k | {name} |" + "".join(cells))
    print()
    for length in (32_768, 131_072, 524_288):
        print(f"{length // 1024}k, S=8: {balanced_bounds(8, length, costs_of(length), multiple=128)}")


if __name__ == "__main__":
    main()
