"""Scale on paper: what a training run would take on a cluster, from sizes and datasheets. Pure Python.

`zbpp plan --cluster FILE --model MODEL --batch N` prints what `search` finds.

hardware     a cluster: its nodes, GPUs and links
model_sizes  a transformer's sizes, from zbpp's configs or from Hugging Face's config.json
layer_work   the FLOPs, the memory traffic and the held bytes of a layer
mesh         the degrees of pipeline, replicas, shards and tensor parallelism; which ranks share a node
transfers    the times of messages and of collectives
stage_costs  all of these as the Costs of each stage
step         the simulated step of one mesh under one schedule, and what limits it
search       the best meshes
report       the answer as text and as JSON
"""

from zbpp.cluster.hardware import Gpu, Hardware, Link
from zbpp.cluster.mesh import Mesh
from zbpp.cluster.model_sizes import ModelSizes, sizes_of_huggingface, sizes_of_node
from zbpp.cluster.search import Question, search
from zbpp.cluster.step import Step, predicted_step

__all__ = [
    "Gpu",
    "Hardware",
    "Link",
    "Mesh",
    "ModelSizes",
    "Question",
    "Step",
    "predicted_step",
    "search",
    "sizes_of_huggingface",
    "sizes_of_node",
]
