#!/usr/bin/env bash
# Build the sdist, the wheel from the sdist, look into both, install the wheel with pipx into an empty environment,
# and use it there. Usage: scripts/check_wheel.sh PYTHON, where PYTHON has the package `build`
set -euo pipefail
python=$(realpath -s "$1")
cd "$(dirname "$0")/.."
constraints=$PWD/constraints.txt
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

rm -rf dist
# Without --wheel or --sdist, `build` makes the wheel from the sdist: that one is complete.
"$python" -m build --outdir dist . >"$place/build.log" 2>&1 || { cat "$place/build.log"; exit 1; }
"$python" scripts/check_dist.py dist

# pipx and what it keeps go to the temporary folder.
export PIPX_HOME=$place/pipx PIPX_BIN_DIR=$place/bin PIPX_MAN_DIR=$place/man
"$python" -m venv "$place/tools"
"$place/tools/bin/pip" install --quiet pipx
"$place/tools/bin/pipx" install --quiet --python "$python" --pip-args "--constraint $constraints" dist/*.whl >"$place/pipx.log" 2>&1 ||
    { cat "$place/pipx.log"; exit 1; }
cd "$place" # so that nothing of the source tree is imported
bin/ropaws --help >help.txt
grep --quiet "usage: ropaws COMMAND" help.txt
bin/ropaws train --recipe demo --train.steps 10 --out run >train.log 2>&1 || { cat train.log; exit 1; }
test -s run/report.html
bin/ropaws export run --format torch --card >export.log 2>&1 || { cat export.log; exit 1; }
test -s run/model.pt2 -a -s run/README.md
if bin/ropaws export run --format onnx >onnx.log 2>&1; then echo "onnx was not expected to be there"; exit 1; fi
grep --quiet "pip install 'ropaws\[export\]'" onnx.log
echo "wheel: from the sdist, installed with pipx into an empty environment; --help, a ten-step training with report and export work"
