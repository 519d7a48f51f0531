"""Makes prepared tokens from text, by several processes. The next call continues what was cut short.

    sources --units_of--> units --a process each--> 00000.train.bin, ... --joined--> train.bin, header

All files are made in OUTPUT.partial, which gets its final name when it is whole. The result depends on the
sources and on the settings, not on the number of processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zbpp.data.documents import Reading, Unit, documents_of, units_of
from zbpp.data.encoding import Encoder, make_encoder
from zbpp.data.prepared import (
    HELD_OUT,
    PARTS,
    TOKENIZER,
    TRAIN,
    Header,
    PartHeader,
    checksum_of,
    documents_file,
    partial_folder,
    tokens_file,
    write_header,
)
from zbpp.seeding import seed_of

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
_PLAN, _LOCK = "plan.json", "lock"


class Task(NamedTuple):
    """What all units of one preparation have in common."""

    folder: str
    reading: Reading
    encoder: Encoder
    held_out: float


def prepare(
    sources: Sequence[Path],
    output: Path,
    *,
    reading: Reading | None = None,
    tokenizer: Path | None = None,
    end_token: str | None = None,
    held_out: float = 0.05,
    processes: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Header:
    """Make the prepared set `output` from text files, jsonl files, folders of them, Hugging Face datasets.

    tokenizer: a tokenizer.json; None: a token is a byte. end_token: the token after each document. held_out:
    the share of documents for evaluation, drawn by a hash of their places. Raises FileNotFoundError or
    ValueError; `output` is not touched then, and the next call keeps the units that are finished.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"--held-out {held_out} is a share of the documents: write 0.0 to 0.99")
    if processes < 1:
        raise ValueError(f"--processes {processes}: write 1 or more")
    if output.exists() and not overwrite:
        raise ValueError(f"{str(output)!r} exists: name another folder, or write --overwrite")
    reading = reading or Reading()
    encoder, units = make_encoder(tokenizer, end_token), units_of(sources, reading)
    work = partial_folder(output)
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work):
        task = Task(str(work), reading, encoder, held_out)
        _agree_with_plan(work, task, units, overwrite=overwrite)
        _encode(task, units, processes, progress or (lambda done, total: None))
        header = _joined(task, len(units))
        _publish(work, output)
    return header


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    with (work / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{str(work)!r} is being written by another process: wait for its end") from None
        yield


def _agree_with_plan(work: Path, task: Task, units: Sequence[Unit], *, overwrite: bool) -> None:
    """Write plan.json, or compare it with the one that an earlier call has left.

    If they differ, the earlier call's units are removed with `overwrite`; else ValueError is raised if a unit
    was finished.
    """
    times = [
        (name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for unit in units for name in unit.files
    ]
    plan = {
        "sources": blake2b(repr((times, units)).encode(), digest_size=8).hexdigest(),
        **asdict(task.reading),
        "tokenizer": task.encoder.fingerprint,
        "end_token": task.encoder.end_token,
        "held_out": task.held_out,
    }
    file = work / _PLAN
    if file.exists():
        begun = json.loads(file.read_text())
        changed = ", ".join(name for name in plan if begun.get(name) != plan[name])
        is_lost = changed and any(work.glob("[0-9]*.json"))
        if is_lost and not overwrite:
            raise ValueError(
                f"{str(work)!r} was begun with other settings ({changed} changed): give the same again, or "
                "say that they may be overwritten (overwrite)"
            )
        if changed:
            _remove_parts(work)
    _write_whole(file, json.dumps(plan, indent=2))


# ---------------------------------------------------------------- units


def _encode(task: Task, units: Sequence[Unit], processes: int, progress: Progress) -> None:
    """Encode the units that are not done yet."""
    total = sum(unit.size for unit in units)
    missing = [number for number in range(len(units)) if not _done_file(task, number).exists()]
    done = total - sum(units[number].size for number in missing)
    progress(done, total)
    for number in _in_processes(task, units, missing, min(processes, len(missing))):
        done += units[number].size
        progress(done, total)


def _in_processes(task: Task, units: Sequence[Unit], numbers: Sequence[int], processes: int) -> Iterator[int]:
    """Encode the units with these numbers; yields each number when its unit is done."""
    if processes <= 1:
        for number in numbers:
            yield encode_unit(task, number, units[number])
        return
    # spawn: a fork of a process with threads may hang, and the caller may have some.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        begun: list[Future[int]] = [pool.submit(encode_unit, task, each, units[each]) for each in numbers]
        try:
            for future in as_completed(begun):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def encode_unit(task: Task, number: int, unit: Unit) -> int:
    """Write a unit's tokens, the count of each token, and the documents' lengths; returns `number`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    folder = Path(task.folder)
    counts = np.zeros(task.encoder.vocab_size, dtype=np.int64)
    lengths: dict[str, list[int]] = {part: [] for part in PARTS}
    # Temporary names with the process's number: a process whose parent was killed may still be writing.
    names = {part: folder / f"{number:05}.{part}.{os.getpid()}.tmp" for part in PARTS}
    files = {part: name.open("wb") for part, name in names.items()}
    try:
        for place, tokens in enumerate(task.encoder.encode(documents_of(unit, task.reading))):
            part = HELD_OUT if is_held_out(number, place, task.held_out) else TRAIN
            files[part].write(tokens.astype(task.encoder.dtype.newbyteorder("<"), copy=False).data)
            lengths[part].append(len(tokens))
            counts += np.bincount(tokens, minlength=len(counts))
    finally:
        for file in files.values():
            file.close()
    for part, name in names.items():
        name.replace(tokens_file(folder, f"{number:05}.{part}"))
    np.save(folder / f"{number:05}.counts.npy", counts)
    _write_whole(_done_file(task, number), json.dumps(lengths))
    return number


def is_held_out(unit: int, document: int, share: float) -> bool:
    """Whether a document is for evaluation. A hash decides, so they come from the whole text."""
    return seed_of("held out", unit, document) < share * 2**63


def _done_file(task: Task, number: int) -> Path:
    """The file with the lengths of a unit's documents. It is written last: the unit is done if it exists."""
    return Path(task.folder) / f"{number:05}.json"


# ---------------------------------------------------------------- the whole


def _joined(task: Task, num_units: int) -> Header:
    """Join the units' files, and write the header."""
    folder = Path(task.folder)
    parts = {part: _joined_part(task, part, num_units) for part in PARTS}
    counts = sum(
        (np.load(folder / f"{number:05}.counts.npy") for number in range(num_units)), np.zeros(1, int)
    )
    total = int(counts.sum())
    if not total:
        raise ValueError("the sources hold no text")
    for part, found in parts.items():
        if not found.num_documents and (part == TRAIN or task.held_out):
            documents = sum(each.num_documents for each in parts.values())
            raise ValueError(
                f"--held-out {task.held_out} of {documents} documents leaves none for {part}: hold out "
                "another share (0: none), or cut the files into documents by a separator"
            )
    frequencies = counts[counts > 0] / total
    if task.encoder.tokenizer is not None:
        shutil.copyfile(task.encoder.tokenizer, folder / TOKENIZER)
    header = Header(
        dtype=task.encoder.dtype.name,
        vocab_size=task.encoder.vocab_size,
        tokenizer=task.encoder.fingerprint,
        end_token=task.encoder.end_token,
        unigram_entropy=float(-(frequencies * np.log(frequencies)).sum()),
        parts=parts,
    )
    write_header(folder, header)
    return header


def _joined_part(task: Task, part: str, num_units: int) -> PartHeader:
    folder = Path(task.folder)
    lengths: list[Any] = [
        json.loads(_done_file(task, number).read_text())[part] for number in range(num_units)
    ]
    ends = np.cumsum(np.fromiter((each for some in lengths for each in some), dtype=np.int64))
    ends.astype("<i8").tofile(documents_file(folder, part))
    with tokens_file(folder, part).open("wb") as whole:
        for number in range(num_units):
            with tokens_file(folder, f"{number:05}.{part}").open("rb") as piece:
                shutil.copyfileobj(piece, whole, 2**24)
        whole.flush()
        os.fsync(whole.fileno())
    return PartHeader(
        num_tokens=int(ends[-1]) if len(ends) else 0,
        num_documents=len(ends),
        checksum=checksum_of(tokens_file(folder, part)),
    )


def _publish(work: Path, output: Path) -> None:
    """Remove the files of units, the plan and the lock, and give the finished folder its name."""
    _remove_parts(work)
    for name in (_PLAN, _LOCK):
        (work / name).unlink()
    if output.exists():
        shutil.rmtree(output)
    work.rename(output)


def _remove_parts(work: Path) -> None:
    for file in (*work.glob("[0-9]*"), *work.glob("*.tmp")):
        file.unlink(missing_ok=True)


def _write_whole(file: Path, text: str) -> None:
    """Write a file that is there as a whole, or not at all."""
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(file)
