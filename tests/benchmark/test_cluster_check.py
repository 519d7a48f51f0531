"""scripts/cluster_check.sh: what the parts find on two ranks, what failures leave, how it starts."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from helpers.processes import outcomes, run_ranks
from zbpp.benchmark import process_tree
from zbpp.benchmark.cluster import hang, launch, nodes, reference
from zbpp.benchmark.cluster.__main__ import main
from zbpp.benchmark.cluster.hang_verdict import verdict
from zbpp.benchmark.cluster.links import Link, all_pairs, judged, neighbours, shown
from zbpp.benchmark.cluster.meshes import mesh_text
from zbpp.benchmark.cluster.parts import attempt, run_part
from zbpp.benchmark.cluster.placement import tensor_degrees
from zbpp.benchmark.cluster.report import collected, report
from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, OK, SLOW, Journal, Row
from zbpp.benchmark.cluster.settings import BEGUN, PARTS, Settings
from zbpp.benchmark.interruption import Interrupted, Interruption, interruption
from zbpp.job.world import World
from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import to_csv

SCRIPT = Path(__file__).parents[2] / "scripts/cluster_check.sh"
CPU = torch.device("cpu")


def settings(out):
    return replace(Settings(out=out, device="cpu").small(), timed=("1f1b",))


# ---------------------------------------------------------------- on two ranks


def all_but_hang(rank, out):
    os.environ["LOCAL_RANK"] = str(rank)
    for part in PARTS[:-1]:
        run_part(part, settings(out), World(rank, 2, CPU))
    # A planted fault: one rank updates its weights otherwise.
    expected, timetable = reference.plain_losses(4, 4, rank), plan("zb_h1", 2, 4)
    reference.RATE *= 1 + 1e-5 * rank

    def wrong():
        return reference.pipeline_losses(4, timetable, CPU, rank=rank, timeout=60)

    return attempt("schedules", "wrong", lambda: reference.against_reference(wrong, expected))


def stopping(rank, out):
    os.environ["LOCAL_RANK"] = str(rank)
    hang.run(settings(out), World(rank, 2, CPU))


@pytest.mark.slow
def test_two_ranks_on_cpus_fill_the_table(tmp_path, capsys):
    wrong, _ = run_ranks(all_but_hang, 2, tmp_path)
    assert wrong.outcome == FAILED
    assert "differ from plain autograd's" in wrong.found
    assert [succeeded for succeeded, _ in outcomes(stopping, 2, tmp_path, timeout=30)] == [False, False]
    assert main(["--out", str(tmp_path), "--report"]) == 0
    found = json.loads((tmp_path / "cluster.json").read_text())["rows"]
    rows = {(row["part"], row["name"]): row for row in found}
    assert {row["outcome"] for row in rows.values()} == {OK}
    # Every schedule and every composition that two ranks allow has the losses of plain autograd.
    assert {name for part, name in rows if part == "schedules"} == set(SCHEDULES)
    assert {name for part, name in rows if part == "meshes"} == {
        f"pipeline 1 x {name} 2, zb_v" for name in ("replicate", "shard", "tensor")
    }
    link = rows["links", "0 <-> 1 inside a node"]["numbers"]
    assert min(link["latency_ms"], link["one_way"], link["both_ways"]) > 0
    for runtime in ("zbpp", "torch"):
        timed = rows["speed", f"1f1b (1 stages per rank), {runtime}"]["numbers"]
        assert timed["makespan_ms"] > 0
        assert timed["predicted_makespan_ms"] > 0
    assert "the first of 2 records was written after" in rows["hang", "rank 1 stops in F"]["found"]
    text = capsys.readouterr().out
    assert text == (tmp_path / "cluster.txt").read_text()
    assert text.splitlines()[-1] == f"{len(rows)} rows: none failed, 0 SLOW, 0 not run"


# ---------------------------------------------------------------- failures are rows


def test_a_step_that_raises_is_a_row_and_says_why(tmp_path):
    def fails():
        raise RuntimeError("no route\nto host")

    assert attempt("links", "a", fails) == Row("links", "a", FAILED, "rank 0: RuntimeError: no route", {})


def test_a_row_during_which_the_processes_died_and_a_part_that_never_began_are_failures(tmp_path):
    journal = Journal(tmp_path, "schedules")
    journal.begin("schedules", "zb_h1")
    journal.end(Row("schedules", "zb_h1", OK, "fine", {"difference": 0.0}))
    journal.begin("schedules", "zb_v")
    (path,) = tmp_path.glob("rows-*.jsonl")
    path.write_text(path.read_text() + '{"begun": ["sched')  # killed while it wrote
    (tmp_path / "parts").write_text("links\nschedules\n")
    text, is_fine, _ = report(tmp_path)
    rows = {(row.part, row.name): row for row in collected(tmp_path)}
    assert not is_fine
    assert rows["schedules", "zb_h1"].outcome == OK
    assert "ended while this ran: see schedules.log" in rows["schedules", "zb_v"].found
    assert rows["schedules", "(the rest)"].outcome == NOT_RUN
    assert "the job ended before its first row: see links.log" in rows["links", "(start)"].found
    assert text.splitlines()[-1].startswith("4 rows: 2 FAILED (links (start); schedules zb_v)")


def stood_still(place, written):
    """The record of rank 2, which is at `place`."""
    return {
        "process": 2, "rank": 2, "processes": [0, 1, 2], "num_processes": 3, "job": "j", "written": written,
        "why": "", "gave_up": False, "call": "step 2", "last": [["call", "step 2", 1.0], [*place, 1.0]],
        "stack": "", "timetable": to_csv(plan("zb_h1", 3, 6)),
    }  # fmt: skip


def gave_up(written):
    """The record of rank 0, which awaits rank 2."""
    found = stood_still(["at", "Recv g(0,0) from 2"], written)
    return {**found, "process": 0, "rank": 0, "gave_up": True}


@pytest.mark.parametrize(
    ("records", "outcome"),
    [
        ([gave_up(31.0), stood_still(["at", "2F0"], 31.5)], OK),
        ([gave_up(99.0), stood_still(["at", "2F0"], 99.5)], FAILED),  # much later than the timeout
        ([gave_up(31.0), stood_still(["at", "Recv x(2,0) from 1"], 31.5)], FAILED),  # rank 1 left no record
        ([], FAILED),
    ],
)
def test_the_rank_that_stopped_has_to_be_named_in_time(tmp_path, records, outcome):
    folder = tmp_path / "hang"
    folder.mkdir()
    assert verdict(tmp_path) is None
    (folder / "begin.json").write_text(json.dumps({"victim": 2, "begin": 0.0, "timeout": 30.0}))
    for each in records:
        (folder / f"flight-rank-{each['process']}.json").write_text(json.dumps(each))
    found = verdict(tmp_path)
    assert (found.name, found.outcome) == ("rank 2 stops in F", outcome), found


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 9])
def test_every_pair_of_nodes_meets_once_and_nobody_twice_in_a_round(number):
    rounds = all_pairs(number)
    assert sorted(pair for each in rounds for pair in each) == [*combinations(range(number), 2)]
    for each in [*rounds, *neighbours(number)]:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    ring = {(rank, (rank + 1) % number) for rank in range(number)}
    assert {tuple(sorted(pair)) for pair in ring} == {pair for each in neighbours(number) for pair in each}


def test_a_link_with_less_than_half_of_the_usual_bandwidth_is_slow_and_is_shown():
    links = [Link((rank, rank + 1), "between nodes", 0.01, 20.0, 38.0) for rank in range(40)]
    links[7] = links[7]._replace(one_way=9.0)
    outcome, text, _ = judged(links[7], links)
    assert outcome == SLOW
    assert "links between nodes have 20.00 GB/s: look at the cable" in text
    assert judged(links[6], links)[0] == OK
    assert shown(links)[0] == links[7]
    assert len(shown(links)) == 4


def test_tensor_degrees_that_leave_a_node_are_told():
    hosts = ["a"] * 4 + ["b"] * 4
    _, text, numbers = tensor_degrees(hosts)
    assert numbers == {"inside": [2, 4], "across": [8]}
    assert "inside a node: 2, 4; tensor=8: 1 of 1 tensor groups span nodes" in text
    assert mesh_text(8, {"tensor": 4}) == "pipeline 2 x tensor 4"
    assert tensor_degrees(["a"] * 2)[0] == OK


# ---------------------------------------------------------------- how it starts


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that runs the check; its jobs fail at once, and their commands are kept in `commands`."""
    commands = []

    def job(command, log, environment, signals):
        commands.append(" ".join(command))
        log.write_text(start.log)
        return 1

    def start(*arguments, **environment):
        return launch.main(["--out", str(tmp_path / "out"), *arguments], environment)

    start.commands, start.log, start.out = commands, "", tmp_path / "out"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node-1\necho node-2\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "run_job", job)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    return start


def table_in(out):
    rows = json.loads((out / "cluster.json").read_text())["rows"]
    return {row["part"]: (row["outcome"], row["found"]) for row in rows}


def test_parts_that_fail_do_not_keep_the_others_from_running(started):
    assert started() == 1
    assert [line.partition("--parts ")[2].split()[0] for line in started.commands] == list(PARTS)
    assert all("--standalone --nproc-per-node=gpu" in line for line in started.commands)
    assert table_in(started.out)["speed"] == (FAILED, "the job ended before its first row: see speed.log")


def test_parts_of_the_small_form_share_a_job_and_its_log(started):
    assert started("--small", "--device", "cpu") == 1
    assert len(started.commands) == 2
    assert "--nproc-per-node=2" in started.commands[0]
    assert "--parts links,schedules,meshes,speed" in started.commands[0]
    assert table_in(started.out)["speed"] == (FAILED, "the job ended before this part: see links.log")


def test_files_of_the_user_in_the_folder_stay(started):
    (started.out / "hang").mkdir(parents=True)
    (started.out / "rows-old-links.jsonl").write_text("")
    for name in ("hang/notes.txt", "mine.txt"):
        (started.out / name).write_text("mine")
    started("--parts", "links")
    left = {str(path.relative_to(started.out)) for path in started.out.rglob("*") if path.is_file()}
    assert left == {
        "hang/notes.txt",
        "mine.txt",
        "parts",
        "links.log",
        "cluster.txt",
        "cluster.json",
    }


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--nnodes", "2", "--head", "node-1"), {}),
        ((), {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[1-2]"}),
        ((), {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "node-1:29400"}),
    ],
)
def test_several_nodes_meet_at_the_head_on_a_port_for_each_part(started, capsys, arguments, environment):
    started(*arguments, "--parts", "links,hang", "--steps", "3", **environment)
    assert len(started.commands) == 2
    for number, line in enumerate(started.commands):
        assert f"--nnodes=2 --rdzv-endpoint=node-1:{29600 + number} " in line
        wait = 300 + 180 * number  # the nodes of a failed job end up to --timeout apart
        assert f"--rdzv-conf=join_timeout={wait},read_timeout={wait} --nproc-per-node=gpu" in line
        assert "--steps 3" in line
    assert "waits for 2 nodes at node-1:29601, up to 480 s" in capsys.readouterr().err


def test_nodes_that_do_not_come_end_the_check_with_what_to_look_at(started, capsys):
    """Not one wait for each part."""
    started.log = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
    assert started("--nnodes", "2", "--head", "node-1", "--join-timeout", "7") == 1
    assert len(started.commands) == 1
    said = capsys.readouterr().err
    assert "2 nodes at node-1:29600 did not meet within 7 s: check on each node: does this script run" in said
    rows = table_in(started.out)
    assert rows.pop("links") == (FAILED, "2 nodes at node-1:29600 did not meet within 7 s")
    assert set(rows.values()) == {(NOT_RUN, "the nodes did not meet")}
    assert len(rows) == len(PARTS) - 1


def test_a_node_that_loses_the_head_at_the_end_of_a_job_has_met_it(started, monkeypatch):
    """Its torchrun says the same as one that never found the head: the head's store is gone."""
    job = launch.run_job

    def ranks_begin(command, log, *more):
        (log.parent / BEGUN).touch()
        return job(command, log, *more)

    monkeypatch.setattr(launch, "run_job", ranks_begin)
    started.log = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError\n"
    assert started("--nnodes", "2", "--head", "node-1", "--parts", "links,hang") == 1
    assert len(started.commands) == 2


def test_a_head_whose_name_is_unknown_is_told(started, capsys, monkeypatch):
    unknown = OSError("Name or service not known")
    answers = [unknown, unknown, [], unknown, unknown]

    def look_up(*_):
        answer = answers.pop(0)
        if answer:
            raise answer
        return answer

    clock = itertools.count()
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(nodes.time, "monotonic", lambda: next(clock))
    several = ("--nnodes", "2", "--head", "node-1", "--parts", "links")
    assert started(*several) == 1  # known at last
    assert len(started.commands) == 1
    assert "the name node-1 is unknown here; asks again for up to 300 s" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        started(*several, "--join-timeout", "1")
    assert (ended.value.code, len(started.commands)) == (2, 1)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "after 1 s: write a name or an address that each node knows" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nnodes", "2"), "needs --head"),
        (("--nnodes", "x"), "write a number"),
        (("--nproc", "zero"), "--nproc zero: write a number of processes, 1 or more, or gpu"),
        (("--nproc", "0"), "--nproc 0: write a number of processes, 1 or more"),
        (("--port", "70000"), "--port 70000: write a port, 1 to 65531"),
        (("--port", "http"), "--port http: write a port"),
        (("--join-timeout", "nan"), "--join-timeout nan: write seconds"),
        (("--parts", "lniks"), "'lniks' is no part: write some of links,"),
        (("--out",), "--out: expected one argument"),
    ],
)
def test_a_check_that_can_not_start_is_refused_in_one_line(started, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        started(*arguments)
    assert (ended.value.code, started.commands) == (2, [])
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
    assert not started.out.exists()


def test_a_machine_without_gpus_is_told_before_any_job(started, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        started()
    assert "sees no GPU here; --device cpu --small tries" in capsys.readouterr().err


def test_a_folder_that_can_not_be_made_is_told(started, capsys, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SystemExit) as ended:
        started()
    assert (ended.value.code, started.commands) == (2, [])
    assert "no file can be written there: [Errno 17] File exists" in capsys.readouterr().err


# ---------------------------------------------------------------- how it ends

# The job that is told to end: torchrun, and a rank in a session of its own that heeds no SIGTERM.
STUBBORN = """
setsid bash -c 'trap "" TERM; echo $$ > rank; sleep 100' &
until [[ -s rank ]]; do sleep 0.01; done
kill -{signal} $PPID
wait
"""


@pytest.mark.parametrize(("name", "status"), [("TERM", 143), ("INT", 130)])
def test_a_signal_ends_the_ranks_and_the_table_has_what_was_measured(
    tmp_path, monkeypatch, capsys, name, status
):
    journal = Journal(tmp_path / "measured", "links")
    journal.end(Row("links", "a", OK, "fine", {}))
    journal.begin("links", "b")
    (rows,) = (tmp_path / "measured").iterdir()
    command = f"cp {rows} {tmp_path}/out; touch {tmp_path}/out/first-node; cd {tmp_path}"
    command += STUBBORN.format(signal=name)
    monkeypatch.setattr(launch, "_command", lambda *_: ["bash", "-c", command])
    monkeypatch.setattr(process_tree, "_PATIENCE", 0.2)
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["--out", str(tmp_path / "out"), "--parts", "links,hang", "--device", "cpu"]
    assert launch.main(arguments, os.environ) == status
    assert signal.getsignal(signal.SIGTERM) == before
    rank = int((tmp_path / "rank").read_text())
    assert process_tree.tree_of([rank]) == {}
    found = {(row.part, row.name): row for row in collected(tmp_path / "out", interrupted=f"SIG{name}")}
    assert found["links", "a"].outcome == OK
    assert found["links", "b"][2:4] == (NOT_RUN, f"ended by SIG{name} while this ran")
    assert found["hang", "(start)"][2:4] == (NOT_RUN, f"ended by SIG{name} before this part")
    said = capsys.readouterr()
    assert said.out == (tmp_path / "out/cluster.txt").read_text()
    assert "none failed, 0 SLOW, 3 not run" in said.out
    assert f"ended by SIG{name}: what was measured until then follows" in said.err


def test_a_signal_that_comes_while_a_job_starts_ends_the_job(tmp_path, monkeypatch):
    signals, started, popen = Interruption(), [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        signals.take(signal.SIGTERM, None)
        return started[0]

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    with pytest.raises(Interrupted):
        launch.run_job(["sleep", "100"], tmp_path / "log", os.environ, signals)
    assert started[0].returncode == -signal.SIGTERM


def test_files_that_a_full_disk_has_cut_off_are_a_failure_in_the_table(tmp_path):
    (tmp_path / "hang").mkdir()
    begin, said = tmp_path / "hang/begin.json", tmp_path / "hang/said-0.json"
    begin.write_text("")
    assert verdict(tmp_path)[2:4] == (FAILED, "begin.json is cut off: is the disk full?")
    begin.write_text(json.dumps({"victim": 1, "begin": 0.0, "timeout": 4.0}))
    said.write_text('{"rank": 0, "af')
    assert verdict(tmp_path)[2:4] == (FAILED, "nothing names it; no rank left a word: see hang.log")


def test_an_end_before_the_stopped_rank_was_named_is_no_failure(tmp_path):
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang/begin.json").write_text(json.dumps({"victim": 1, "begin": 0.0, "timeout": 4.0}))
    assert verdict(tmp_path).outcome == FAILED
    assert verdict(tmp_path, interrupted="SIGTERM").outcome == NOT_RUN


def test_torchrun_finds_no_second_opinion_in_its_environment(tmp_path):
    with interruption() as signals:
        given = {**os.environ, "PET_NNODES": "4:4"}
        code = ["bash", "-c", "echo ${PET_NNODES:-none} $PYTHONUNBUFFERED; exit 3"]
        assert launch.run_job(code, tmp_path / "log", given, signals) == 3
    assert (tmp_path / "log").read_text() == "none 1\n"


def test_a_table_that_can_not_be_written_is_printed(tmp_path):
    (tmp_path / "parts").write_text("links\n")
    (tmp_path / "cluster.json").mkdir()
    text, _, problem = report(tmp_path)
    assert "the job ended before its first row" in text
    assert "could not be written: [Errno 21] Is a directory" in problem


# ---------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "links,lniks"], "'lniks' is no part: write some of links,"),
        (["--timed", "zbh1"], "'zbh1' is no schedule"),
        (["--steps", "0"], "write a number above 0"),
    ],
)
def test_wrong_arguments_are_told_with_what_to_write(tmp_path, arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_python_without_torch_is_told_in_one_line(tmp_path):
    """-S and -E leave out the installed packages, and zbpp."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    for name, words in (("python", "has no torch and no zbpp: activate"), ("nowhere", "is no program")):
        environment = {**os.environ, "PYTHON": str(tmp_path / name)}
        done = subprocess.run(
            ["bash", str(SCRIPT)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_help_names_the_script_and_the_parts():
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--nnodes 4 --head node-1" in done.stdout
    code = [sys.executable, "-m", "zbpp.benchmark.cluster", "--help"]
    assert "links,schedules,meshes,speed,hang" in subprocess.run(code, capture_output=True, text=True).stdout
