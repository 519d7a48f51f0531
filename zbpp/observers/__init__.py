"""What sees each instruction or call, and changes nothing; and functions that check.

recorder          the observer that measures steps; names of instructions for a profiler
record            when each instruction of one rank ran
timeline          the timeline of all ranks, from their records
flight_recorder   a file with the last instructions, and the stacks, of a rank that fails or hangs

same_calls        what has each rank called? For the error of a rank whose peer has gone
losses_alike      do tensor-parallel processes compute the same losses?
batch_norms       does a BatchNorm see microbatches of different sizes in a step?
full_device       did the allocator have to give memory back in the middle of a step?
replicas          are all copies of each weight, buffer and optimizer state equal?
non_finite        where did NaN and infinities come from? The step's batch runs again, with hooks
"""
