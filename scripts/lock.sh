#!/usr/bin/env bash
# Writes scripts/locks/*.txt anew: every package that the set-up and the image install, with the hashes of its files.
#
#   ./scripts/lock.sh              # keeps versions that still fit
#   ./scripts/lock.sh --upgrade    # takes the newest; run the tests behind it
#
# One lock serves Python 3.12 and later on every platform (--universal); which package index the files come from
# is not in it. uv resolves, in an environment of its own under .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

# What the tests and the demo were measured with. pyproject.toml allows more; a cluster brings its own torch.
TESTED_TORCH="torch==2.13.0"
TESTED_MEGATRON="megatron-core==0.19.2"
TESTED_TRAINERS=("transformers==5.23.0" "trl==1.16.0" "accelerate==1.15.0" "peft==0.21.2" "datasets==4.7.0" "torchtitan==0.3.0")
PYDANTIC=(pydantic pydantic-core annotated-types typing-inspection)
# From pyproject.toml's minimum up, and below where Megatron 0.19 caps it for what Transformer Engine imports.
PYDANTIC_OF_IMAGE=">=2.7,<2.14"

UV="uv==0.13.9"
locks=scripts/locks
tools=.venv/lock
python=$(find_python)
[ -x "$tools/bin/uv" ] || "$python" -m venv "$tools"
"$tools/bin/python" -m pip install -qq "$UV"

# lock NAME ARGUMENT...: what uv reads, and its further arguments, into one lock.
lock() {
  local name=$1
  shift
  "$tools/bin/uv" pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
    --no-header --annotation-style line --output-file "$locks/$name.txt" "$@"
  # of what uv says about where a requirement comes from, keep the packages
  sed -i -E '/^    # via /{s/-[cr] [^ ,]+(, )?//g; s/ \(pyproject\.toml\)//g; s/, *$//}; /^    # via *$/d' "$locks/$name.txt"
  say "$locks/$name.txt: $(grep -c '^[a-z]' "$locks/$name.txt") packages"
}

pins() { printf '%s\n' "$TESTED_TORCH" "$TESTED_MEGATRON" "setuptools>=77"; }

# Of the others, versions are those of dev: an environment for the tests also serves the demo.
lock dev --extra train --extra hf --extra titan --extra dev "$@" pyproject.toml - < <(pins; printf '%s\n' "${TESTED_TRAINERS[@]}")
versions() { grep -oE '^[a-z0-9._-]+==[^ ]+' "$locks/dev.txt"; }
# The demo ends with a report.
lock train --extra train --extra report --constraint <(versions) pyproject.toml - < <(pins)
# The image's base brings torch and NumPy, which belong together, and mostly a pydantic that serves.
lock image --constraint <(versions) --excludes <(printf '%s\n' torch numpy "${PYDANTIC[@]}") pyproject.toml - \
  < <(printf '%s\n' "$TESTED_MEGATRON" psutil)
# Where it does not: one below the cap of Megatron's own pyproject.toml.
lock pydantic --constraint <(versions | grep -vE '^pydantic') - <<<"pydantic$PYDANTIC_OF_IMAGE"
lock gurobi --constraint <(versions) - <<<gurobipy
# What builds the package, where the environment is not ours.
lock build --constraint <(versions) - <<<"setuptools>=77"
# Never installed: unpacked for the tests, without what they need.
lock upstream --no-deps - < <(printf '%s\n' "${UPSTREAM[@]}")
