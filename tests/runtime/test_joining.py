"""What a job says that can't begin: a rank never comes, versions differ, nobody is there."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from zbpp.job.joining import StartError, job_store, join, versions

TIMEOUT = 0.5  # s


def outcomes(facts, size):
    """By rank: what `join` returns, or says. facts: of the ranks that come, threads with one store."""
    store = HashStore()

    def of(rank):
        try:
            limit = TIMEOUT if len(facts) < size else 60
            return join(store, rank, size, facts[rank], limit)
        except StartError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(facts)) as pool:
        return dict(zip(facts, pool.map(of, facts), strict=True))


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


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_environment_that_lacks_something_is_told_with_what_sets_it(monkeypatch, name):
    for each, text in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(each, text)
    monkeypatch.delenv(name)
    with pytest.raises(StartError, match=f"{name} expected, but not set.* torchrun and .* unset RANK"):
        job_store(TIMEOUT)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_job_that_is_not_there_is_told_with_its_address(monkeypatch, rank):
    """Rank 0 waits for rank 1, which never comes; rank 1 finds nobody at the port."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, text in {
        "RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(StartError, match=f"no job at 127.0.0.1:{port}: .*[Tt]imed out.*--standalone"):
        job_store(2.0)
