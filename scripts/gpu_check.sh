#!/usr/bin/env bash
# What zbpp does on ONE GPU, checked and measured within 8 minutes, without the internet: see --help.
#
#   bash scripts/gpu_check.sh                         writes scripts/results/gpu_NAME.txt, .json and .md
#   bash scripts/gpu_check.sh split offload           these parts only
#   bash scripts/gpu_check.sh --minutes 3             in less time: parts that don't fit are skipped
#   bash scripts/gpu_check.sh --device cpu --small    tries the check itself, in less than a minute
#
# It installs nothing, and runs with the Python that has torch: $PYTHON, else the active environment's python, else
# python3. --out DIR writes elsewhere. Exit status: 0 if no mark was missed, 1 if one was, 2 if it could not run.
# SIGINT (Ctrl-C) or SIGTERM ends it within seconds: it writes what was measured until then, with status 130 or 143.
set -euo pipefail
clone=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)
export PYTHONSAFEPATH=1 # else Python would look for modules in the caller's folder first

python=${PYTHON:-$(command -v python || command -v python3 || true)}
[[ -n $python ]] || { echo "gpu_check: there is no python here; set PYTHON=/path/to/python" >&2; exit 2; }
command -v -- "$python" >/dev/null || { echo "gpu_check: PYTHON=$python is no program" >&2; exit 2; }

# Before anything of zbpp is imported: say at once all that is missing.
"$python" - <<'EOF' || exit 2
import importlib.metadata, importlib.util, re, sys

def end(*lines):
    print(*(f"gpu_check: {line}" for line in lines), sep="\n", file=sys.stderr)
    sys.exit(2)

if sys.version_info < (3, 11):
    end(f"{sys.executable} is Python {sys.version.split()[0]}, zbpp needs 3.11 or newer: set PYTHON=/path/to/it")
missing = [name for name in ("torch", "numpy", "rich") if importlib.util.find_spec(name) is None]
if missing:
    end(f"{sys.executable} has no {', '.join(missing)}: install these packages, or set PYTHON=/path/to/a python that has them")
version = importlib.metadata.version("torch")
if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 11):
    end(f"torch {version} is installed, zbpp needs 2.11 or newer")
if importlib.util.find_spec("pytest") is None:
    print("gpu_check: without pytest the part `tests` is left out", file=sys.stderr)
EOF

export PYTHONPATH=$clone${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m zbpp.benchmark.gpu --out "$clone/scripts/results" "$@"
