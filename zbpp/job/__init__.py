"""How a process joins its job, and what all ranks of the job agree on.

world          joining and leaving the job
joining        how a process finds the others, and what it says if they don't come
agreement      values that all ranks have
errors         a broken connection, memory that is not there
cuda_settings  what a pipeline on NCCL needs of CUDA
"""
