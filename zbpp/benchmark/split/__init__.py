"""The split backward measured beside plain backward and torch's own split, in one process.

Stages are blocks of zbpp.models.llama. A line of the table may have a mark: the value that zbpp's figure (in
section compiled: the compiled split's) must not exceed; "met" or "MISSED" stands beside it.
Parameters have a .grad before F, as from the second microbatch on. x arrives in F and dy in B; both are
dropped as soon as the contestant allows it. Python's garbage collection is off.

memory    Live bytes of the allocator, over those before F. On the CPU from the allocation events of
          torch.profiler, so every tensor counts, autograd's own too; on CUDA memory_allocated.
products  Matrix products and attentions executed in B and W, seen by a dispatch mode.
recompute Forwards of one block in B and W, each block checkpointed.
host      Time with tiny tensors, by number of blocks. A ratio is the median of the rounds' ratios;
          contestants take turns within a round. On the CPU with one thread the thread's own time, on
          CUDA the time until all is done: every phase ends with a synchronisation.
compute   Time of a stage whose products take nearly all of it. Its mark is met if the median reaches
          it within the given uncertainty.
compiled  zbpp's split with F, B and W compiled beside the eager one: memory, compute and, with the
          largest number of blocks, host time. Only if named: it compiles for minutes.
"""

# Where it is: contestants.py (plain, zbpp, compiled, torch), stages.py (sizes, stages, one microbatch),
# memory.py, counts.py (products, recompute), timing.py (host, compute) and compiled.py: the sections;
# sections.py runs them, report.py shows their lines.
