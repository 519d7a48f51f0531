#!/usr/bin/env bash
# The main job on any machine: train a small GPT on 4 processes under 1F1B and under ZB-H1, compare the losses, then
# time the schedules on emulated stages. A few minutes on 2 cores, installation included.
#
#   bash scripts/demo.sh [FOLDER]     results go to FOLDER (default: runs/demo)
#
# $ZBPP_DEMO_STEPS sets the training steps (default 150); $ZBPP_VENV and $PYTHON are explained by setup.sh --help.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }  # the comment above
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

export OMP_NUM_THREADS=1 # four ranks share the cores
runs=${1:-runs/demo}
steps=${ZBPP_DEMO_STEPS:-150}

for schedule in 1f1b zb_h1; do
    echo
    echo "== train gpt_tiny on 4 processes under $schedule (real data: the Python standard library's sources)"
    "$VENV/bin/zbpp" train -n 4 \
        schedule=$schedule model=gpt_tiny steps="$steps" optimizer.learning_rate=3e-3 \
        evaluate_every="$steps" parallel.device=cpu seed=0 run_dir="$runs/$schedule" overwrite=true
done

echo
echo "== compare the two runs"
"$VENV/bin/zbpp" compare "$runs/1f1b" "$runs/zb_h1"

echo
echo "== the schedules' true shape: four ranks that sleep instead of computing, since two cores can't compute for four"
"$VENV/bin/zbpp" bench device=cpu run_dir="$runs/bench" overwrite=true

echo
echo "pictures: $runs/1f1b/timeline.png  $runs/zb_h1/timeline.png  $runs/bench/bench.png"
echo "traces for ui.perfetto.dev: $runs/zb_h1/trace.json  $runs/bench/trace.json"
