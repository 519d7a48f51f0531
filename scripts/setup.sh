#!/usr/bin/env bash
# Make (or renew) zbpp's Python environment: .venv at the project's root, or $ZBPP_VENV.
#
#   bash scripts/setup.sh       make it, print how to activate it
#   source scripts/setup.sh     make it, activate it, set VENV (bash; what the other scripts do)
#
# $PYTHON chooses the interpreter (default python3; 3.11 or newer). Does nothing when up to date.
# CPU setup: versions come from constraints.txt. For GPUs see CONTRIBUTING.md.

# A foreign environment must not leak in: PYTHONPATH and PYTHONHOME would reach even a fresh venv's python.
unset PYTHONPATH PYTHONHOME

# Absolute, since callers change directory.
VENV=${ZBPP_VENV:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    # Sourced. The work runs in its own process: `set -e` inside a function called with || would not stop at errors,
    # and in the caller's shell it would end the terminal.
    ZBPP_VENV=$VENV bash "${BASH_SOURCE[0]}" --no-hint || return 1
    # shellcheck disable=SC1091  # made by the line before
    source "$VENV/bin/activate"
    return 0
fi

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

fail() {
    echo "setup: $*" >&2
    exit 1
}
works() { [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -c "" 2>/dev/null; }

# Both places are part of the stamp: the install points to the project, the venv's scripts to the venv.
stamp=$({ pwd -P && echo "$VENV" && cat pyproject.toml constraints.txt; } | cksum)

if ! works || [[ $(cat "$VENV/zbpp.stamp" 2>/dev/null) != "$stamp" ]]; then
    command -v "$python" >/dev/null || fail "no '$python' here; install Python 3.11 or newer, or set PYTHON=/path/to/it"
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || fail "'$python' does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "'$python' is Python $version, zbpp needs 3.11 or newer; set PYTHON=/path/to/a/newer/python3"
    # --clear below would empty it.
    [[ -e $VENV/pyvenv.cfg || ! -e $VENV || -z $(ls -A -- "$VENV") ]] ||
        fail "$VENV is not empty and no virtual environment; set ZBPP_VENV to another folder"

    echo "setup: Python $version, installing into $VENV (a minute or more, mostly torch) ..."
    "$python" -m venv --clear "$VENV" # afresh: what is no longer required must not linger
    # -qq: errors only.
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
        fail "pip failed; its full account: $VENV/bin/python -m pip install -c constraints.txt -e '.[dev]'"
    echo "$stamp" >"$VENV/zbpp.stamp" # last: what was interrupted is not up to date
    echo "setup: installed in $SECONDS s"
fi

[[ ${1:-} == --no-hint ]] || echo "setup: up to date; activate with: source $VENV/bin/activate"
