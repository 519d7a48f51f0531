"""Checkpoints that outlive the cut: saved under one number of ranks, loaded under any other.

saving            zbpp.save: all processes agree on what is saved
writing           each one writes its part, in a thread if wanted
loading           zbpp.load: the newest whole checkpoint, under this job's cut and mesh
model_states      weights and buffers by their names in the whole model
optimizer_states  states and options of optimizers by the same names
nest              everything that is no tensor, as JSON
reading           tensors through torch.distributed.checkpoint, without pickled objects
folders           names on disk, sizes, the rename that makes it whole
"""

from zbpp.checkpoints.folders import CheckpointError
from zbpp.checkpoints.loading import load, opened, restore
from zbpp.checkpoints.reading import Checkpoint
from zbpp.checkpoints.saving import Stateful, prepared, save
from zbpp.checkpoints.writing import Saving

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Saving",
    "Stateful",
    "load",
    "opened",
    "prepared",
    "restore",
    "save",
]
