"""Runs of `zbpp train` of two processes on an accelerator have the losses of the CPU."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accelerator.processes import run_with
from helpers.configs import all_forms
from helpers.processes import run_ranks
from helpers.runs import losses_in
from zbpp.run.app import train

SMALL = ["data=stdlib", "data.sequence_length=16", "num_microbatches=4", "microbatch_size=2", "steps=3"]
LLAMA = ["model=llama_tiny", "model.num_layers=4", "model.hidden_size=32", "model.sequence_length=16", *SMALL]
LORA = [
    *("model=huggingface", "precision=bfloat16", "finetune.lora.r=2", *SMALL),
    "finetune.lora.target_modules=[q_proj,v_proj]",
]
RUNS = {
    "zb_v": [*LLAMA, "schedule=zb_v"],
    "context": [*LLAMA, "schedule=zb_h1", "parallel.context=2"],
    "tokens": [*LLAMA, "schedule=zb_h1", "data.batching=tokens", "data.tokens_per_batch=128"],
    "lora": [*LORA, "schedule=zb_h1"],
    "saved": [*LLAMA, "schedule=zb_h1"],
}
BY_DAY = ("tokens", "lora", "saved")
RESUMED = [*RUNS["saved"], "steps=5", "resume=auto"]
TOLERANCES = {"lora": 4e-3}  # bfloat16


def trained(rank, device, folder, model, names, ports):
    """{name of a run: its losses}. The last one goes on from a checkpoint of two processes, on one."""
    dist.destroy_process_group()  # a run makes its own, as under torchrun
    for port, name in zip(ports, names, strict=True):
        given = [*RUNS[name], *([f"model.path={model}"] if name == "lora" else [])]
        with mock.patch.dict(os.environ, as_torchrun(rank, port)):
            run(given, device, f"{folder}/{name}")
    if rank == 0:
        run(RESUMED, device, f"{folder}/saved")
    return {name: losses_in(Path(folder, name)) for name in names}


def run(arguments, device, folder):
    train(all_forms(*arguments, f"parallel.device={device}", f"run_dir={folder}"))


def as_torchrun(rank, port):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}


def free_ports(number):
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in servers]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny Hugging Face model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def all_losses(folder, model, names, device="cpu", backend="gloo"):
    folder.mkdir()
    given = device, str(folder), str(model), names, free_ports(len(names))
    found, _ = run_ranks(trained, 2, *given, device=device, backend=backend, timeout=220)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory, model):
    """The losses of the daily runs on the CPU."""
    return all_losses(tmp_path_factory.mktemp("cpu") / "runs", model, BY_DAY)


@pytest.fixture(scope="module")
def all_expected(tmp_path_factory, model):
    return all_losses(tmp_path_factory.mktemp("cpu") / "runs", model, tuple(RUNS))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", pytest.param("npu", marks=pytest.mark.nightly)])
def test_the_command_on_an_accelerator_has_the_losses_of_the_cpu(tmp_path, device, expected):
    """Two processes of its own, which have the device before they import torch."""
    command = " ".join(RUNS["saved"])
    run_with(device, f"zbpp train -n 2 {command} parallel.device={device} run_dir=run", tmp_path)
    assert losses_in(tmp_path / "run") == pytest.approx(expected["saved"][:3], rel=1e-5)


@pytest.mark.slow
def test_runs_on_an_accelerator_have_the_losses_of_the_cpu(tmp_path, expected, model):
    assert_are_those_of_the_cpu(tmp_path / "runs", model, "cuda", "nccl", expected)


@pytest.mark.nightly
@pytest.mark.parametrize("device, backend", [("cuda", "nccl"), ("npu", "hccl")])
def test_all_runs_on_an_accelerator_have_the_losses_of_the_cpu(
    tmp_path, device, backend, all_expected, model
):
    assert_are_those_of_the_cpu(tmp_path / "runs", model, device, backend, all_expected)


def assert_are_those_of_the_cpu(folder, model, device, backend, expected):
    found = all_losses(folder, model, tuple(expected), device, backend)
    for name, losses in expected.items():
        assert found[name] == pytest.approx(losses, rel=TOLERANCES.get(name, 1e-5)), name
    assert len(found["saved"]) == 5
