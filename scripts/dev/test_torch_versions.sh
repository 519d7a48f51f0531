#!/usr/bin/env bash
# The test suite on torch that zbpp works with: the oldest, the one of constraints.txt, the two newest.
#
#   bash scripts/dev/test_torch_versions.sh                          all of them, one after the other
#   TORCH="2.11 2.15" bash scripts/dev/test_torch_versions.sh -x     these; arguments go to pytest
#
# Makes one environment per version, .venvs/torch-VERSION at the project's root (or in $ZBPP_VENVS), with
# `pip install 'torch==VERSION.*' -e '.[dev]'` and constraints.txt for all but torch: about 5 GB each from PyPI,
# whose wheels bring CUDA along (set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the CPU's).
# Does not install again what is up to date. Prints each suite's closing line, then a table of them; logs are
# beside the environments. $PYTHON chooses the interpreter (default python3; 3.11 or newer).
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit
fi

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
unset PYTHONPATH PYTHONHOME
export OMP_NUM_THREADS=1 # tests start several ranks on few cores
export MPLBACKEND=Agg    # no display needed
venvs=${ZBPP_VENVS:-$PWD/.venvs}
read -r -a versions <<<"${TORCH:-2.11 2.13 2.14 2.15}"

# Makes or renews the environment in $2 for torch $1.
install() {
    local stamp
    stamp=$({ pwd -P && echo "$1 $2" && cat pyproject.toml constraints.txt; } | cksum)
    [[ $(cat "$2/zbpp.stamp" 2>/dev/null) == "$stamp" ]] && return
    echo "torch $1: installing into $2 (minutes, about 5 GB) ..."
    "${PYTHON:-python3}" -m venv --clear "$2" &&
        grep -v '^torch==' constraints.txt >"$2/constraints.txt" &&
        "$2/bin/python" -m pip install -qq --disable-pip-version-check -c "$2/constraints.txt" \
            "torch==$1.*" -e '.[dev]' &&
        echo "$stamp" >"$2/zbpp.stamp" # last: what was interrupted is not up to date
}

mkdir -p "$venvs"
failed=0
table=()
for version in "${versions[@]}"; do
    venv=$venvs/torch-$version
    log=$venv.log
    if ! install "$version" "$venv"; then
        table+=("$version  could not be installed")
        failed=1
        continue
    fi
    name=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
    marks="not nightly"
    "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || marks+=" and not gpu"
    echo "torch $name: testing; log: $log"
    # A -m among the arguments comes later and wins.
    "$venv/bin/python" -m pytest -q -m "$marks" "$@" >"$log" 2>&1 || failed=1
    grep -E '^(FAILED|ERROR) ' "$log" || true
    table+=("$name  $(tail -n 1 "$log")")
    echo "torch ${table[-1]}"
done

printf '\n%s\n' "torch"
printf '%s\n' "${table[@]}"
exit "$failed"
