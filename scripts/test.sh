#!/usr/bin/env bash
# Lint, format, types, tests. Arguments go to pytest: bash scripts/test.sh -k name
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

export OMP_NUM_THREADS=1 # tests start several ranks on few cores
export MPLBACKEND=Agg    # no display needed

# The HTML page is tested in a browser: root on Debian gets one, in the background. Without one those tests are skipped.
get_chromium() {
    [[ -z ${CHROMIUM:-} && $(id -u) == 0 ]] || return
    command -v chromium chromium-browser google-chrome chrome && return
    apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 update || return
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
}
get_chromium </dev/null &>/dev/null &

# All four run even if one fails, so that one call shows everything.
failed=()
"$VENV/bin/ruff" check || failed+=("ruff check")
"$VENV/bin/ruff" format --check || failed+=("ruff format --check")
"$VENV/bin/mypy" || failed+=("mypy")

marks=""
if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    marks="not gpu" # a -m among the arguments comes later and wins
fi
wait # for get_chromium
"$VENV/bin/python" -m pytest -m "$marks" "$@" || failed+=("pytest")

# Silent when all is well: pytest's closing line is the last one.
if ((${#failed[@]})); then
    printf 'test: FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
