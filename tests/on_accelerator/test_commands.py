"""The README's example and the checks of GPUs, as processes of their own that have an accelerator."""

import re
import sys

import pytest

from accelerator.processes import run_with
from helpers.pages import ROOT, blocks, run_command

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import cluster_check.main  # noqa: E402
import gpu_check.main  # noqa: E402


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device, backend", [("cuda", "nccl"), ("cuda", "gloo"), ("npu", "hccl")])
def test_the_readmes_example_on_an_accelerator_prints_the_losses_of_the_cpu(device, backend, tmp_path):
    """With what its comment says that GPUs need."""
    (tower,) = blocks("README.md", "python")
    launch = next(block for block in blocks("README.md", "bash") if block.startswith("torchrun"))
    line = next(each for each in tower.splitlines() if "init_process_group" in each)
    assert "torch.cuda.set_device(LOCAL_RANK)" in line
    for_gpus = (
        f'    torch.{device}.set_device(int(__import__("os").environ["LOCAL_RANK"]))\n'
        f'    torch.distributed.init_process_group("{backend}")'
    )
    (tmp_path / "tower.py").write_text(tower)
    expected = losses_printed(run_command(launch, tmp_path))
    (tmp_path / "tower.py").write_text(tower.replace(line, for_gpus))
    assert losses_printed(run_with(device, launch, tmp_path)) == expected
    assert len(expected) == 20


def losses_printed(text):
    return re.findall(r"^step \d+  loss [\d.]+$", text, re.M)


def fine_parts(page):
    return re.findall(r"^([\w-]+): fine, [\d.]+ s$", page, re.M)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_gpu_check_fills_its_page(tmp_path):
    """A rehearsal: each part, and no row that failed. What Inductor compiles is left out, or not compiled."""
    run_with("cuda", f"python {SCRIPTS / 'gpu_check.py'} --small --seconds 2300 --out {tmp_path}", tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert fine_parts(page) == [part.name for part in gpu_check.main.PARTS]
    assert "FAILED" not in page
    assert "MISSED" not in page
    assert len(re.findall(r"CUDA graphs: unlike \| 0 \| 0 \| ok", page)) >= 4
    assert page.count("skipped") == page.count("| Inductor and Triton |  | skipped: no triton here |") == 2


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_cluster_check_fills_its_page(tmp_path):
    """A rehearsal in two processes over NCCL's rules: each part, and no row that failed."""
    options = f"--device cuda --small --seconds 2300 --out {tmp_path}"
    command = f"torchrun --standalone --nproc-per-node 2 {SCRIPTS / 'cluster_check.py'} {options}"
    run_with("cuda", command, tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert fine_parts(page) == [part.name for part in cluster_check.main.PARTS]
    assert "FAILED" not in page
    assert "rank 1 stopped and was named after" in page
