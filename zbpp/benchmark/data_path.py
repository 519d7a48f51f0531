"""The data path alone: how many tokens a second it gives, and what an index of many tokens costs.

A process of its own makes each figure, since peak memory is known per process only. Memory is the largest
resident set of private pages, less that of the process before it opened its data. Pages of the mapped file
don't count: they are the system's cache, which it takes back whenever it wants.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from zbpp.data.prepared import HELD_OUT, TRAIN, Header, PartHeader, documents_file, tokens_file, write_header
from zbpp.data.source import Data
from zbpp.data.tokens import token_data
from zbpp.models.gpt import Gpt
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.training.batches import batch_for

T = TypeVar("T")

NEEDED = 20  # the data path's tokens a second, in multiples of training's
MOST_MIB = 64.0  # for the index of all tokens
SEQUENCE_LENGTH, BATCH_SIZE, VOCAB_SIZE = 256, 32, 256
DOCUMENT = 1000  # tokens


class Index(NamedTuple):
    """The cost of opening a prepared set and reading its first batches."""

    seconds: float
    mib: float
    array_mib: float  # the memory of an array with the order of all windows, which zbpp does not make


def measure(folder: Path, num_tokens: int, num_batches: int) -> tuple[str, bool]:
    """(the table, whether both marks are met)."""
    write_sparse(folder / "sparse", num_tokens)
    text = folder / "text"
    write_sparse(text, 10**7)
    training = _alone(tokens_a_second_of_training, text)
    rows = {
        "documents not told apart": _alone(tokens_a_second, text, num_batches, True, 1),
        "documents told apart": _alone(tokens_a_second, text, num_batches, False, 1),
        "a mixture of two sets, told apart": _alone(tokens_a_second, text, num_batches, False, 2),
        f"{num_tokens:.0e} tokens": _alone(tokens_a_second, folder / "sparse", num_batches, True, 1),
    }
    index = _alone(index_of, folder / "sparse")
    slowest = min(rows.values()) / training
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread, "
        f"torch {torch.__version__}, numpy {np.__version__}",
        f"batches of {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens, {num_batches} batches each; tokens a second:",
        "",
        f"training, a GPT of 0.8 M parameters (pp 1, zb_h1)  {training:>14,.0f}",
        *(f"data path, {name:<40}{rate:>14,.0f}  x {rate / training:,.0f}" for name, rate in rows.items()),
        f"the slowest is {slowest:,.0f} times what training needs; wanted: {NEEDED}",
        "",
        f"index of {num_tokens:.0e} tokens: ready, and 50 batches all over it read, in {index.seconds:.2f} s",
        f"its memory: {index.mib:.1f} MiB; wanted: {MOST_MIB:.0f} or less "
        f"(an array of the order of its windows: {index.array_mib:.0f} MiB)",
    ]
    return "\n".join(lines), slowest >= NEEDED and index.mib <= MOST_MIB


def write_sparse(folder: Path, num_tokens: int) -> None:
    """A prepared set of zeros, which take no space on the disk, in documents of 1000 tokens."""
    folder.mkdir()
    parts = {}
    for part, length in ((TRAIN, num_tokens), (HELD_OUT, 10**5)):
        with tokens_file(folder, part).open("wb") as file:
            file.truncate(2 * length)
        ends = np.arange(DOCUMENT, length + DOCUMENT, DOCUMENT, dtype="<i8").clip(max=length)
        ends.tofile(documents_file(folder, part))
        parts[part] = PartHeader(num_tokens=length, num_documents=len(ends), checksum="")
    header = Header(
        dtype="uint16",
        vocab_size=VOCAB_SIZE,
        tokenizer="bytes",
        end_token=None,
        unigram_entropy=0.0,
        parts=parts,
    )
    write_header(folder, header)


def index_of(folder: Path) -> Index:
    """Open the set and read a batch from 50 places all over it, in several epochs."""
    data(folder).train.batch(0)  # the index does not pay for imports and caches of the first use
    before, begin = private_mib(), time.perf_counter()
    source = data(folder, across_documents=False, sequence_length=128).train
    peak = private_mib()
    for step in np.random.default_rng(0).integers(0, 10**6, 50):
        source.batch(int(step))
        peak = max(peak, private_mib())
    num_windows = source.samples.num_samples  # type: ignore[attr-defined]  # Batches
    return Index(time.perf_counter() - begin, peak - before, num_windows * 8 / 2**20)


def tokens_a_second(folder: Path, num_batches: int, across_documents: bool, num_sets: int) -> float:
    """How many tokens a second `batch_for` gives to a rank that has both ends of the pipeline."""
    source = data(folder, across_documents=across_documents, num_sets=num_sets).train
    # A stage whose forward takes position_ids: its values don't matter here.
    model = Gpt(vocab_size=1, num_layers=1, hidden_size=2, num_heads=1, sequence_length=1)
    stages = {0: model.build_stage(0, 1)}

    def read(step: int) -> None:
        batch_for(stages, 1, source, step, torch.device("cpu"))

    return BATCH_SIZE * SEQUENCE_LENGTH / seconds_each(read, num_batches)


def tokens_a_second_of_training(folder: Path) -> float:
    """How many tokens a second a small GPT trains on, optimizer included.

    The smaller the model, the faster it trains, and the more the data path has to give.
    """
    model = Gpt(
        vocab_size=VOCAB_SIZE, num_layers=4, hidden_size=128, num_heads=4, sequence_length=SEQUENCE_LENGTH
    )
    timetable, stages = plan("zb_h1", 1, 8), {0: model.build_stage(0, 1)}
    source = data(folder).train
    with Pipeline(stages, timetable, model.loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())

        def step(number: int) -> None:
            args, target = batch_for(stages, 1, source, number, torch.device("cpu"))
            pipeline.step(*args, target=target)
            optimizer.step()
            optimizer.zero_grad()

        return BATCH_SIZE * SEQUENCE_LENGTH / seconds_each(step, 6)


def data(
    folder: Path, *, across_documents: bool = True, num_sets: int = 1, sequence_length: int = SEQUENCE_LENGTH
) -> Data:
    """Batches of the set, or of a mixture of the set and itself."""
    sets = [{"path": str(folder), "weight": weight} for weight in range(1, num_sets + 1)]
    return token_data(
        mixture=sets,
        across_documents=across_documents,
        sequence_length=sequence_length,
        vocab_size=VOCAB_SIZE,
        batch_size=BATCH_SIZE,
        seed=0,
    )


def seconds_each(call: Callable[[int], None], count: int) -> float:
    """The median of `count` calls, after two that are not counted."""
    times = []
    for number in range(count + 2):
        begin = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


def private_mib() -> float:
    """This process's resident memory without the pages of mapped files."""
    words = Path("/proc/self/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _alone(function: Callable[..., T], *arguments: object) -> T:
    """Call in a process of its own, with one thread."""
    single: Any = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **single) as pool:
        return pool.submit(function, *arguments).result()
