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
#   --nproc N         processes on each node; default: one per GPU, or 2 with --device cpu
#   --out DIR         results: cluster.txt, cluster.json, a log of each part (cluster_check)
#   --parts A,B       of links,schedules,meshes,speed,hang; default: all
# Other arguments go to python -m zbpp.benchmark.cluster: see its --help (sizes, timeouts, --small, --device).
#
# Each part is a job of its own: one that dies costs its own rows only, and they say so. The status is 1 if a row
# FAILED. Time: a few minutes; a part whose ranks hang ends at --timeout.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; } # the comment above

fail() {
    echo "cluster_check: $*" >&2
    exit 2
}
python=${PYTHON:-python}
nnodes=${SLURM_JOB_NUM_NODES:-${PET_NNODES:-1}} head=${PET_RDZV_ENDPOINT:-} port=29600 nproc='' out=cluster_check parts='' device=auto small=''
nnodes=${nnodes##*:} head=${head%:*} # a PyTorchJob says 4:4, and host:port
unset "${!PET_@}"                    # torchrun would read them beside its arguments
rest=()
while (($#)); do
    case $1 in
    --nnodes | --head | --port | --nproc | --out | --parts | --device)
        [[ $# -ge 2 ]] || fail "$1 needs a value"
        printf -v "${1#--}" '%s' "$2"
        [[ $1 != --device ]] || rest+=("$1" "$2")
        shift 2
        ;;
    --small) small=yes rest+=("$1") && shift ;;
    *) rest+=("$1") && shift ;;
    esac
done
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "--nnodes $nnodes: write a number of nodes"
[[ $port =~ ^[1-9][0-9]*$ ]] || fail "--port $port: write a port"
if [[ -z $nproc ]]; then
    [[ $device == cpu ]] && nproc=2 || nproc=gpu
fi
if [[ -z $head && -n ${SLURM_JOB_NODELIST:-} ]]; then
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
fi
((nnodes == 1)) || [[ $head ]] || fail "--nnodes $nnodes needs --head, a node that all reach"
"$python" -c 'import zbpp' || fail "zbpp is not installed for '$python': activate its environment or set PYTHON"

# A wrong argument is told once, before anything starts; groups: the parts that share a job.
if [[ $parts ]]; then
    "$python" -m zbpp.benchmark.cluster --out "$out" --parts "$parts" --check-arguments ${rest[@]+"${rest[@]}"}
    IFS=, read -ra groups <<<"$parts"
else
    "$python" -m zbpp.benchmark.cluster --out "$out" --check-arguments ${rest[@]+"${rest[@]}"}
    groups=(links schedules meshes speed hang)
    [[ -z $small ]] || groups=("links,schedules,meshes,speed" hang)
fi
mkdir -p -- "$out"
# Only files that this script writes: the folder may be the user's own.
rm -f -- "$out"/rows-*.jsonl "$out"/hang/{begin,said-*,flight-rank-*}.json "$out/first-node"
printf '%s\n' "${groups[@]//,/ }" >"$out/parts"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
number=0
for group in "${groups[@]}"; do
    place=(--rdzv-backend=c10d --rdzv-id="cluster-check-${SLURM_JOB_ID:-0}-$number")
    if ((nnodes > 1)); then
        place+=(--nnodes="$nnodes" --rdzv-endpoint="$head:$((port + number))")
    else
        place=(--standalone)
    fi
    log=$out/${group%%,*}.log
    echo "cluster_check: $group (log: $log) ..." >&2
    "$python" -m torch.distributed.run "${place[@]}" --nproc-per-node="$nproc" \
        -m zbpp.benchmark.cluster --out "$out" --parts "$group" ${rest[@]+"${rest[@]}"} >"$log" 2>&1 || true
    number=$((number + 1))
done

# The node of rank 0 prints the table: the others have only a part of it, unless all see one folder.
if [[ ! -e $out/first-node || ${SLURM_NODEID:-0} != 0 ]] && compgen -G "$out/rows-*.jsonl" >/dev/null; then
    echo "cluster_check: the table is on the node of rank 0" >&2
    exit 0
fi
status=0
"$python" -m zbpp.benchmark.cluster --out "$out" --report ${rest[@]+"${rest[@]}"} || status=$?
echo "cluster_check: please send $out/cluster.txt and $out/cluster.json" >&2
exit "$status"
