"""What zbpp does on one GPU, checked and measured within minutes: `bash scripts/gpu_check.sh`.

The check has parts. On a GPU each part runs in a process of its own, so that one which fails, takes too long
or loses its device takes no other part with it; and each has its share of the time.

    tests       the tests that need a GPU
    split       the split beside plain backward and torch's split, on a stage of 1e9 weights in bfloat16
    graphs      CUDA graphs beside eager actions
    schedules   a pipeline of one rank under every schedule: losses and gradients compared
    offload     the bandwidth of copies to host memory, and the share of their time that computation hides
    kernels     kernels and host time of each kind of action

A part yields rows. A row may be compared with a mark: held, not held, or not measured.
NOT RUN ON A GPU YET: `--device cpu --small` runs the same code on small sizes.
"""

# Where it is: settings.py, workload.py (the model of several parts), rows.py (rows and what became of a
# part), marks.py; a file for each part, and stage_graphs.py beside split.py; parts.py (names and times),
# budget.py (shares times out), run.py (runs a part, in a process or here), check.py (runs all of them),
# machine.py, report.py (text, JSON, page), command_line.py.
