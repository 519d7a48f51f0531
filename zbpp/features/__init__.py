"""What a user can switch on beside a pipeline's program: one folder for each feature.

A folder holds all of one feature. A feature imports the core (zbpp/runtime, schedule, autograd), and no other
feature; the core imports none of them. How a feature takes part in a call: zbpp/runtime/extra.py.

reductions/           replicas, shards, tied parameters; the norm of all gradients
experts/              experts that are spread over processes
context/              sequences that are divided over processes
slices/               sequences in slices
activation_offload/   activations in host memory between F and B
weight_offload/       weights in host memory
gradient_release/     updates inside the step
fewer_bytes/          messages between stages in bfloat16 or 8 bits
messages_ahead/       more messages under way on each link
head_at_once/         the W of a language model's head at the end of its B
post_validation/      an update that is validated at the gate of the next step
graphs/               actions that CUDA graphs capture and replay; stages that compile ahead

standard     the features and observers that every pipeline has
squares      the squared norms of gradients, for gradient release and for the norm
all_to_all   rows exchanged over a group, for experts and context
"""
