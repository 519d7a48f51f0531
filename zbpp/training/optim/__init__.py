"""The update of the weights: optimizers, their groups, precision, and updates that are validated later.

update                 the outcome of a step: norm over all stages, clipping, the update
optimizer              optimizers and learning rates by name
parameter_groups       groups of parameters, by patterns of names
precision              dtypes, for each value of `precision=`
host_threads           more threads for the update of weights in host memory
master_weights         float32 master weights beside 16-bit ones

post_validated_update  an update before the norm of all gradients is known
post_validation        steps whose updates are validated later
rollback               takes an update back, to the last bit
"""
