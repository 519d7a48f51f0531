"""Settings of CUDA and of torch's allocator without which a pipeline on NCCL may hang."""

import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline
from zbpp.job import cuda_settings
from zbpp.observers.full_device import FullDevice


def test_a_step_in_which_the_allocator_tried_again_is_told_once(caplog):
    retries = iter([0, 0, 0, 2])  # before and after each step
    x = torch.ones(2, 3)
    with Pipeline({0: nn.Linear(3, 3)}, "zb_h1", F.mse_loss, num_microbatches=2) as pipeline:
        pipeline.use(FullDevice(lambda: next(retries)))
        for _ in range(3):
            with caplog.at_level(logging.WARNING):
                pipeline.step(x, target=x)
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith("rank 0: the device was full in step after step 1,")


def settings(**environment):
    """What the environment says after `import zbpp` in a new process."""
    names = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")
    program = f"import os, zbpp; print(*(os.environ.get(name) for name in {names}))"
    rest = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program], env=rest | environment, capture_output=True, text=True
    )
    return done.stdout.split()


def test_importing_zbpp_sets_what_cuda_reads_first_and_keeps_what_is_set():
    assert settings() == ["EAGER", "32"]
    assert settings(CUDA_DEVICE_MAX_CONNECTIONS="8") == ["EAGER", "8"]


def test_expandable_segments_are_used_unless_the_user_said_otherwise(monkeypatch):
    said = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cuda_settings.use_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    cuda_settings.use_expandable_segments()
    assert said == ["expandable_segments:True"]


@pytest.mark.filterwarnings("error")
def test_expandable_segments_are_set_without_a_warning(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cuda_settings.use_expandable_segments()


def test_kernels_that_are_loaded_at_their_first_use_are_warned_of(monkeypatch, caplog):
    for value in ("EAGER", "lazy"):
        monkeypatch.setenv("CUDA_MODULE_LOADING", value)
        cuda_settings.set_environment()  # keeps what the user has set
        cuda_settings.warn_of_lazy_loading()
    (warning,) = caplog.messages
    assert warning.startswith("CUDA_MODULE_LOADING=LAZY")
    assert warning.endswith("may hang: unset it")


def test_a_host_that_waits_for_each_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    cuda_settings.check_launches()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match=r"CUDA_LAUNCH_BLOCKING=1 makes the host wait.*: unset it"):
        cuda_settings.check_launches()
