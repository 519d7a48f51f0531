"""What zbpp does on a cluster of GPUs under torchrun and NCCL, on one page to send back.

    torchrun --nproc-per-node 8 scripts/cluster_check.py                 # the GPUs of this machine
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-1:29600 \\
        scripts/cluster_check.py                                         # the same line on each of four nodes
    torchrun --nproc-per-node 2 scripts/cluster_check.py --device cpu --small    # tries the check itself

    waits      what waits for a receive of NCCL that was posted ahead, and would hang with it
    first      a first step of every schedule, with stages that are compiled in it
    schedules  all schedules over all ranks: their losses beside plain autograd's, in float64
    meshes     the same with replicas, shards and tensor parallelism
    figures    messages of a link beside its bandwidth; tokens per second beside the bubble's prediction
    hang       the last rank stops inside a step: is it named within the timeout?

Each part is a process per rank with a limit, and a file of its own in OUT, so that a crash or a hang costs
one part. When the time of --seconds is up, the last parts are left out. Rank 0 puts all together in
OUT/page.md; other ranks' own output is in OUT/rank-N. A row that raises is FAILED, and the check goes on.
Exit status: 1 if a part failed.
How fast steps are, `scripts/bench.py` under torchrun says; how fast links are, nccl-tests' sendrecv_perf.
NOT RUN ON A GPU YET: with gloo on CPUs the same code runs.
"""
