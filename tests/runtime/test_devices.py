"""A job's GPUs through a fake device layer: two ranks on one GPU, GPUs of several kinds."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from zbpp.runtime import DeviceError, StartError, world
from zbpp.runtime.devices import Gpu, note_of_kinds, shared_gpu, told_by_all
from zbpp.runtime.joining import Rendezvous

BIG, SMALL = 80 * 2**30, 40 * 2**30


def gpu(number, name="NVIDIA H100", host="node-a", memory=BIG):
    return Gpu(host, name, f"GPU-{number}", memory)


def outcomes(gpus, monkeypatch, capsys):
    """What each rank says of these GPUs, in threads with one store; and what was printed."""
    store = HashStore()
    monkeypatch.setattr(world, "gpu_of", lambda device: gpus[device.index])

    def of(rank):
        try:
            here = Rendezvous(rank, len(gpus), "here", 1)
            return world._check_gpus(store, here, torch.device("cuda", rank), 30.0)
        except DeviceError as error:
            return str(error)

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(of, range(len(gpus)))), capsys.readouterr().err


def test_two_ranks_on_one_gpu_are_an_error_by_name_on_every_rank(monkeypatch, capsys):
    said, _ = outcomes([gpu(0), gpu(1), gpu(0)], monkeypatch, capsys)
    assert len(set(said)) == 1
    assert said[0].startswith("ranks 0, 2 have one GPU, NVIDIA H100 (GPU-0) of node-a: NCCL takes one rank")
    assert "--nproc-per-node=gpu" in said[0]
    assert "device=cpu" in said[0]


def test_gpus_of_several_kinds_are_one_line_of_rank_0(monkeypatch, capsys):
    gpus = [*map(gpu, range(3)), gpu(3, "NVIDIA A100", "node-b", SMALL), gpu(4)]
    said, printed = outcomes(gpus, monkeypatch, capsys)
    assert said == [None] * 5
    (line,) = printed.splitlines()
    assert "NVIDIA H100 (80 GiB) on ranks 0-2, 4; NVIDIA A100 (40 GiB) on rank 3" in line
    assert "assume ranks of one speed and one memory" in line


def test_gpus_of_one_kind_need_no_line():
    """Two hosts may number their GPUs alike: identities differ."""
    gpus = [gpu(0), gpu(1), gpu(2, host="node-b")]
    assert (shared_gpu(gpus), note_of_kinds(gpus)) == ("", "")


def test_a_rank_that_does_not_tell_its_gpu_is_named():
    with pytest.raises(StartError, match="rank 1 did not say which GPU"):
        told_by_all(HashStore(), 0, 2, gpu(0), 0.2)


class Gone(HashStore):
    """A store whose process ends while this one waits."""

    def wait(self, *_):
        raise DistNetworkError("connection reset")

    check = wait


def test_a_store_that_is_gone_is_an_error_of_the_start():
    with pytest.raises(StartError, match="rank 0 did not say which GPU it has: connection reset"):
        told_by_all(Gone(), 1, 2, gpu(1), 0.2)
