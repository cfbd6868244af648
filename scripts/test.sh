#!/usr/bin/env bash
# Everything continuous integration checks: format, lint, spelling, types, layers, all tests that need no GPU.
# Arguments go to pytest: ./scripts/test.sh -k zeppelin; the cases that others stand for: ./scripts/test.sh -m product
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
setup_env dev

step() { printf '\n== %s\n' "$1" >&2; }
bin=.venv/bin

step "format";   "$bin/ruff" format --check .
step "lint";     "$bin/ruff" check .
step "spelling"; "$bin/codespell"
step "types";    "$bin/pyright" --pythonpath "$PYTHON"
step "layers";   "$bin/lint-imports"
step "site";     "$bin/mkdocs" build --strict --quiet

step "tests"
# One thread per rank: many ranks share the cores. Megatron asserts on one device connection; the jit fuser needs a compiler.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
unset PYTHONDONTWRITEBYTECODE  # else every worker, and every process that a test starts, compiles our sources again
checks=("$PYTHON" -m pytest --hypothesis-profile=ci -m "not gpu and not product" --durations 15)
if [ $# -gt 0 ]; then
  exec "${checks[@]}" "$@"
fi
# Tests of one file stay together and in order, files in the order of their folders: xdist would begin with those of
# most cases, and the longest have few. The emulated cluster measures seconds, so nothing runs beside it.
"${checks[@]}" --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore tests/emulated
exec "${checks[@]}" tests/emulated
