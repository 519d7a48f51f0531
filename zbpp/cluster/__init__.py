"""Scale on paper: what a training run would take on a cluster, from sizes and datasheets. Pure Python.

`zbpp plan --cluster FILE --model MODEL --batch N` prints what `search` finds.

hardware     a cluster: its nodes, GPUs and links, and how long messages and collectives take
model_sizes  a transformer's sizes, from zbpp's configs or from Hugging Face's config.json
layer_work   the FLOPs, the memory traffic and the held bytes of a layer
stage_costs  a run on a mesh, as the Costs of each stage
search       the simulated step of a run under a schedule, and the best meshes
"""

from zbpp.cluster.hardware import Gpu, Hardware, Link
from zbpp.cluster.model_sizes import ModelSizes, sizes_of_huggingface, sizes_of_node
from zbpp.cluster.search import Question, Step, as_text, predicted_step, search
from zbpp.cluster.stage_costs import Mesh, Run

__all__ = [
    "Gpu",
    "Hardware",
    "Link",
    "Mesh",
    "ModelSizes",
    "Question",
    "Run",
    "Step",
    "as_text",
    "predicted_step",
    "search",
    "sizes_of_huggingface",
    "sizes_of_node",
]
