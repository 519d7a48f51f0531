#!/usr/bin/env bash
# Check a cluster of GPUs with zbpp under torchrun and NCCL, and print one table to send back:
# links between ranks and nodes, all schedules and mesh compositions against plain autograd, steps measured beside
# simulated ones and torch's runtime beside zbpp's, and a rank that stops.
#
#   bash scripts/cluster_check.sh                              all GPUs of this machine
#   bash scripts/cluster_check.sh --nnodes 4 --head node-1     the same line on each of four nodes
#   srun --nodes=4 --ntasks-per-node=1 bash scripts/cluster_check.sh      under Slurm: nodes and head are known
#   bash scripts/cluster_check.sh --small --device cpu --nproc 2          a trial on CPUs, with gloo
#
# With the environment of zbpp active ($PYTHON names another python). In a PyTorchJob nodes and head are known, too.
#
#   --nnodes N        nodes; 1 unless Slurm says more
#   --head HOST       the node where all meet, the same on each node
#   --port P          the first of the ports there (29600; each part takes the next one)
#   --join-timeout S  seconds that a node waits for the others (300; after the first part --timeout more)
#   --nproc N         processes on each node; default: one per GPU, or 2 with --device cpu
#   --out DIR         results: cluster.txt, cluster.json, a log of each part (cluster_check)
#   --parts A,B       of links,schedules,meshes,speed,hang; default: all
# Other arguments go to python -m zbpp.benchmark.cluster: see its --help (sizes, timeouts, --small, --device).
#
# Each part is a job of its own: one that dies costs its own rows only, and they say so. The status is 1 if a row
# FAILED. Time: a few minutes; a part whose ranks hang ends at --timeout. SIGINT (Ctrl-C) or SIGTERM ends all
# processes within seconds; the table then has what was measured, and the status is 130 or 143.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; } # the comment above

python=${PYTHON:-$(command -v python || command -v python3 || true)}
[[ -n $python ]] || { echo "cluster_check: there is no python here; set PYTHON=/path/to/python" >&2; exit 2; }
command -v -- "$python" >/dev/null || { echo "cluster_check: PYTHON=$python is no program" >&2; exit 2; }

# Before anything is imported: say in one line what is missing.
"$python" - <<'END' || exit 2
import importlib.util, sys

missing = [name for name in ("torch", "zbpp") if importlib.util.find_spec(name) is None]
has = "is Python {}.{}, zbpp needs 3.11 or newer".format(*sys.version_info) if sys.version_info < (3, 11) else ""
has = has or (missing and "has no " + " and no ".join(missing))
if has:
    sys.exit("cluster_check: {} {}: activate the environment of zbpp, or set PYTHON".format(sys.executable, has))
END
exec "$python" -m zbpp.benchmark.cluster.launch "$@"
