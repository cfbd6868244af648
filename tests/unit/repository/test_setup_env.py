"""scripts/setup_env.sh: finds a Python that is new enough, or says what to install."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ended

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup_env.sh"
# The answer of an interpreter that is too old, or of a pyenv shim without a version, to any check.
OLD = "#!/bin/sh\nexit 1\n"

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="the interpreter that is found must be 3.12 or later"
)


def find_python(home: Path, path: Path) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash
    environment = {"HOME": str(home), "PATH": str(path)}
    return ended([bash, "-c", f"source {SCRIPT}; find_python"], env=environment)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def forwarding() -> str:
    return f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def test_a_wheel_that_cannot_be_had_is_said_and_leaves_the_others(tmp_path):
    """The program in place of Python has a package index with one wheel of two."""
    copy = 'while [ "$1" != --dest ]; do shift; done; cp "$WHEELS"/*.whl "$2"'
    fetch = f'case "$*" in *pip*flash*) exit 1;; *pip*) {copy};; *) exec "$REAL" "$@";; esac'
    program(tmp_path / "python", f"#!/bin/bash\n{fetch}\n")
    with zipfile.ZipFile(tmp_path / "transformer_engine-2.17.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("transformer_engine/a.py", "x = 1")
        wheel.writestr("transformer_engine/a.so", "binary")
    with zipfile.ZipFile(tmp_path / "megatron_core-0.18.2-cp312-cp312-manylinux.whl", "w") as wheel:
        wheel.writestr("megatron/helpers.so", "binary")
        wheel.writestr("megatron/helpers.cpp", "text")
    done = ended(
        [
            shutil.which("bash") or "bash",
            "-c",
            f"source {SCRIPT}; PYTHON={tmp_path}/python; unpack_upstream {tmp_path}/up",
        ],
        env={"PATH": os.environ["PATH"], "WHEELS": str(tmp_path), "REAL": sys.executable},
    )
    assert done.returncode == 1
    assert "The wheel of flash-attn-4==4.0.0b11 could not be had; the tests that need it will skip." in done.stderr
    unpacked = {path.relative_to(tmp_path / "up") for path in (tmp_path / "up").rglob("*") if path.is_file()}
    compiled = "megatron_core-0.18.2/megatron/helpers.so"
    assert unpacked == {Path("transformer_engine-2.17.1/transformer_engine/a.py"), Path(compiled)}


@pytest.mark.parametrize("pyenv", [False, True], ids=["on PATH", "of pyenv, behind shims that do not work"])
def test_python_is_found(tmp_path, pyenv):
    for name in ("python3.12", "python3") if pyenv else ():
        program(tmp_path / "bin" / name, OLD)
    where = tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python" if pyenv else tmp_path / "bin" / "python3.12"
    program(where, forwarding())
    found = find_python(tmp_path, tmp_path / "bin")
    assert found.returncode == 0, found.stderr
    assert os.path.samefile(found.stdout.strip(), sys.executable)


def test_no_new_enough_python_is_a_sentence_that_says_what_to_install(tmp_path):
    program(tmp_path / "bin" / "python3", OLD)
    found = find_python(tmp_path, tmp_path / "bin")
    assert found.returncode == 1
    assert found.stdout == ""
    assert "error: no Python 3.12 or later" in found.stderr
    assert "pyenv install 3.12" in found.stderr
