"""NCCL in a world of one: the options of links, a reduced and a sharded layer, abort. gloo on the CPU."""

from __future__ import annotations

import copy
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gpu_check.measuring import MIB, digest, unlike
from gpu_check.page import Here, Page
from zbpp.runtime.groups import close_groups, urgent_options
from zbpp.runtime.parallel.reduce import AllReduce

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


def _init(backend: str, store: dist.Store, options: dict[str, torch.device]) -> str:
    return _took(
        lambda: dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_LIMIT, **options)
    )


def _layers(page: Page) -> None:
    """A layer whose gradient is reduced, and one that FSDP2 shards, over this one process."""
    here = page.here
    torch.manual_seed(0)
    size = here.choose(4096, 64)
    plain = nn.Linear(size, size, bias=False, device=here.device, dtype=here.dtype)
    reduced, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
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
    page.check("sharded by FSDP2: gradients unlike plain's", lambda: _sharded(sharded, plain, x, here))


def _sharded(layer: nn.Module, plain: nn.Module, x: torch.Tensor, here: Here) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=init_device_mesh(here.device.type, (1,)))
    layer(x).square().mean().backward()
    found = {"weight": layer.weight.grad.to_local()}
    return unlike(digest(found), digest({"weight": plain.weight.grad}))


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
        made.append(dist.new_group([0], timeout=_LIMIT, pg_options=options))
        dist.all_reduce(torch.ones(1, device=here.device), group=made[0])
        here.synchronize()
        names = ("is_high_priority_stream", "config")
        given = {name: getattr(options, name, None) for name in names} if options is not None else {}
        config = given.get("config")
        said = {name: getattr(config, name, None) for name in ("max_ctas", "min_ctas", "cga_cluster_size")}
        return f"{given.get('is_high_priority_stream')}, {said}; {(before - _free(here)) / MIB:.0f} MiB"

    page.note("a group with the options of a link", "priority, CTAs; 100 to 200 MiB", make)
    if made:
        page.note("abort of this group, and its end", "below 1 s", lambda: _took(lambda: close_groups(made)))


def _free(here: Here) -> int:
    return torch.cuda.mem_get_info()[0] if here.is_cuda else 0


def _took(call: object) -> str:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return f"{time.perf_counter() - begin:.2f} s"
