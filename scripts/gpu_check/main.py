"""The command line: the parent runs each part by this same command, with --part."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_check
from gpu_check.parts import Part, end_with_parent, exit_on_sigterm, run_parts

SCRIPT = Path(__file__).resolve().parent.parent / "gpu_check.py"

# What zbpp sets for ranks on NCCL. To load all kernels of torch at its start takes a process seconds, so the
# other parts load kernels at their first use.
_EAGER = {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_LAZY = {
    "CUDA_MODULE_LOADING": "LAZY",
    # gloo asks for the host's name otherwise, which a machine without a network may not resolve.
    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
}

# A part is the function `run` of the module of its name, up to "-". The most important ones come first.
PARTS = (
    Part("waits", 60, _EAGER),
    Part("waits-lazy", 60, _LAZY),
    Part("ranks", 170, _LAZY),
    Part("split", 70, _LAZY),
    Part("graphs", 45, _LAZY),
    Part("compiled", 70, _LAZY),
    Part("nccl", 40, _LAZY),
    Part("kernels", 50, _LAZY),
    Part("offload", 40, _LAZY),
    Part("tokens", 60, _LAZY),
)
_ALL = sum(part.limit for part in PARTS)  # with less, the last parts may be left out
_BEFORE = 4.0  # s before its limit a part writes where it stands


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see the package's docstring."""
    options = parse(arguments)
    if options.part:
        return run(options)
    command = [sys.executable, str(SCRIPT), "--device", options.device]
    command += ["--small"] if options.small else []
    names = options.parts or [part.name for part in PARTS]
    slack = 4 if options.small else 1  # a CPU that others use, too
    exit_on_sigterm()
    failed = run_parts(
        [part._replace(limit=slack * part.limit) for part in PARTS if part.name in names],
        lambda part: [*command, "--part", part.name, "--limit", f"{part.limit}"],
        options.out,
        title=title(options),
        seconds=options.seconds,
    )
    print(f"parts that failed: {', '.join(failed) or 'none'}; the page: {options.out / 'page.md'}")
    return int(bool(failed))


def title(options: argparse.Namespace) -> str:
    small = ", THE SMALL FORM, whose times and bytes say nothing" if options.small else ""
    device = "cpu"
    if options.device == "cuda":
        import torch

        device = f"{torch.cuda.device_count()} GPU(s), CUDA {torch.version.cuda}"
    return f"zbpp on one GPU: {device}, torch {version('torch')}, {time.strftime('%Y-%m-%d %H:%M')}{small}"


def run(options: argparse.Namespace) -> int:
    """One part, in a process of its own."""
    end_with_parent()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, options.limit - _BEFORE))
    import torch

    from gpu_check.page import Here, Page

    if options.device == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    page = Page(Here(device, options.small))
    if options.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        page.say(f"{gpu.name}, {torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB free; rates {page.here.rates}")
    importlib.import_module(f"gpu_check.{options.part.partition('-')[0]}").run(page)
    return int(page.num_failed > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program where they are wrong, with what to write instead."""
    parser = argparse.ArgumentParser(
        description=gpu_check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the check itself")
    parser.add_argument("--out", type=Path, default=Path("gpu_check_out"), help="folder of the page")
    parser.add_argument(
        "--seconds", type=float, default=_ALL, help="for all parts; default %(default)g, all limits"
    )
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in names:
            parser.error(f"part {name!r} does not exist: write some of {', '.join(names)}")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is for trying the check itself: write --device cpu --small")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(
                f"torch {torch.__version__} sees no GPU: --device cpu --small tries the check itself"
            )
    return options
