#!/usr/bin/env bash
# Make (or renew) the Python environment for work on zbpp: .venv at the project's root, or $ZBPP_VENV.
#
#   bash scripts/setup.sh       make the environment, print how to activate it
#   source scripts/setup.sh     make it, activate it, set VENV (bash; the other scripts do this)
#
# It installs zbpp itself, editable, so that changes to the sources take effect at once; what zbpp needs (PyTorch, Hydra,
# numpy, matplotlib, ...); and the extra `dev`: the tools of scripts/test.sh and the optional packages that tests use.
# Versions are those of constraints.txt, for the CPU. For GPUs see CONTRIBUTING.md.
#
# $PYTHON chooses the interpreter (default python3; 3.11 or newer). If the environment is up to date, nothing is done.

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
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }  # the comment above
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

fail() {
    echo "setup: $*" >&2
    exit 1
}
works() { [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -c "" 2>/dev/null; }

# The stamp holds both places: the editable install points to the project, the scripts in the venv to the venv.
stamp=$({ pwd -P && echo "$VENV" && cat pyproject.toml constraints.txt; } | cksum)

if ! works || [[ $(cat "$VENV/zbpp.stamp" 2>/dev/null) != "$stamp" ]]; then
    command -v "$python" >/dev/null || fail "no '$python' here; install Python 3.11 or newer, or set PYTHON=/path/to/it"
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || fail "'$python' does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "'$python' is Python $version, zbpp needs 3.11 or newer; set PYTHON=/path/to/a/newer/python3"
    # --clear below would empty a folder of the user's.
    [[ -e $VENV/pyvenv.cfg || ! -e $VENV || -z $(ls -A -- "$VENV") ]] ||
        fail "$VENV is not empty and no virtual environment; set ZBPP_VENV to another folder"

    echo "setup: Python $version, installing into $VENV (a minute or more, mostly torch) ..."
    "$python" -m venv --clear "$VENV" # afresh: packages that are no longer required must go
    # -qq: errors only.
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
        fail "pip failed; its full account: $VENV/bin/python -m pip install -c constraints.txt -e '.[dev]'"
    echo "$stamp" >"$VENV/zbpp.stamp" # last: after an interruption the environment is not up to date
    echo "setup: installed in $SECONDS s"
fi

[[ ${1:-} == --no-hint ]] || echo "setup: up to date; activate with: source $VENV/bin/activate"
