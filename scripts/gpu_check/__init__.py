"""What zbpp does on ONE GPU, checked and measured within eight minutes, on one page, without the internet.

    python scripts/gpu_check.py --out DIR                  # all parts; the page is DIR/page.md
    python scripts/gpu_check.py split graphs --out DIR     # these parts only, beside what DIR has already
    python scripts/gpu_check.py --device cpu --small --out DIR    # tries the check itself, in a minute

    waits      what waits for the whole device: first products, allocations, loaded modules, tuning, graphs;
               with zbpp's settings of CUDA, and once more with CUDA's own (waits-lazy)
    ranks      2 and 4 ranks on this GPU, by links through host memory: losses and gradients of one process
    split      F, B and W of a layer and of five of Llama-3-8B, beside plain backward and torch's split
    graphs     host time of an action, eager and replayed; time and bytes of a graph
    compiled   F, B and W of a compiled layer, and how exact its gradients are
    nccl       a world of one: options, abort, a reduced layer and a sharded stage
    kernels    head, embedding and norm: time, peak, error against float64, equal bits three times
    offload    copies to host memory; a step with offloaded activations, and with offloaded weights
    tokens     tokens per second of a Llama of 1e9 weights: torch, one rank, two ranks on this GPU

Each part is a process of its own with a limit of its own and a file of its own in DIR, so that a crash or a
hang costs one part. Before the limit faulthandler writes where the part stands. When the time of --seconds is
up, the last parts are left out. A part that is run again writes another file. SIGTERM ends the part that
runs, and the page has what it has written: `timeout 570 python scripts/gpu_check.py --out DIR`.

A row has its prediction before its figure is measured: operations over the GPU's rate, bytes over its
bandwidth, by the datasheet. Exit status: 0, or 1 if a part failed, hung, or has a row that failed.
It runs from a clone, with a Python that has torch (2.11 or newer) and numpy. NOT RUN ON A GPU YET.
"""
