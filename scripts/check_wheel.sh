#!/usr/bin/env bash
# Build the sdist and the wheel, install the wheel into an empty environment, and use it there.
# Usage: scripts/check_wheel.sh PYTHON, where PYTHON has the package `build`
set -euo pipefail
python=$(realpath -s "$1")
cd "$(dirname "$0")/.."
constraints=$PWD/constraints.txt
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

rm -rf dist
"$python" -m build --outdir dist . >"$place/build.log" 2>&1 || { cat "$place/build.log"; exit 1; }
"$python" -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --constraint "$constraints" dist/*.whl
cd "$place" # so that nothing of the source tree is imported
venv/bin/ropaws --help >help.txt
grep --quiet "usage: ropaws COMMAND" help.txt
venv/bin/ropaws train --recipe demo --train.steps 10 --out run >train.log 2>&1 || { cat train.log; exit 1; }
test -s run/report.html
echo "wheel: installed into an empty environment, --help and a ten-step training with report work"
