#!/usr/bin/env python
"""What do batches of tokens bring? A small Llama on a few ranks, lengths as in chats: tokens (not padding)/s.

    python scripts/bench_lengths.py                                   # 2 ranks, 8 microbatches, zb_h1
    python scripts/bench_lengths.py --schedule zb_v --microbatches 16 --repeats 20

Lengths of sequences are lognormal with variation --cv and mean --mean, at most 4 x --mean. One batch is cut
into microbatches in four ways, which take turns, a step each:

    longest     rows in the given order, all filled up to the longest of the batch
    own         the same rows, each microbatch filled up to its own longest
    ordered     neighbours in length share a microbatch, and the microbatches are ordered: data.packing=false
    packed      a row of several sequences per microbatch, ordered: data.batching=tokens

The order is chosen for the costs that this job measures under "own" at first. The predicted step is simulated
with those of all its steps under "own".

--check trains in float64: losses and gradients of all ways are compared with those of plain autograd on one
sequence after the other; the exit status is 1 if one differs by more than 1e-12.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.data.sequences import Known
from zbpp.data.source import parts_of
from zbpp.data.token_batches import Group, MicrobatchShape, TokenBatches
from zbpp.job.agreement import gather
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure import measured_costs_of_lengths
from zbpp.models.llama import Llama
from zbpp.observers.recorder import Recorder
from zbpp.planning import plan
from zbpp.runtime import Pipeline, per_microbatch
from zbpp.schedule import Costs, Timeline, Timetable, simulate
from zbpp.training.batches import positional
from zbpp.training.length_plans import LengthPlanner, Lengths, agreed_plan

VOCAB = 256
TOLERANCE = 1e-12


def sequences_of(options: argparse.Namespace) -> Known:
    """--rows sequences per microbatch; the same on all ranks."""
    count = options.microbatches * options.rows
    drawn = np.random.default_rng(0).lognormal(0, np.sqrt(np.log(1 + options.cv**2)), count)
    lengths = (options.mean * drawn / drawn.mean()).round().clip(1, 4 * options.mean).astype(np.int64)

    def read(sample: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(sample)
        tokens = torch.randint(VOCAB, (int(lengths[sample % count]) + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    return Known(lengths, lambda samples: samples % count, read)


def model_of(options: argparse.Namespace) -> Llama:
    return Llama(
        vocab_size=VOCAB,
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=4,
        sequence_length=4 * options.mean,
    )


class Way:
    """A way to cut the batch, with a pipeline of its own. microbatches: inputs and labels, in their order."""

    def __init__(
        self,
        name: str,
        microbatches: Sequence[Any],
        shapes: Sequence[MicrobatchShape],
        model: Llama,
        stages: Any,
        timetable: Timetable,
    ) -> None:
        self.name, self.shapes = name, shapes
        parts = [parts_of(each) for each in microbatches]
        self.args: tuple[Any, ...] = ()
        if 0 in stages:
            inputs = [positional(each, stages[0]) for each, _ in parts]
            self.args = tuple(map(per_microbatch, zip(*inputs, strict=True)))
        is_last = timetable.num_stages - 1 in stages
        self.target = per_microbatch([labels for _, labels in parts]) if is_last else None
        self.pipeline = Pipeline(stages, timetable, model.loss, timeout=300.0)
        self.recorder, self.timelines = Recorder(), list[Timeline]()

    def step(self) -> list[Tensor]:
        """One step; its gradients stay until the next one."""
        for each in self.pipeline.parameters():
            each.grad = None
        if dist.is_initialized():
            dist.barrier()
        with without_garbage_collection(), self.pipeline.using(self.recorder):
            losses = self.pipeline.step(*self.args, target=self.target)
        self.timelines.append(self.recorder.timeline())
        return losses

    @property
    def makespan(self) -> float:
        """The median over all steps, ms."""
        return median(each.makespan for each in self.timelines)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return sum(each.filled for each in self.shapes)

    @property
    def padding(self) -> float:
        return 1 - self.num_tokens / sum(each.tokens for each in self.shapes)


class Cut(NamedTuple):
    """The sequences of each microbatch, their shapes, and whether they are packed."""

    groups: list[Group]
    shapes: list[MicrobatchShape]
    batches: TokenBatches


def in_turn(options: argparse.Namespace, sequences: Known, length: int | None) -> Cut:
    """--rows sequences per microbatch in the given order. length: of all rows; None: of the longest there."""
    count = options.microbatches * options.rows
    lengths = sequences.lengths(np.arange(count))
    starts = range(0, count, options.rows)
    groups = [tuple(range(start, start + options.rows)) for start in starts]
    own = [lengths[[*group]] for group in groups]
    shapes = [MicrobatchShape(len(each), int(length or each.max()), int(each.sum())) for each in own]
    return Cut(groups, shapes, token_batches(options, sequences, is_packed=False))


def token_batches(options: argparse.Namespace, sequences: Known, *, is_packed: bool) -> TokenBatches:
    """All sequences are one batch."""
    total = int(sequences.lengths(np.arange(options.microbatches * options.rows)).sum())
    return TokenBatches(sequences, tokens_per_batch=total, is_packed=is_packed)


def ordered(
    options: argparse.Namespace, sequences: Known, pipeline: Pipeline, costs: Costs, *, is_packed: bool
) -> Cut:
    """As the trainer plans a batch, for these costs."""
    batches = token_batches(options, sequences, is_packed=is_packed)
    planner = LengthPlanner(batches, pipeline.timetable, costs, (1, options.mean))
    planner.leaves_out = False
    found = agreed_plan(planner.plan(0) if pipeline.rank == 0 else None, pipeline.place)
    shapes = dict(batches.cut(0, options.microbatches))
    empties = [shape for group, shape in batches.cut(0, options.microbatches) if not group]
    return Cut(found.groups, [shapes[each] if each else empties[0] for each in found.groups], batches)


def rows_of(cut: Cut) -> list[Any]:
    """The microbatches of a cut, filled up to the length that their shapes have."""
    if cut.batches.is_packed:
        return [cut.batches.microbatch(group) for group in cut.groups]
    found = []
    for group, shape in zip(cut.groups, cut.shapes, strict=True):
        inputs, labels = cut.batches.microbatch(group)
        missing = shape.length - labels.shape[1]
        found.append((F.pad(inputs, (0, missing)), F.pad(labels, (0, missing), value=-100)))
    return found


def bench(options: argparse.Namespace) -> tuple[list[str], bool]:
    """On every rank: (lines of the table, whether all is as it must be)."""
    with world(device="cpu", timeout=300.0):
        rank = dist.get_rank() if dist.is_initialized() else 0
        timetable, model, sequences = (
            plan(options.schedule, options.ranks, options.microbatches),
            model_of(options),
            sequences_of(options),
        )
        dtype = torch.float64 if options.check else torch.float32
        stages = {
            index: model.build_stage(index, timetable.num_stages).to(dtype)
            for index in timetable.stages_of(rank)
        }

        def way(name: str, cut: Cut) -> Way:
            return Way(name, rows_of(cut), cut.shapes, model, stages, timetable)

        own = way("own", in_turn(options, sequences, None))
        for _ in range(4):
            own.step()
        tokens = [each.tokens / options.mean for each in own.shapes]
        costs = measured_costs_of_lengths(own.timelines[1:], [tokens] * 3)
        ways = [way("longest", in_turn(options, sequences, sequences.longest)), own]
        for name, is_packed in (("ordered", False), ("packed", True)):
            ways.append(way(name, ordered(options, sequences, own.pipeline, costs, is_packed=is_packed)))
        for each in ways:
            each.step()
            each.timelines.clear()
        for turn in range(options.repeats):
            for each in (*ways[turn % 4 :], *ways[: turn % 4]):
                each.step()
        costs = measured_costs_of_lengths(own.timelines, [tokens] * len(own.timelines))
        lengths = Lengths(costs, (1, options.mean))
        lines = table(options, ways, costs, lengths)
        is_right = True
        if options.check:
            worst = max(gather(max(differences(options, ways, stages, sequences, timetable.num_stages))))
            is_right = worst <= TOLERANCE
            lines.append(f"largest difference to plain autograd, of losses and gradients: {worst:.1e}")
        for each in ways:
            each.pipeline.close()
        return lines, is_right


def table(options: argparse.Namespace, ways: Sequence[Way], costs: Costs, lengths: Lengths) -> list[str]:
    """A row per way. predicted: simulated with the measured costs."""
    first = ways[0]
    lines = [
        f"{options.ranks} ranks, {options.schedule}, {options.microbatches} microbatches, "
        f"{first.num_tokens:,} tokens a step, cv {options.cv:g}; medians of {options.repeats} steps in turns",
        f"{'':9}{'padding':>8}{'step, ms':>10}{'predicted':>11}{'idle':>7}{'predicted':>11}{'tokens/s':>10}"
        f"{'speed':>8}",
    ]
    for each in ways:
        own = Costs.of_lengths([lengths.of(shape) for shape in each.shapes], costs)
        predicted = simulate(each.pipeline.timetable, own)
        idle = median(one.bubble_rate for one in each.timelines)
        speed = first.makespan / each.makespan
        lines.append(
            f"{each.name:9}{each.padding:8.1%}{each.makespan:10.1f}{predicted.makespan:11.1f}{idle:7.1%}"
            f"{predicted.bubble_rate:11.1%}{each.num_tokens / each.makespan * 1e3:10,.0f}{speed:7.2f}x"
        )
    return lines


def differences(
    options: argparse.Namespace, ways: Sequence[Way], stages: Any, sequences: Known, num_stages: int
) -> list[float]:
    """How far losses and gradients are from plain autograd's, relative to the largest of their tensor."""
    found = []
    whole = model_of(options).build_stage(0, 1).double()
    rows = [sequences.sequence(sample) for sample in range(options.microbatches * options.rows)]
    count = sum(len(labels) for _, labels in rows)
    total = sum(F.cross_entropy(whole(inputs[None])[0], labels, reduction="sum") for inputs, labels in rows)
    loss = torch.as_tensor(total / count)
    loss.backward()
    plain = dict(whole.named_parameters())
    for way in ways:
        losses = way.step()
        if losses:
            found.append(abs(float(sum(losses)) / len(losses) - loss.item()) / loss.item())
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                expected = plain[name].grad
                found.append(float((parameter.grad - expected).abs().max() / expected.abs().max()))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="sequences per microbatch, on average")
    parser.add_argument("--mean", type=int, default=128, help="tokens of a sequence, on average")
    parser.add_argument("--cv", type=float, default=0.6, help="standard deviation of lengths over their mean")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="in float64, against plain autograd")
    options = parser.parse_args(argv)
    lines, is_right = on_ranks(options.ranks, bench, options)
    print("\n".join(lines))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
