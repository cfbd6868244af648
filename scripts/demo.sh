#!/usr/bin/env bash
# Sets up .venv and pretrains a small GPT on real documents inside Megatron's own loop, eight CPU ranks as two nodes of four,
# once with Transformer Engine's ring and once with Zeppelin's plan; prints one table and writes one page. Safe to run again.
# Options go to scripts/demo.py: ./scripts/demo.sh --steps 10
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
setup_env train

# One thread per rank: eight ranks share this machine's cores. Megatron asks for one device connection; its jit needs a compiler.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
exec "$PYTHON" scripts/demo.py "$@"
