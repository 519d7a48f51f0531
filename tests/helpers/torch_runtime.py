"""What torch's own pipeline runtime, with which ours is compared, can do here."""

import pytest
from torch.distributed.pipelining import PipelineStage, schedules

# Two stages in a row on one rank: torch 2.11 sends itself a first message, which gloo refuses.
RUNS_A_V = hasattr(schedules._PipelineSchedule, "_warmup_p2p") or not hasattr(
    PipelineStage, "_get_init_p2p_neighbors_ops"
)

needs_a_v = pytest.mark.skipif(
    not RUNS_A_V,
    reason="this torch's own runtime (2.11) sends a first message to its own rank in a V, which gloo can't",
)
