"""What doesn't go with CUDA graphs, refused before the first step."""

from __future__ import annotations


def check_graphs(
    cuda_graphs: bool, *, dynamic_shapes: bool, offloads: bool, shards: bool, tensor: bool
) -> None:
    """Raise ValueError for an option of the Pipeline that doesn't go with cuda_graphs=True."""
    if not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs={cuda_graphs!r}: write True or False")
    if not cuda_graphs:
        return
    for is_given, reason in (
        (dynamic_shapes, "dynamic_shapes, since graphs have fixed shapes: leave dynamic_shapes out"),
        (offloads, "offload, whose copies to the host Python starts: leave offload out"),
        (shards, "shards, whose weights FSDP2's hooks gather: write replicate instead of shard"),
        (tensor, "tensor parallel stages (not tried on GPUs yet): write tensor=1"),
    ):
        if is_given:
            raise ValueError(f"cuda_graphs=True doesn't go with {reason}, or leave cuda_graphs out")


RELEASED = (
    "CUDA graphs don't go with gradient release, which Python does in the middle of W: leave one of them out"
)
VALIDATED = "post-validation doesn't go with CUDA graphs, since a step may begin again: leave one of them out"
