"""Extras and functions that check.

losses_alike do tensor-parallel processes compute the same losses?
same_calls   what has each rank called? For the error of a rank whose peer has gone
batch_norms  does a BatchNorm see microbatches of different sizes in a step?
replicas     are all copies of each weight, buffer and optimizer state equal?
non_finite   where did NaN and infinities come from? The step's batch runs again, with hooks
full_device  did the allocator have to give memory back in the middle of a step?
"""
