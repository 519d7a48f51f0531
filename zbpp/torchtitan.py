"""torchtitan's trainer on zbpp: its configs by name, with the pipeline's steps run by zbpp.

    torchrun --nproc-per-node 4 -m torchtitan.train --module zbpp.torchtitan --config llama3_debugmodel \\
        --training.disable_cuda_graphs --parallelism.pipeline_parallel_degree 4 \\
        --parallelism.pipeline_parallel_schedule ZBVZeroBubble

Every config of torchtitan's models is here under its own name. For a plan of zbpp's in place of torch's
order, write a config of your own:

    from torchtitan.models.qwen3.config_registry import qwen3_14b
    from zbpp.torchtitan import on_zbpp

    def qwen3():
        return on_zbpp(qwen3_14b(), "zb_auto", placement="v", memory_limit=8)

Made for torchtitan 0.3.0, which needs torch 2.14 or newer.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from zbpp import torch_pipelining

_MODELS = "torchtitan.models"


def on_zbpp(config: Any, plan: str | None = None, **options: Any) -> Any:
    """A torchtitan Trainer.Config whose pipeline runs on zbpp.

    plan, options: see `zbpp.torch_pipelining.use_plan`; without a plan the order is that of
    parallelism.pipeline_parallel_schedule. Raises ValueError for a model without a pipeline.
    """
    spec = config.model_spec
    if spec.pipelining_fn is None:
        raise ValueError(f"torchtitan has no pipeline for {spec.name}")

    def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
        schedule, *more = spec.pipelining_fn(*args, **kwargs)
        torch_pipelining.on_zbpp(schedule)
        if plan is not None:
            torch_pipelining.use_plan(schedule, plan, **options)
        return schedule, *more

    return dataclasses.replace(config, model_spec=dataclasses.replace(spec, pipelining_fn=pipelining_fn))


def __getattr__(name: str) -> Any:
    """torchtitan's function of that name, whose config runs on zbpp."""
    if name.startswith("__"):
        raise AttributeError(name)
    for registry in _registries():
        if hasattr(registry, name):
            theirs = getattr(registry, name)
            return lambda: on_zbpp(theirs())
    raise AttributeError(f"no model of torchtitan's has a config {name}")


def _registries() -> Iterator[Any]:
    """The modules of torchtitan's models that have its configs."""
    for each in pkgutil.iter_modules(importlib.import_module(_MODELS).__path__):
        try:
            yield importlib.import_module(f"{_MODELS}.{each.name}.config_registry")
        except ImportError:  # it has none, or its model needs a package that is not here
            continue
