"""Replicas, shards and tied parameters: all copies of a parameter get one gradient.

What the mesh itself is: zbpp/runtime/processes/mesh.py.

reductions       the feature: what is reduced on one rank, when, and by which class
instructions     its instructions, and the pass that inserts them
reduce           a stage's gradients, summed over processes in buckets
tied_gradients   copies of one parameter on several ranks
shared_hooks     a feature: hooks of parameters that several stages of one rank have
shard_stages     which stages FSDP2 shards: wraps them, or takes those that are wrapped
fully_shard      stages that FSDP2 shards, driven microbatch by microbatch
norm             clip_grad_norm_ over all ranks
"""
