"""One rank's life inside one step: stages, links, and the executor of a program."""

from zbpp.runtime.measure import Recorder, measured_costs, measured_timeline, peak_memory_bytes
from zbpp.runtime.microbatch import per_microbatch, replicate
from zbpp.runtime.norm import clip_grad_norm_
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.stage import BoundaryError, StageWorker
from zbpp.runtime.world import AgreementError, CommunicationError, DeviceError

__all__ = [
    "AgreementError",
    "BoundaryError",
    "CommunicationError",
    "DeviceError",
    "Pipeline",
    "Recorder",
    "StageWorker",
    "clip_grad_norm_",
    "measured_costs",
    "measured_timeline",
    "peak_memory_bytes",
    "per_microbatch",
    "replicate",
]
