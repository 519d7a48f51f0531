"""What doesn't go with CUDA graphs, refused before the first step."""

from __future__ import annotations

MODES = ("none", "actions", "program")


def check_graphs(
    mode: str,
    *,
    dynamic_shapes: bool,
    check_messages: bool,
    offloads: bool,
    shards: bool,
    tensor: bool,
    reduces: bool,
) -> None:
    """Raise ValueError for a mode that is none, or that doesn't go with another option of the Pipeline.

    reduces: whether gradients are summed over replicas or tied copies.
    """
    if mode not in MODES:
        raise ValueError(f"cuda_graphs={mode!r}: write one of {', '.join(MODES)}")
    if mode == "none":
        return
    for is_given, reason in (
        (dynamic_shapes, "dynamic_shapes, since graphs have fixed shapes: leave dynamic_shapes out"),
        (offloads, "offload, whose copies to the host Python starts: leave offload out"),
        (shards, "shards, whose weights FSDP2's hooks gather: write replicate instead of shard"),
        (tensor, "tensor parallel stages (not tried on GPUs yet): write tensor=1"),
    ):
        if is_given:
            raise ValueError(f"cuda_graphs={mode} doesn't go with {reason}, or write cuda_graphs=none")
    for is_given, reason in (
        (check_messages, "check_messages, whose checksums the host compares"),
        (reduces, "replicas or tied parameters, whose reductions the host waits for"),
    ):
        if is_given and mode == "program":
            raise ValueError(f"cuda_graphs=program doesn't go with {reason}: write cuda_graphs=actions")


RELEASED = (
    "CUDA graphs don't go with gradient release, which Python does in the middle of W: leave one of them out"
)
VALIDATED = "post-validation doesn't go with CUDA graphs, since a step may begin again: leave one of them out"
