"""Every parser of files that somebody else may have written, and bytes to feed it with.

A parser may raise the errors of its docstring and nothing else: no other error, no hang, no endless memory.
"""

import contextlib
import io
import json
import pickle
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from zbpp.checkpoints import CheckpointError
from zbpp.checkpoints.folders import manifest_of
from zbpp.checkpoints.reading import read_metadata
from zbpp.commands import compare, hang
from zbpp.data.prepared import HEADER, open_prepared
from zbpp.planning import read_costs, read_memory_limit
from zbpp.schedule import Costs, PlanError, read_timetable

LONGEST = 10.0  # s for one file of a few kilobytes, on a busy machine
MOST_MEMORY = 2**32  # bytes above what the process has


class Parser(NamedTuple):
    """name: of the file. samples: valid contents. read: reads the file. errors: those that may escape."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...]


def _metadata() -> bytes:
    data = {"a": BytesStorageMetadata()}
    return pickle.dumps(Metadata(data, {"a": ("a",)}, {MetadataIndex("a"): None}))


_RECORD = {
    "process": 0, "rank": 0, "processes": [0, 1], "num_processes": 2, "job": "j", "written": 9.0, "why": "",
    "gave_up": True, "call": "step 1", "last": [["call", "step 1", 7.0], ["at", "Recv g(0,0) from 1", 8.0]],
    "stack": "x", "timetable": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
}  # fmt: skip
_SUMMARY = {
    "schedule": "ZB-H1", "loss": 1.0, "rows_per_second": 3.0, "predicted_bubble_rate": 0.1, "num_ranks": 1,
    "measured_bubble_rate": 0.1, "device": "2 CPU cores",
}  # fmt: skip


def _compare(path: Path) -> object:
    path.with_name("metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    return compare.main([str(path.parent)] * 2)


def _limit(path: Path) -> object:
    return read_memory_limit(path.read_text(errors="replace"), Costs(memory_unit="bytes"))


PARSERS = {
    "plan": Parser(
        "plan.txt", (b"0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1", b"0F0 0B0 0W0"), read_timetable, (PlanError,)
    ),
    "plan as CSV": Parser(
        "plan.csv", (b"0F0,0F1,,0I0,0W0,0I1,0W1\n", b"(0F0;0B0)OVERLAP_F_B,0SEND_F0"), read_timetable,
        (PlanError,),
    ),
    "costs": Parser(
        "costs.json",
        (b'{"f": 1, "b": [1, 2.5], "memory_unit": "bytes", "about": {"layers_per_stage": [1, 1]}}',),
        read_costs, (PlanError,),
    ),
    "memory limit": Parser("limit", (b"12GiB", b"1.5e3 MB"), _limit, (PlanError,)),
    "manifest": Parser(
        "manifest.json",
        (
            b'{"format": 1, "files": {".metadata": 1, "state.json": 2}}',
        ),
        lambda path: manifest_of(path.parent), (ValueError,),
    ),
    "checkpoint metadata": Parser(
        ".metadata", (_metadata(),), read_metadata, (Exception,)  # Checkpoint turns all into CheckpointError
    ),
    "records of a failure": Parser(
        "flight-rank-0.json", (json.dumps(_RECORD).encode(),), lambda path: hang.main([str(path.parent)]),
        (SystemExit,),
    ),
    "summary": Parser("summary.json", (json.dumps(_SUMMARY).encode(),), _compare, (SystemExit,)),
    "prepared tokens": Parser(
        HEADER, (b'{"format": 1, "dtype": "uint16", "parts": {"train": {}}}',),
        lambda path: open_prepared(path.parent), (ValueError, OSError),
    ),
}  # fmt: skip

_PIECES = [
    b"", b"[" * 3000, b"{" * 3000, b'{"a":' * 1500, b"1e999", b"-1", b"NaN", b"Infinity", b"1" * 5000,
    b"null",
    b"[]", b"{}", b'""', b"10000000000000000000", b"2147483647", b"\x00", b"\xff\xfe", b"\xed\xa0\x80",
    b"\n",
    b"\r", b" ", b"- " * 500, b"&a", b"*a", b"? ", b": ", b"!!python/object/apply:os.system [x]", b"../../x",
    b"${a}", b"\x1b[2J", b"1e12", b"\x8c\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b"0", b"2", b"2" * 40,
    b"\x85", b"\x94", b"s", b"u", b"R", b"}",
]  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content after a few pieces of it were dropped, doubled, moved, replaced or flipped."""
    for _ in range(rng.randint(0, 5)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice((0, 1, 1, 2, 5, 40)))
        kept = content[start:end]
        flipped = bytes(each ^ (1 << rng.randrange(8)) for each in kept)
        new = rng.choice([kept + kept, kept * 50, flipped, rng.choice(_PIECES), rng.choice(_PIECES)])
        content = content[:start] + new + content[end:]
    return content


def complaint(parser: Parser, content: bytes, folder: Path) -> str:
    """What is wrong with a parser for this content; "" if it reads it, or refuses it in order."""
    path = folder / parser.name
    path.write_bytes(content)
    quiet = io.StringIO()
    try:
        with bounded(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            parser.read(path)
    except (MemoryError, TimeoutError) as error:
        return type(error).__name__
    except parser.errors as error:
        text = quiet.getvalue() if isinstance(error, SystemExit) else str(error)
        return f"an error of {len(text)} characters" if len(text) > 3000 else ""
    except BaseException as error:  # anything else is the finding
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


@contextmanager
def bounded() -> Iterator[None]:
    """Inside, more than LONGEST seconds raise TimeoutError and more than MOST_MEMORY bytes MemoryError."""

    def stop(*_: object) -> None:
        raise TimeoutError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


__all__ = ["PARSERS", "CheckpointError", "Parser", "complaint", "mutated"]
