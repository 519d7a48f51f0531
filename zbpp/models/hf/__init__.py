"""Any causal language model of Hugging Face, cut into stages.

model        HuggingFace: what a config names
config       the config, checked
load         the weights in a folder
quantize     a base of 4 or 8 bits per weight
dtypes       the dtypes that from_pretrained(dtype=) gives the tensors
shrink       a small copy of the config, to try a cut on
calls        how the small model calls its layers, and which stage uses which parameter
check        the proof, on the small model, that its stages compute what the whole model does
build        a stage of a model, small or large, by a cut
values       where tensors are fake: a trial has values, a stage none
init         initial values for the tensors of one stage
cut          which stage owns what, and the library's model with other layers than its own
stage        a stage: the library's model with the layers of other stages skipped
labels       the rule for targets: which name of a target means what
masks        attention masks and positions
slices       sequences in slices: the library's cache over a Past
context      sequences divided over processes: the library's attention
whole_masks  masks and positions of whole sequences, where a process has a part of each
trial        the proof, on the small model, that sequences in parts give what whole ones do
ties         tied parameters
parallel     tensor parallelism by the library's plan
experts      experts that are spread over processes, and the loss that balances them
export       writes weights as a folder that transformers loads
"""

from zbpp.models.hf.model import HuggingFace

__all__ = ["HuggingFace"]
