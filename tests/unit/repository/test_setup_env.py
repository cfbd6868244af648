"""scripts/setup_env.sh: finds a Python that is new enough, or says what to install."""

import os
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


def find_python(home: Path) -> subprocess.CompletedProcess[str]:
    bash = ["bash", "-c", f"PATH={home}/bin; source {SCRIPT}; find_python"]
    return ended(bash, env={"HOME": str(home), "PATH": os.environ["PATH"]})


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_wheel_that_cannot_be_had_is_said_and_leaves_the_others(tmp_path):
    # The program in place of Python has a package index with one wheel of two.
    copy = 'while [ "$1" != --dest ]; do shift; done; cp "$WHEELS"/*.whl "$2"'
    fetch = f'case "$*" in *pip*flash*) exit 1;; *pip*) {copy};; *) exec "$REAL" "$@";; esac'
    program(tmp_path / "python", f"#!/bin/bash\n{fetch}\n")
    for wheel, names in (
        ("transformer_engine-2.17.1-py3-none-any", ("transformer_engine/a.py", "transformer_engine/a.so")),
        ("megatron_core-0.18.2-cp312-cp312-manylinux", ("megatron/helpers.so", "megatron/helpers.cpp")),
    ):
        with zipfile.ZipFile(tmp_path / f"{wheel}.whl", "w") as archive:
            for name in names:
                archive.writestr(name, "x = 1")
    unpack = ["bash", "-c", f"source {SCRIPT}; PYTHON={tmp_path}/python; unpack_upstream {tmp_path}/up"]
    done = ended(unpack, env={"PATH": os.environ["PATH"], "WHEELS": str(tmp_path), "REAL": sys.executable})
    assert done.returncode == 1
    assert "The wheel of flash-attn-4==4.0.0b11 could not be had; the tests that need it will skip." in done.stderr
    unpacked = {str(path.relative_to(tmp_path / "up")) for path in (tmp_path / "up").rglob("*") if path.is_file()}
    compiled = "megatron_core-0.18.2/megatron/helpers.so"
    assert unpacked == {"transformer_engine-2.17.1/transformer_engine/a.py", compiled}


def test_python_is_found_or_it_is_said_what_to_install(tmp_path):
    program(tmp_path / "bin" / "python3", OLD)
    program(tmp_path / "bin" / "python3.12", OLD)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert "error: no Python 3.12 or later" in found.stderr
    assert "pyenv install 3.12" in found.stderr
    # of pyenv, behind shims that do not work; and on PATH
    for where in (tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", tmp_path / "bin" / "python3.12"):
        program(where, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        found = find_python(tmp_path)
        assert found.returncode == 0, found.stderr
        assert os.path.samefile(found.stdout.strip(), sys.executable)
        where.unlink()
