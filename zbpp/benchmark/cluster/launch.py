"""What scripts/cluster_check.sh runs on each node: python -m zbpp.benchmark.cluster.launch ...

Each group of parts is a job of its own under torchrun. A signal ends the job, and the table shows what was
measured until then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zbpp.benchmark.cluster.__main__ import make_parser
from zbpp.benchmark.cluster.nodes import Nodes, OneLineParser, await_name, parse_nodes, refuse
from zbpp.benchmark.cluster.report import report
from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, Row
from zbpp.benchmark.cluster.settings import BEGUN, FIRST_NODE, PARTS, WANTED, Settings
from zbpp.benchmark.interruption import Interrupted, Interruption, interruption
from zbpp.benchmark.process_tree import end_tree

_MODULE = "zbpp.benchmark.cluster"
# Only files that a check writes: the folder may be the user's own.
_WRITTEN = (
    "rows-*.jsonl",
    "hang/begin.json",
    "hang/said-*.json",
    "hang/flight-rank-*.json",
    FIRST_NODE,
    BEGUN,
)


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The exit status: 0, 1 if a row FAILED, 2 if the check could not start, 128 + N after signal N."""
    with interruption() as signals:
        try:
            return _check(sys.argv[1:] if arguments is None else arguments, environment, signals)
        except Interrupted as signal:
            say(f"ended by {signal}")
        except OSError as error:
            refuse(str(error))
    return signals.exit_status


def _check(arguments: Sequence[str], environment: Mapping[str, str], signals: Interruption) -> int:
    nodes, rest = parse_nodes(arguments, environment)
    options = make_parser(OneLineParser(prog="cluster_check"), out="cluster_check").parse_args(rest)
    nodes = replace(nodes, processes=_processes(nodes, options.device), rank_timeout=_rank_timeout(options))
    groups: list[tuple[str, ...]] = [(part,) for part in options.parts]
    if options.small and options.parts == PARTS:  # one job starts faster than four
        groups = [PARTS[:-1], PARTS[-1:]]
    try:
        _begin(options.out, groups)
    except OSError as error:
        refuse(f"--out {options.out}: no file can be written there: {error}")
    await_name(nodes, say)
    early: dict[str, Row] = {}
    try:
        early = _run(groups, nodes, [*rest, "--out", str(options.out)], options.out, environment, signals)
    except Interrupted as signal:
        say(f"ended by {signal}: what was measured until then follows")
    return _report(options.out, early, environment, signals)


def _run(
    groups: Sequence[tuple[str, ...]],
    nodes: Nodes,
    rest: Sequence[str],
    out: Path,
    environment: Mapping[str, str],
    signals: Interruption,
) -> dict[str, Row]:
    """Run each group in a job; returns rows of the parts that did not run since the nodes did not meet."""
    for job, group in enumerate(groups):
        command = _command(nodes, job, environment, [*rest, "--parts", ",".join(group)])
        log = out / f"{group[0]}.log"
        waits = f", waits for {nodes.place(job)}, up to {nodes.patience(job):.0f} s"
        say(f"{','.join(group)} (log: {log}){waits if nodes.number > 1 else ''} ...")
        (out / BEGUN).unlink(missing_ok=True)
        status = run_job(command, log, environment, signals)
        if status and nodes.did_not_meet(log, out / BEGUN):
            return _unmet(nodes, job, groups)
    return {}


def _rank_timeout(options: Namespace) -> float:
    """How long a rank waits for another, in seconds."""
    settings = Settings(out=options.out)
    return float(options.timeout or (settings.small() if options.small else settings).timeout)


def _processes(nodes: Nodes, device: str | None) -> str:
    """torchrun's number of processes per node. Ends the program if torch does not load, or has no GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        refuse(
            f"{sys.executable} can't import torch ({error}): activate the environment of zbpp, or set PYTHON"
        )
    processes = nodes.processes or ("2" if device == "cpu" else "gpu")
    if (processes == "gpu" or device == "cuda") and not torch.cuda.is_available():
        refuse(f"torch {torch.__version__} sees no GPU here; --device cpu --small tries the check on CPUs")
    return processes


def _begin(out: Path, groups: Sequence[Sequence[str]]) -> None:
    """Make the folder, without the rows of an earlier check; write there which parts share a job."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _WRITTEN:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
    (out / WANTED).write_text("".join(f"{' '.join(group)}\n" for group in groups))


def _command(nodes: Nodes, job: int, environment: Mapping[str, str], rest: Sequence[str]) -> list[str]:
    name = f"cluster-check-{environment.get('SLURM_JOB_ID', '0')}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes.torchrun(job, name)]
    return [*torchrun, "-m", _MODULE, *rest]


def run_job(command: Sequence[str], log: Path, environment: Mapping[str, str], signals: Interruption) -> int:
    """Run a job to its end, or until a signal comes; returns its exit status. Raises Interrupted."""
    # torchrun would take PET_... variables as further arguments.
    own = {name: value for name, value in environment.items() if not name.startswith("PET_")}
    own = {"OMP_NUM_THREADS": "1", **own, "PYTHONUNBUFFERED": "1"}
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output, signals.held():
            process = subprocess.Popen(
                command,
                env=own,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for this process alone
            )
        return process.wait()
    finally:
        if process is not None and process.returncode is None:
            say("ends the processes of this job ...")
            end_tree(process)


def _unmet(nodes: Nodes, job: int, groups: Sequence[Sequence[str]]) -> dict[str, Row]:
    """The rows if not all nodes came; says what to check."""
    text = f"{nodes.place(job)} did not meet within {nodes.patience(job):.0f} s"
    say(f"{text}: {nodes.advice(job)}")
    first, *following = [part for group in groups[job:] for part in group]
    rows = {part: Row(part, "(start)", NOT_RUN, "the nodes did not meet", {}) for part in following}
    return {first: Row(first, "(start)", FAILED, text, {}), **rows}


def _report(
    out: Path, early: Mapping[str, Row], environment: Mapping[str, str], signals: Interruption
) -> int:
    """Print the table and write the files; returns the exit status."""
    # The node of rank 0 prints the table: the others have only a part of it, unless all see one folder.
    is_first = (out / FIRST_NODE).exists() and environment.get("SLURM_NODEID", "0") == "0"
    if not is_first and next(out.glob("rows-*.jsonl"), None) is not None:
        say("the table is on the node of rank 0")
        return signals.exit_status or int(bool(early))
    text, is_fine, problem = report(out, early, str(signals))
    print(text, flush=True)
    say(problem or ("" if signals.signal else "please send ") + f"{out}/cluster.txt and {out}/cluster.json")
    return signals.exit_status or int(not is_fine or bool(problem))


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"cluster_check: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
