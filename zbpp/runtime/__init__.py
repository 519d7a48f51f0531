"""One rank's life inside one step.

From `Pipeline(...)` to the end of a step, in reading order:

    pipeline      Pipeline: what a user calls
    arguments     a schedule's name becomes a timetable, a model stages; do the ranks fit together?
    parameters    names and state_dict of the parameters
    lowering      timetables with this rank's programs, made ahead in any thread; last_used: keeps the last 64
    rank          Rank: one rank's stages, links and programs; WHEN A RANK FAILS or dies is explained here
    call/         one call: its arguments are cut, told to all ranks once, and given to the stages; what it
                  returns. THE WAY OF A BATCH is drawn in call/batch
    executor      one rank's program: sends, receives and actions, run in the plan's order
    resolve       a program's instructions as functions over slots
    stage         StageWorker: F, B, W and BW of one stage (zbpp/autograd splits B and W)
    boundary      what passes between two stages, with or without a message; BoundaryError
    links         messages between two ranks; THE LIFE OF A RECEIVE BUFFER is explained here
    buffers       the memory that messages are received into
    layouts       what messages look like, by the size of their microbatch, which call/sizes tells all ranks
    host_links    the same through host memory, for GPUs in a job on gloo
    in_place      what a later action needs must stay as it is: ChangedInPlace with the buffer's name
    layout        dtypes and shapes of a message; its header
    restored      random numbers, training mode, buffers of a step that begins again
    processes/    where a process is in the mesh; groups; DTensors; parameters that several processes have
    digest        a number of a tensor's bits, to compare copies
    extra         WHAT A PIPELINE DOES BESIDE ITS PROGRAM: features and observers, which the core knows by
                  this interface alone

What an extra does is not here: zbpp/features has a folder for each feature, zbpp/observers what sees steps.

How a process joins the job, and what all ranks agree on: zbpp/job.

WHERE A W GOES is decided by the timetable alone: a schedule (zbpp/schedule/families) or the search
(zbpp/planning/search/initial_orders.py, then its moves) puts it there, and the executor runs it there.
"""

from zbpp.features.standard import standard_extras
from zbpp.job.agreement import AgreementError
from zbpp.job.errors import CommunicationError
from zbpp.job.joining import StartError
from zbpp.job.world import DeviceError
from zbpp.runtime.boundary import BoundaryError
from zbpp.runtime.call.marks import per_microbatch, replicate
from zbpp.runtime.extra import Extra, Feature, Observer
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.processes.mesh import make_mesh
from zbpp.runtime.stage import StageWorker

Pipeline.standard_extras = staticmethod(standard_extras)

__all__ = [
    "AgreementError",
    "BoundaryError",
    "CommunicationError",
    "DeviceError",
    "Extra",
    "Feature",
    "Observer",
    "Pipeline",
    "StageWorker",
    "StartError",
    "make_mesh",
    "per_microbatch",
    "replicate",
]
