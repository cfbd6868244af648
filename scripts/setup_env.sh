#!/usr/bin/env bash
# Creates or refreshes .venv in the repository; made to be sourced.
#
#   source scripts/setup_env.sh
#   setup_env train        # a lock in scripts/locks: train (the demo) or dev (the tests); sets PYTHON to the interpreter
#
# All that is installed stands in the lock, with the hashes of its files; scripts/lock.sh writes them. Nothing is
# installed twice: each lock leaves a stamp with the checksum of what it was installed from.

# Wheels, and one that is published as its source, that are unpacked into .venv/upstream, without what
# they need: 5.5 MB to fetch. The tests read the Python files of all but the last, to hold our calls and
# stand-ins against the real signatures, and train with that, the other Megatron-core that the patches
# are reviewed for.
UPSTREAM=("transformer-engine==2.17.1" "flash-attn-4==4.0.0b11" "fla-core==0.6.0" "liger-kernel==0.8.5")
UPSTREAM+=("mamba-ssm==2.3.2.post1" "megatron-core==0.18.2")

repository() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd; }

say() { printf '%s\n' "$*" >&2; }

# Prints the path of a Python that runs Megatron-core 0.19 (3.12 or later), the best-tested version first.
find_python() {
  local candidate root
  local candidates=(python3.12 python3.13 python3.14 python3 python)
  for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
    [ -d "$root/versions" ] || continue
    for candidate in "$root"/versions/3.1[2-9]*/bin/python; do
      [ -x "$candidate" ] && candidates+=("$candidate")
    done
  done
  for candidate in "${candidates[@]}"; do
    # Running it is the test: a pyenv shim exists on PATH also for a version that is not selected.
    "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; print(sys.executable)'
    return 0
  done
  say "error: no Python 3.12 or later with venv found on PATH or under pyenv; Megatron-core 0.19 needs one."
  say "       Install it with 'pyenv install 3.12' or your system's packages (python3.12 and python3.12-venv), then run this again."
  return 1
}

# Installs a lock and, in place, the package itself; what it needs to be built is in the lock, too.
install_lock() {
  "$PYTHON" -m pip install -qq --no-deps --require-hashes --requirement "scripts/locks/$1.txt" &&
    "$PYTHON" -m pip install -qq --no-deps --no-build-isolation --editable .
}

# Prints the entry of one requirement of a lock: its line and the hashes below it.
locked() { awk -v "wanted=$2" '/^[a-z]/ { found = $1 == wanted } found && !/#/' "$1"; }

# Unpacks the Python files of the wheels in UPSTREAM into .venv/upstream, and the compiled ones of
# Megatron's data sets. A wheel that cannot be had is no error: the tests that need it skip, and say so.
unpack_upstream() {
  local folder=$1 one wheels entry status=0
  wheels=$(mktemp -d) || return 1
  rm -rf "$folder"
  mkdir -p "$folder"
  for one in "${UPSTREAM[@]}"; do
    entry="$wheels/${one%%=*}.txt"
    locked "$(repository)/scripts/locks/upstream.txt" "$one" >"$entry"
    # Of a source pip wants the name and version that it says itself, so it is asked, and builds nothing.
    if ! MAMBA_SKIP_CUDA_BUILD=TRUE "$PYTHON" -m pip download -qq --no-deps --only-binary :all: \
      --no-binary mamba-ssm --no-build-isolation --dest "$wheels" --require-hashes --requirement "$entry" >&2; then
      say "The wheel of $one could not be had; the tests that need it will skip."
      status=1
    fi
  done
  "$PYTHON" - "$wheels" "$folder" <<'PROGRAM' || status=1
import pathlib, sys, tarfile, zipfile

wheels, folder = map(pathlib.Path, sys.argv[1:])
for wheel in sorted(wheels.glob("*.whl")):
    target = folder / "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as archive:
        wanted = (".py", ".so") if wheel.name.startswith("megatron_core-") else ".py"
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(wanted)])
for source in wheels.glob("*.tar.gz"):
    with tarfile.open(source) as archive:
        archive.extractall(folder, [each for each in archive if each.name.endswith(".py")], filter="data")
PROGRAM
  rm -rf "$wheels"
  return "$status"
}

# Prints what pyproject.toml says about the build and the package; the tools' settings install nothing.
metadata() {
  "$PYTHON" - "$1" <<'PROGRAM'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    settings = tomllib.load(file)
print(settings["build-system"], settings["project"], settings["tool"]["setuptools"])
PROGRAM
}

setup_env() {
  local lock=$1 top python wanted stamp started
  top=$(repository)
  PYTHON="$top/.venv/bin/python"
  if ! "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    python=$(find_python) || return 1
    say "Creating .venv with $("$python" --version)"
    rm -rf "$top/.venv"
    "$python" -m venv "$top/.venv" || { say "error: '$python -m venv .venv' failed; see above."; return 1; }
  fi
  wanted=$({ metadata "$top/pyproject.toml"; cat "$top/scripts/setup_env.sh" "$top/scripts/locks/$lock.txt"; "$PYTHON" --version; echo "$top"; } | cksum)
  stamp="$top/.venv/.installed-$lock"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    started=$SECONDS
    say "Installing $(grep -c '^[a-z]' "$top/scripts/locks/$lock.txt") packages of scripts/locks/$lock.txt into .venv, by hash (torch alone is some gigabytes the first time) ..."
    (cd "$top" && install_lock "$lock") || { say "error: installing scripts/locks/$lock.txt failed; pip's message is above."; return 1; }
    echo "$wanted" >"$stamp"
    say "Installed in $((SECONDS - started)) s"
  fi
  stamp="$top/.venv/.installed-upstream"
  if [ "$lock" = dev ] && [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if unpack_upstream "$top/.venv/upstream"; then echo "$wanted" >"$stamp"; fi
  fi
}
