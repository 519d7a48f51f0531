"""Replicas, shards, tied and tensor-parallel parameters: all copies of a parameter get one gradient.

mesh              make_mesh; a process's place in a mesh; DTensors
groups            process groups: one for each link, and for each kind of reduction
reductions        the extra: what is reduced on one rank, when, and by which class
reduce            a stage's gradients, summed over processes in buckets
experts           an extra: experts of a layer that are spread over processes
overlap_exchange  an extra: W's run while experts exchange rows
shard_stages      which stages FSDP2 shards: wraps them, or checks those that are wrapped
fully_shard       stages that FSDP2 shards, driven microbatch by microbatch
ties              parameters that are one parameter of the model, in several places of its stages
tied_gradients    copies of one parameter on several ranks
tensor_parallel   stages that their model splits over the tensor dimension
norm              clip_grad_norm_ over all ranks; squares: of one gradient
"""
