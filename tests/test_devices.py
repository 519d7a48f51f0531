"""zbpp/devices.py on a machine that has only the CPU: tests replace what torch says of an accelerator."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zbpp import devices
from zbpp.checkpoints.writing import Saving
from zbpp.job.errors import CommunicationError, communicating
from zbpp.runtime import host_links
from zbpp.runtime.links import Outbox
from zbpp.runtime.processes import groups
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.schedule import Value
from zbpp.training import measured_steps

GPU = torch.device("cuda", 1)


@pytest.fixture
def a_gpu(monkeypatch):
    """torch says that this process has two CUDA devices, of which the second is its current one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


@pytest.mark.parametrize(
    "backends, device",
    [
        ("cuda:nccl", GPU),
        ("cpu:gloo,cuda:nccl", GPU),
        ("cpu:gloo,cuda:gloo", torch.device("cpu")),  # gloo sends from host memory
        ("cpu:gloo", torch.device("cpu")),
    ],
)
def test_a_model_is_built_where_the_groups_backend_sends_from(monkeypatch, a_gpu, backends, device):
    """Also if init_process_group was given no backend, or one for each kind of device."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert devices.device_for_messages(None) == device


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_links_have_the_backend_of_their_device_alone_and_its_urgent_options(monkeypatch, a_gpu, backends):
    made = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(groups, "broadcast", lambda value, group: value)
    monkeypatch.setattr(groups, "new_group", lambda *given: made.append(given))
    options = SimpleNamespace(config=SimpleNamespace())
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    groups.link_groups(None, [(0, 1)], 5.0, GPU)
    assert [(given[2:]) for given in made] == [(timedelta(seconds=5), options, "nccl")]
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, 8)


def test_threads_begin_with_the_device_of_the_thread_that_starts_them(monkeypatch, a_gpu, tmp_path):
    """Else each of them takes memory of device 0, in every process."""
    made = []

    def note(device):
        made.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.accelerator, "set_device_index", note)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None)
    monkeypatch.setattr(host_links, "streams_of", lambda device: None)
    host_links.HostLink(None, GPU)._thread.submit(lambda: None).result()
    saving = Saving(tmp_path / "step_1", {}, "", None, MeshPosition(None), None)
    monkeypatch.setattr(saving, "write", lambda: None)
    saving.write_in_background()
    saving._thread.join()
    assert made == [("zbpp sends_0", GPU), ("zbpp step_1", GPU)]


def test_a_tensor_is_sent_from_where_the_groups_backend_takes_it(monkeypatch):
    """Numbers that were made on the host are summed by NCCL on the device, and come back."""
    device = torch.device("meta")  # stands for a GPU
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "meta:nccl")
    assert devices.carried(torch.ones(2), None).device.type == "meta"
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,meta:nccl")
    assert devices.carried(torch.ones(2), None).device.type == "cpu"


def test_a_device_without_an_index_is_the_current_one(a_gpu):
    """Generators and streams of a device are found by its index."""
    assert devices.whole("cuda") == GPU
    assert devices.whole(torch.device("cuda:0")) == torch.device("cuda", 0)
    assert devices.whole("cpu") == torch.device("cpu")


def test_a_tensor_of_another_device_than_the_ranks_is_refused_where_it_is_sent():
    """NCCL's error would be another rank's lost connection."""
    outbox = Outbox(1, None, torch.device("meta"))  # stands for a GPU
    message = (
        r"shape \(2, 3\) is on cpu, and this rank sends from meta: make inputs by device=pipeline.device"
    )
    with pytest.raises(ValueError, match=message):
        outbox.send(Value("x", 1, 0), (torch.ones(2, 3),))


def test_two_processes_on_one_gpu_are_told_to_choose_their_own():
    error = RuntimeError("NCCL error\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 101000")
    said = r"^gathering: two processes use one GPU.*: begin each process"
    with pytest.raises(CommunicationError, match=said), communicating("gathering"):
        raise error


@pytest.mark.parametrize(
    "name, tera", [("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA B200", 2250)]
)
def test_the_peak_is_that_of_the_gpus_own_data_sheet(monkeypatch, a_gpu, name, tera):
    monkeypatch.setattr(measured_steps, "name_of", lambda device: name)
    assert measured_steps.peak_flops(GPU, torch.bfloat16) == tera * 1e12
