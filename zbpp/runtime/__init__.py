"""One rank's life inside one step.

From `Pipeline(...)` to the end of a step, in reading order:

    pipeline      Pipeline: what a user calls
    arguments     a schedule's name becomes a timetable, a model becomes stages
    checks        do the ranks of the pipeline fit together? What is wrong on one is raised on all
    rank          Rank: one rank's stages, links and programs; WHEN A RANK FAILS or dies is explained here
    executor      one rank's program: sends, receives and actions, run in the plan's order
    resolve       a program's instructions as functions over slots
    boxes         the ends of a rank's links; explain_instruction: what an error says of its instruction
    stage         StageWorker: F, B, W and BW of one stage (zbpp/autograd splits B and W)
    p2p           links: messages between two ranks; THE LIFE OF A RECEIVE BUFFER is explained here

What they use:

    microbatch    cuts a batch into microbatches; replicate, per_microbatch
    extra         WHAT A PIPELINE DOES BESIDE ITS PROGRAM: the one interface, which the core alone knows
    call          what one call gives to each stage (inputs, keywords, targets, seeds), and its result
    boundary      what passes between two stages, with or without a message; BoundaryError
    layout        dtypes and shapes of a message; its header
    same_calls    do all ranks call step and evaluate in the same order?
    mesh          replicas, shards and tensor-parallel parts: make_mesh, a process's place in a mesh, DTensors
    tensor_parallel  stages that their model splits over the tensor dimension
    reductions    what is reduced on one rank: REPLICAS AND TIED PARAMETERS GET ONE GRADIENT
    reduce        a stage's gradients, summed over processes in buckets
    gradient_release  weights updated inside the step, their gradients dropped
    tied_gradients  copies of one parameter on several ranks
    fully_shard   stages that FSDP2 shards, driven microbatch by microbatch
    restored      random numbers, training mode, gradients of a step that failed, buffers of one begun again
    validation    an update that is validated at the gate of the next step
    posts         a gather in two halves: post a value now, collect all of them later
    activation_offload  activations in host memory between F and B
    outputs       outputs and metrics of an evaluation
    named_losses  auxiliary losses, and losses that are dicts, by name
    parameters    names, state_dict and declared ties of the parameters
    ties          parameters that are one parameter of the model, in several places of its stages
    blocks        the blocks of a stage: what is recomputed, compiled or offloaded by itself
    weight_offload  weights that live in host memory: WHERE A WEIGHT IS, AND WHEN
    weight_blocks   the blocks whose weights are offloaded, and what is refused
    weight_buffers  host memory or files, and the two buffers on the device
    offloaded_gradients  W of such a block: its gradients on the device, and home again
    saved_weights   what autograd has saved of a block's weights, packed
    graphs        actions that CUDA graphs capture and replay, and what lies at a fixed address
    replicas      are all copies of each weight, buffer and optimizer state equal?
    world         joining the job; gather, broadcast, agreement between ranks
    groups        process groups: one for each link, and for each kind of reduction
    failures      FlightRecorder: the file that a rank leaves when it fails or hangs, for `zbpp hang`

Beside the step:

    squares       squared norms of gradients
    norm          clip_grad_norm_ over all ranks
    measure       timelines and costs of measured steps; clocks: when something ran
    non_finite    WHERE NaN AND INFINITIES CAME FROM: the step's batch runs again, with hooks
    memory        bytes that one microbatch leaves on a stage
    live_tensors, microbatch_memory, memory_record
                  bytes of live tensors, fake ones too; what a microbatch needs; what a step held

WHERE A W GOES is decided by the timetable alone: a schedule (zbpp/families) or the search
(zbpp/planning/search/insert_weight_grads.py, then its moves) puts it there, and the executor runs it there.
"""

from zbpp.runtime.activation_offload import ActivationOffload
from zbpp.runtime.boundary import BoundaryError
from zbpp.runtime.extra import Extra
from zbpp.runtime.failures import FlightRecorder
from zbpp.runtime.gradient_release import GradientRelease, OptimizerAccumulation
from zbpp.runtime.graphs import CudaGraphs
from zbpp.runtime.joining import StartError
from zbpp.runtime.measure import Recorder, measured_costs, peak_memory_bytes
from zbpp.runtime.mesh import make_mesh
from zbpp.runtime.microbatch import per_microbatch, replicate
from zbpp.runtime.non_finite import NonFinite, find_non_finite
from zbpp.runtime.norm import clip_grad_norm_
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.replicas import check_replicas
from zbpp.runtime.stage import StageWorker
from zbpp.runtime.world import AgreementError, CommunicationError, DeviceError

__all__ = [
    "ActivationOffload",
    "AgreementError",
    "BoundaryError",
    "CommunicationError",
    "CudaGraphs",
    "DeviceError",
    "Extra",
    "FlightRecorder",
    "GradientRelease",
    "NonFinite",
    "OptimizerAccumulation",
    "Pipeline",
    "Recorder",
    "StageWorker",
    "StartError",
    "check_replicas",
    "clip_grad_norm_",
    "find_non_finite",
    "make_mesh",
    "measured_costs",
    "peak_memory_bytes",
    "per_microbatch",
    "replicate",
]
