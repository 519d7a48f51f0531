"""Prints which jobs ran on the emulated accelerator, and how far they are from the CPU's numbers.

From the repository's root:

    PYTHONPATH=.:tests python tests/on_accelerator/table.py > scripts/results/accelerator.txt
"""

import platform

import torch

from helpers.processes import run_ranks
from on_accelerator.test_jobs import BY_DAY, EVERY, of_jobs, possible

COLUMNS = [("cuda", "gloo"), ("cuda", "nccl"), ("npu", "hccl")]
WHAT = """What ran on the EMULATED accelerator of tests/accelerator, whose operations a CPU computes. No GPU.

Two processes train a llama of four layers in float64 for three steps, with clipped gradients and SGD with
momentum; "graphs" five steps, of which CUDA replays three. A pair of numbers is the largest difference of a
loss and of a weight from those of two processes on the CPU over gloo: relative for losses, absolute for
weights. nccl and hccl keep NCCL's rules (tests/helpers/nccl_rules.py). An access to the device's memory that
no event orders would have ended the job. "-": refused by name, on a device of PrivateUse1.

Made by: PYTHONPATH=.:tests python tests/on_accelerator/table.py > scripts/results/accelerator.txt
"""


def main() -> None:
    jobs = tuple(dict.fromkeys((*BY_DAY, *EVERY)))
    expected = run_ranks(of_jobs, 2, jobs, "cpu", timeout=3000)
    columns = []
    for device, backend in COLUMNS:
        given = possible(jobs, device)
        columns.append(run_ranks(of_jobs, 2, given, device, device=device, backend=backend, timeout=3000))
    print(f"{WHAT}\ntorch {torch.__version__}, Python {platform.python_version()}\n")
    print(f"{'job':28}" + "".join(f"{device + ' over ' + backend:>22}" for device, backend in COLUMNS))
    for job in jobs:
        print(f"{job.name:28}" + "".join(f"{differences(expected, each, job.name):>22}" for each in columns))


def differences(expected, found, name):
    """The largest difference of a loss, and of a weight, on any rank."""
    if name not in found[0]:
        return "-"
    losses, weights = [0.0], [0.0]
    for (wanted, wanted_weights), (given, given_weights) in zip(
        (each[name] for each in expected), (each[name] for each in found), strict=True
    ):
        losses += [abs(a - b) / abs(b) for a, b in zip(given, wanted, strict=True)]
        weights += [(given_weights[key] - each).abs().max().item() for key, each in wanted_weights.items()]
    return f"{max(losses):.0e}  {max(weights):.0e}"


if __name__ == "__main__":
    main()
