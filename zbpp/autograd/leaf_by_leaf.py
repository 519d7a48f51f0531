"""W for gradient release: each leaf's gradient is handed over as soon as it is complete.

So the gradients of two leaves need not exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zbpp.autograd.hooks import run_post_accumulate_hooks
from zbpp.autograd.storages import storages_of


def run_leaf_by_leaf(tasks: list[Any], done: Callable[[Tensor], None]) -> None:
    """Run the tasks of a W; after the last task of a leaf, run the leaf's hooks and call `done(leaf)`.

    A leaf whose memory a task reads (the weight of one product is the x of another) is done after all tasks.
    """
    leaves = {id(leaf): leaf for task in tasks for leaf in _leaves_of(task)}
    last = {key: place for place, task in enumerate(tasks) for key in map(id, _leaves_of(task))}
    read = {address for task in tasks for tensor in task.tensors() for address in _addresses(tensor)}
    at_the_end = {key for key, leaf in leaves.items() if not read.isdisjoint(_addresses(leaf))}
    ends: dict[int, list[Tensor]] = {}  # position of a task -> the leaves that are done after the task
    for key, place in last.items():
        ends.setdefault(len(tasks) - 1 if key in at_the_end else place, []).append(leaves[key])
    tasks.reverse()
    with torch.set_grad_enabled(False):
        for place in range(len(tasks)):
            tasks.pop().accumulate()  # nothing refers to the task any more: its tensors are freed
            for leaf in ends.get(place, ()):
                if leaf._post_accumulate_grad_hooks:
                    run_post_accumulate_hooks(leaf)
                done(leaf)


def _addresses(tensor: Tensor) -> set[int]:
    """The addresses of a tensor's memory. For a fake tensor, which has no memory, those of its storages."""
    storages = storages_of(tensor)
    return {each._cdata if each.device.type == "meta" else each.data_ptr() for each in storages}


def _leaves_of(task: Any) -> list[Tensor]:
    """The leaves that a task adds gradients to. The task of a compiled call has several."""
    return list(task.leaves()) if hasattr(task, "leaves") else [task.leaf]
