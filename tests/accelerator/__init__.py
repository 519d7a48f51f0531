"""An accelerator for machines without one: a device whose operations the CPU computes.

A CPU build of torch knows the device types CUDA and PrivateUse1 but has no kernels for them. The library in
csrc/ registers a fallback for one of them: it sees the same memory as CPU tensors, calls the CPU's kernel,
and gives the results back as the device's tensors. So `tensor.device.type == "cuda"` and every branch behind
it run on any machine. A process has the device under one of two names:

    name   what it is                                                   its collectives
    cuda   torch.cuda, as on a GPU of NVIDIA's                          gloo, nccl
    npu    a device of PrivateUse1, as a package beside torch brings    gloo, hccl

`helpers.processes.run_ranks(function, 2, device="npu", backend="hccl")` runs a function in processes that
have it, and `processes.environment("cuda")` gives it to other programs. nccl and hccl keep NCCL's rules, see
helpers/nccl_rules.py.

What such a device has that tests on CPU tensors lack
- Tensors of two devices in one operation are refused. There are four devices; each thread has a current one.
- Backward runs on the device's thread of autograd. Each device has a generator of its own.
- New memory is not zero. Memory is counted by device. The first use of a device by a process is reported.
- The host's waits are counted, with their stacks: `reports.waits`.
- A copy to pinned memory has no result until the host has waited for it; until then the memory holds NaN.
- Streams have clocks, which events join: an access to memory that no event orders is a fault. A function that
  `run_ranks` has called fails if there was one.
- CUDA graphs record operations, and replay them on the same memory.

What it has not: kernels of its own (rounding is the CPU's), work that goes on while the host does, Inductor.

The first use builds the library, which takes about a minute of a core, and keeps it: see build.py.
"""
