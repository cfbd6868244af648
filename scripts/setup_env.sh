#!/usr/bin/env bash
# Creates or refreshes .venv in the repository; made to be sourced.
#
#   source scripts/setup_env.sh
#   setup_env train dev        # extras of pyproject.toml; sets PYTHON to the environment's interpreter
#
# Nothing is installed twice: each extra leaves a stamp with the checksum of what it was installed from.

# What the tests and the demo were measured with. pyproject.toml allows more; a cluster brings its own torch.
TESTED_TORCH="torch==2.13.0"
TESTED_MEGATRON="megatron-core==0.19.2"

# Wheels whose Python files the tests read, to hold our calls against the real signatures. They are
# unpacked into .venv/upstream, without what they need, and never imported: 1.5 MB to fetch.
UPSTREAM=("transformer-engine==2.17.1" "flash-attn-4==4.0.0b11")

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

install_extra() {
  local extra=$1
  case "$extra" in
    base) "$PYTHON" -m pip install -qq --editable . ;;
    train)
      # --no-deps: the wheel alone is what is needed, torch is pinned by us.
      "$PYTHON" -m pip install -qq "$TESTED_TORCH" numpy packaging psutil &&
        "$PYTHON" -m pip install -qq --no-deps "$TESTED_MEGATRON"
      ;;
    *) "$PYTHON" -m pip install -qq --editable ".[$extra]" ;;
  esac
}

# Unpacks the Python files of the wheels in UPSTREAM into .venv/upstream. A wheel that cannot be had is
# no error: the tests that read it skip, and say so.
unpack_upstream() {
  local folder=$1 one wheels status=0
  wheels=$(mktemp -d) || return 1
  rm -rf "$folder"
  mkdir -p "$folder"
  for one in "${UPSTREAM[@]}"; do
    if ! "$PYTHON" -m pip download -qq --no-deps --only-binary :all: --dest "$wheels" "$one" >&2; then
      say "The wheel of $one could not be had; the tests that read its signatures will skip."
      status=1
    fi
  done
  "$PYTHON" - "$wheels" "$folder" <<'PROGRAM' || status=1
import pathlib, sys, zipfile

wheels, folder = map(pathlib.Path, sys.argv[1:])
for wheel in sorted(wheels.glob("*.whl")):
    target = folder / "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
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
  local top python wanted extra stamp started
  top=$(repository)
  PYTHON="$top/.venv/bin/python"
  if ! "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    python=$(find_python) || return 1
    say "Creating .venv with $("$python" --version)"
    rm -rf "$top/.venv"
    "$python" -m venv "$top/.venv" || { say "error: '$python -m venv .venv' failed; see above."; return 1; }
  fi
  wanted=$({ metadata "$top/pyproject.toml"; cat "$top/scripts/setup_env.sh"; "$PYTHON" --version; echo "$top"; } | cksum)
  for extra in base "$@"; do
    stamp="$top/.venv/.installed-$extra"
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && continue
    started=$SECONDS
    say "Installing '$extra' into .venv (torch alone is some gigabytes the first time) ..."
    (cd "$top" && install_extra "$extra") || { say "error: installing '$extra' failed; pip's message is above."; return 1; }
    echo "$wanted" >"$stamp"
    say "Installed '$extra' in $((SECONDS - started)) s"
  done
  stamp="$top/.venv/.installed-upstream"
  if [[ " $* " == *" dev "* ]] && [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if unpack_upstream "$top/.venv/upstream"; then echo "$wanted" >"$stamp"; fi
  fi
}
