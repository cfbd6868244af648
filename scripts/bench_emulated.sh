#!/usr/bin/env bash
# Measures the ablation of Zeppelin's Fig. 11 inside Megatron's own loop, on two emulated nodes with shaped NICs; prints one table a topology.
# Needs Linux namespaces (root, or a kernel that permits user namespaces); says so where they are not permitted.
# Options go to tools.bench.emulated: ./scripts/bench_emulated.sh --quick
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
setup_env train

# One thread per rank: eight ranks share this machine's cores. Megatron asks for one device connection; its jit needs a compiler.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
exec "$PYTHON" -m tools.bench.emulated "$@"
