"""What a job says that can't begin: a rank never comes, versions differ, a port is taken, nonsense."""

import socket
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from torch.distributed import HashStore

from zbpp.runtime import joining
from zbpp.runtime.joining import Rendezvous, StartError, join, versions

TIMEOUT = 0.5  # s


def outcomes(facts, size):
    """By rank: what `join` returns, or says. facts: of the ranks that come, threads with one store."""
    store = HashStore()

    def of(rank):
        try:
            limit = TIMEOUT if len(facts) < size else 60
            return join(store, Rendezvous(rank, size, "here", 1), facts[rank], limit)
        except StartError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(facts)) as pool:
        return dict(zip(facts, pool.map(of, facts), strict=True))


def test_ranks_that_come_agree_on_a_name_that_no_other_start_has():
    first, second = (outcomes(dict.fromkeys(range(3), versions()), 3) for _ in range(2))
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ((0, 1, 3), "rank 2 of 4 never came within 0.5 s (parallel.timeout): look whether its process runs"),
        ((0, 3), "ranks 1, 2 of 4 never came within 0.5 s (parallel.timeout): look whether their processes"),
        ((1, 2, 3), "rank 0 of 4 never came within 0.5 s"),
    ],
)
def test_a_rank_that_never_comes_is_named_on_all_that_came(here, words):
    said = outcomes(dict.fromkeys(here, versions()), 4)
    assert [each.startswith(f"error: {words}") for each in said.values()] == [True] * len(here), said


def test_other_versions_are_a_line_on_every_rank():
    other = {**versions(), "torch": "1.0", "device": "cuda"}
    mine = {**versions(), "device": "cpu"}
    for said in outcomes({0: mine, 1: other, 2: mine}, 3).values():
        assert "the ranks of this job have different programs:" in said
        assert "  device: 'cpu' on rank 0, 2; 'cuda' on rank 1" in said
        assert f"  torch: '{mine['torch']}' on rank 0, 2; '1.0' on rank 1" in said
        assert "Python" not in said
        assert said.endswith("start all ranks in the same environment")


GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "x", "RANK=x: a rank needs a whole number"),
        ("RANK", "2", "RANK=2 with WORLD_SIZE=2: a rank needs RANK from 0 to 1"),
        ("WORLD_SIZE", None, "RANK is set, and WORLD_SIZE is not"),
        ("MASTER_ADDR", None, "RANK is set, and MASTER_ADDR is not"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000: a rank needs a port from 1 to 65535"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1: a rank needs a whole number"),
    ],
)
def test_an_environment_that_makes_no_sense_is_told_with_what_sets_it(monkeypatch, name, value, words):
    for each, text in {**GOOD, name: value}.items():
        monkeypatch.delenv(each, raising=False) if text is None else monkeypatch.setenv(each, text)
    with pytest.raises(StartError) as caught:
        Rendezvous.from_environment()
    assert str(caught.value).startswith(words)
    assert "unset RANK" in str(caught.value)


def test_a_port_that_another_process_holds_is_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"MASTER_PORT={port} is in use on this machine.*choose another"):
            Rendezvous(0, 2, "127.0.0.1", port).store(TIMEOUT)


def test_a_listener_that_never_answers_is_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(joining, "_ANSWER", TIMEOUT)
    monkeypatch.setattr(joining.atexit, "register", lambda _: None)  # it would end this process
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(StartError, match=f"what listens at 127.0.0.1:{port} does not answer as a job's"):
            Rendezvous(1, 2, "127.0.0.1", port).store(TIMEOUT)


def test_nobody_at_the_address_is_told_with_the_address(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, and nobody listens
        begin = monotonic()
        with pytest.raises(StartError, match=rf"rank 1 of 2 reached nobody at 127.0.0.1:{port} within 0.5 s"):
            Rendezvous(1, 2, "127.0.0.1", port).store(TIMEOUT)
        assert monotonic() - begin >= TIMEOUT  # rank 0 may come a little later
