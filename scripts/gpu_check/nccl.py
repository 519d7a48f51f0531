"""NCCL in a world of one: the options of links, a reduced layer, a sharded stage, abort. gloo on the CPU."""

from __future__ import annotations

import copy
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpu_check.measuring import MIB, digest, unlike
from gpu_check.page import Here, Page
from zbpp.devices import urgent_options
from zbpp.features.reductions.reduce import AllReduce
from zbpp.job.cuda_settings import use_expandable_segments
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.groups import close_groups, new_group, unique_name

_LIMIT = timedelta(seconds=20)


def run(page: Page) -> None:
    here = page.here
    backend = "nccl" if here.is_cuda else "gloo"
    if here.is_cuda:
        page.say(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        options = {"device_id": here.device} if here.is_cuda else {}
        page.note("init_process_group", "below 1 s", lambda: _init(backend, store, options))
        if dist.is_initialized():
            _layers(page)
            _group(page, backend)
            page.note("destroy_process_group", "below 1 s", lambda: _took(dist.destroy_process_group))
    if here.is_cuda:
        page.note("expandable segments, as a pipeline on NCCL sets them", "True", lambda: _segments(here))
    else:
        page.skip("expandable segments", "they are a GPU's")


def _init(backend: str, store: dist.Store, options: dict[str, torch.device]) -> str:
    return _took(
        lambda: dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_LIMIT, **options)
    )


def _layers(page: Page) -> None:
    """A layer whose gradient is reduced, and a stage that FSDP2 shards, over this one process."""
    here = page.here
    torch.manual_seed(0)
    size = here.choose(4096, 64)
    plain = nn.Linear(size, size, bias=False, device=here.device, dtype=here.dtype)
    reduced, staged, sharded = (copy.deepcopy(plain) for _ in range(3))
    x = torch.randn(size, size, device=here.device, dtype=here.dtype)
    plain(x).square().mean().backward()
    reduced(x).square().mean().backward()
    nbytes = 2.0 * plain.weight.nbytes

    def reduce() -> float:
        begin = time.perf_counter()
        reducer = AllReduce(reduced.parameters(), dist.group.WORLD, divisor=1, what="the check")
        reducer.start()
        reducer.finish()
        here.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    page.figure("a first all-reduce of a gradient", "ms", reduce, floor=here.ms(nbytes=nbytes), why="bytes")
    page.figure("another one", "ms", reduce, floor=here.ms(nbytes=nbytes), why="bytes")
    page.check("reduced: gradients unlike plain's", lambda: _unlike(reduced, plain))
    page.check("a stage, sharded by FSDP2: gradients unlike without", lambda: _sharded(sharded, staged, x))


def _sharded(sharded: nn.Module, plain: nn.Module, x: torch.Tensor) -> int:
    """Two steps of a pipeline with zb_h1, of a stage sharded over this process, and of a plain stage."""
    mesh = init_device_mesh(x.device.type, (1, 1), mesh_dim_names=("pipeline", "shard"))
    fully_shard(sharded, mesh=mesh["shard"])
    for stage, options in ((plain, {}), (sharded, {"mesh": mesh})):
        with Pipeline({0: stage}, plan("zb_h1", 1, 4), nn.functional.mse_loss, **options) as pipeline:
            for _ in range(2):
                stage.zero_grad()
                pipeline.step(x, target=x)
    found = {name: each.grad.to_local() for name, each in sharded.named_parameters()}
    return unlike(digest(found), digest({name: each.grad for name, each in plain.named_parameters()}))


def _unlike(one: nn.Module, other: nn.Module) -> int:
    own, others = ({name: p.grad for name, p in each.named_parameters()} for each in (one, other))
    return unlike(digest(own), digest(others))


def _group(page: Page, backend: str) -> None:
    """A group as a link has it: its options, its memory, its end."""
    here = page.here
    made: list[dist.ProcessGroup] = []

    def make() -> str:
        before = _free(here)
        options = urgent_options(backend, _LIMIT)
        group = new_group([0], unique_name(), _LIMIT, options)
        assert group is not None  # this process is in it
        made.append(group)
        dist.all_reduce(torch.ones(1, device=here.device), group=made[0])
        here.synchronize()
        names = ("is_high_priority_stream", "config")
        given = {name: getattr(options, name, None) for name in names} if options is not None else {}
        config = given.get("config")
        said = {name: getattr(config, name, None) for name in ("max_ctas", "min_ctas", "cga_cluster_size")}
        return f"{given.get('is_high_priority_stream')}, {said}; {(before - _free(here)) / MIB:.0f} MiB"

    page.note("a group as a link has it", "True, max_ctas 8; 10 to 200 MiB", make)
    if made:
        closed = lambda: _took(lambda: close_groups(made))  # noqa: E731
        page.note("abort of this group, and its end", "below 1 s", closed)


def _segments(here: Here) -> str:
    """Whether memory that is taken from now on is in expandable segments."""
    use_expandable_segments()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=here.device)
    found = [each["is_expandable"] for each in torch.cuda.memory_snapshot()]
    return f"{any(found)}, of {len(found)} segments, after {kept.nbytes // MIB} MiB were taken"


def _free(here: Here) -> int:
    return torch.cuda.mem_get_info()[0] if here.is_cuda else 0


def _took(call: object) -> str:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return f"{time.perf_counter() - begin:.2f} s"
