"""Features of a mesh: all copies of a parameter get one gradient. What the mesh itself is: runtime/mesh.py.

reductions        the feature: what is reduced on one rank, when, and by which class
reduce            a stage's gradients, summed over processes in buckets
tied_gradients    copies of one parameter on several ranks
shared_hooks      a feature: hooks of parameters that several stages of one rank have
shard_stages      which stages FSDP2 shards: wraps them, or takes those that are wrapped
fully_shard       stages that FSDP2 shards, driven microbatch by microbatch
experts           a feature: experts of a layer that are spread over processes
context           a feature: sequences that are divided over processes
sequence_parts    what a call takes and gives where sequences are divided
all_to_all        rows exchanged over a group, for experts and context
overlap_exchange  a feature: W's run while rows are exchanged
norm              clip_grad_norm_ over all ranks
"""
