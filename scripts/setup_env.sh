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
}
