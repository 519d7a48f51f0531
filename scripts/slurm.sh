#!/usr/bin/env bash
# Train on several nodes, over as many jobs as it takes. Submit with the environment active; arguments are those
# of `zbpp train`:
#
#   sbatch --nodes=4 scripts/slurm.sh schedule=zb_h1 model=llama_1b num_microbatches=64 parallel.tensor=8 \
#       run_dir=/shared/runs/a checkpoint.every=500
#
# run_dir must be on a file system that all nodes see. Five minutes before the time limit Slurm sends SIGUSR1:
# the ranks save and leave, and this script puts the job back into the queue, where it resumes, unless the run
# finished meanwhile.
#SBATCH --job-name=zbpp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# One task per node: torchrun, which starts one rank per GPU. cpus-per-task: all cores of a node.
# signal: to this script alone (B:), so many seconds before the end; a step and saving must fit in.
set -euo pipefail

# sbatch runs a copy of this file from a spool folder: models and configs of yours are where it was submitted.
cd -- "${SLURM_SUBMIT_DIR:?start this with sbatch}"
python -c 'import zbpp' || { echo "slurm: zbpp is not installed in the active environment" >&2; exit 1; }

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# From the job's id, so that two jobs with one head node get two ports; below Linux' ephemeral ports (32768 and up).
port=$((15000 + SLURM_JOB_ID % 15000))

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # eight ranks share a node's cores
export PYTHONUNBUFFERED=1                    # the last lines before a crash reach the log

export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # NCCL says why it fails; INFO: which network it takes
# Settings that some networks need: docs/parallel.md has the reasons.
# export NCCL_SOCKET_IFNAME=ib0  # the interface by which ranks find each other; for gloo: GLOO_SOCKET_IFNAME
# export NCCL_IB_HCA=mlx5        # which InfiniBand cards
# export NCCL_CROSS_NIC=1        # networks whose switches connect all cards with each other

warned='' interrupted=''
# shellcheck disable=SC2317,SC2329  # the trap calls it
warn() {
    warned=yes interrupted=yes
    echo "slurm: the time is nearly over: the ranks save and leave"
    # srun passes the signal on to all processes of its step: the ranks take it, torchrun ignores it (see below).
    kill -USR1 "$step"
}

# srun does not inherit --cpus-per-task (Slurm 22.05 and newer): without it all ranks of a node share one core.
# rdzv-id with the restart count: a requeued job keeps its id, and must not meet its former self.
# trap '' USR1: torchrun would die of the signal. What is ignored stays ignored in torchrun; ranks set handlers.
# shellcheck disable=SC2016  # $@ is for the inner shell
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1; exec "$@"' torchrun \
    python -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${ZBPP_RANKS_PER_NODE:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max-restarts="${ZBPP_MAX_RESTARTS:-3}" \
    -m zbpp.train "$@" &
step=$!
trap warn USR1

# A signal ends `wait` early, while the step goes on.
while true; do
    interrupted='' status=0
    wait "$step" || status=$?
    [[ $interrupted ]] || break
done

# The run may have finished in the last minutes: its summary says why the run was left, if that was so.
run_dir=''
for argument in "$@"; do
    [[ $argument == run_dir=* ]] && run_dir=${argument#run_dir=}
done
is_over() {
    [[ $run_dir && -f $run_dir/summary.json ]] &&
        ! grep -Eq '"left": "(SIG|the time limit)' "$run_dir/summary.json"
}

if [[ $warned && $status == 0 ]] && is_over; then
    echo "slurm: the run is over: the job does not go back into the queue"
elif [[ $warned && $status == 0 ]]; then
    echo "slurm: back into the queue, to go on from the last checkpoint (resume=auto, the default)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
