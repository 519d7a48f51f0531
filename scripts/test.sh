#!/usr/bin/env bash
# Check everything: ruff check, ruff format, mypy, pip check (do the packages fit together?), pytest. All run, even if
# one of them fails.
#
#   bash scripts/test.sh                arguments go to pytest:
#   bash scripts/test.sh -k name        the tests with this name
#   bash scripts/test.sh -m gpu         those that need a GPU; without a GPU they are left out
#   bash scripts/test.sh -m nightly     those that kill, restart and damage jobs; left out by default
#   bash scripts/test.sh -n 0 -s        in one process, where output is seen at once; --pdb implies it
#
# It installs two things. The Python environment: see setup.sh --help. And, only for root on Debian or Ubuntu without a
# browser, the package `chromium`: the HTML page that zbpp draws is tested in a real browser; without one those tests
# are skipped. $CHROMIUM names a browser, and nothing is installed.
#
# The tests compile an emulated accelerator (tests/accelerator) once, a minute of a core. It needs g++ and Python.h: on
# Debian the packages g++ and python3-dev. Without them the tests that run on it are skipped.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }  # the comment above
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

export OMP_NUM_THREADS=1      # tests start several ranks on few cores
export MPLBACKEND=Agg         # no display needed
unset PYTHONDONTWRITEBYTECODE # each of the many processes would compile zbpp anew

# In the background: linting and types take as long.
get_chromium() {
    [[ -z ${CHROMIUM:-} && $(id -u) == 0 ]] || return
    command -v chromium chromium-browser google-chrome chrome && return
    apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 update || return
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
}
get_chromium </dev/null &>/dev/null &

failed=()
"$VENV/bin/ruff" check || failed+=("ruff check")
"$VENV/bin/ruff" format --check || failed+=("ruff format --check")
"$VENV/bin/mypy" || failed+=("mypy")
"$VENV/bin/python" -m pip check >/dev/null || failed+=("pip check")

marks="not nightly" # a -m among the arguments comes later and wins
if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    marks+=" and not gpu"
fi
wait # for get_chromium
# One worker more than cores, as ranks wait for each other; more than four gain nothing. loadfile: the tests of a file
# share what its fixtures start. The order of the files is that of tests/conftest.py. A worker that dies, as at a time
# limit, is replaced once; the test that it ran is among the failures at the end. With OMP_NUM_THREADS=1 nproc says 1.
cores=$(env --unset OMP_NUM_THREADS nproc)
workers=(-n $((cores < 4 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder --max-worker-restart 1)
"$VENV/bin/python" -m pytest "${workers[@]}" -m "$marks" "$@" || failed+=("pytest")

# Silent when all is well: pytest's closing line is the last one.
if ((${#failed[@]})); then
    printf 'test: FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
