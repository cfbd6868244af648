"""Locks of the set-up and of the image: hashes, no proprietary package, and the bill of materials."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from scripts.sbom import bill, packages
from tests.unit.repository.test_shipping import DOCKERFILE, LOCKS, ROOT, extras, project


def test_locks_hold_what_the_package_asks_for_with_hashes_and_no_host():
    requirements = pytest.importorskip("packaging.requirements")
    table = {"": project()["dependencies"], **extras()}
    wanted = {
        "image": ("",),
        "train": ("", "train", "report"),
        "dev": ("", "train", "torch", "dev", "docs", "gurobi", "highs"),
    }
    versions: dict[str, dict[str, str]] = {}
    for path in sorted(LOCKS.glob("*.txt")):
        inside = packages(path.read_text())  # raises for an entry without a hash
        assert len({package.name for package in inside}) == len(inside), path.name
        assert "://" not in path.read_text(), f"{path.name}: which index serves it is not the lock's business"
        versions[path.stem] = {package.name: package.version for package in inside}
    for lock, names_ in wanted.items():
        for requirement in map(requirements.Requirement, (word for name in names_ for word in table[name])):
            if requirement.name in ("megatron-balance", "numpy" if lock == "image" else ""):
                continue
            of_base = lock == "image" and requirement.name == "pydantic"
            found = versions["pydantic" if of_base else lock][requirement.name.lower()]
            assert requirement.specifier.contains(found), (lock, str(requirement))
    assert versions["train"].items() <= versions["dev"].items(), "one environment serves the demo and the tests"


def test_the_image_has_no_proprietary_package_unless_asked():
    assert not [p.name for p in packages((LOCKS / "image.txt").read_text()) if p.name == "gurobipy"]
    assert re.search(r"^ARG GUROBI=$", DOCKERFILE, re.MULTILINE)
    step = next(line for line in DOCKERFILE.splitlines() if line.startswith("RUN if") and "gurobi.txt" in line)
    for given, installs in (("", 0), ("1", 1)):
        done = subprocess.run(
            ["bash", "-c", "pip() { echo installs; }; " + step.removeprefix("RUN ")],
            env={"PATH": os.environ["PATH"], "GUROBI": given},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.count("installs") == installs


def test_the_bill_of_materials_names_every_package_of_a_lock_and_what_needs_it():
    lock = (LOCKS / "image.txt").read_text() + (LOCKS / "pydantic.txt").read_text()
    told = bill(lock, project())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told == bill(lock, project()), "of one lock there is one bill"
    assert [component["name"] for component in told["components"]] == re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)
    assert lock.count("--hash=") == sum(len(component["hashes"]) for component in told["components"])
    needs = {line["ref"].split("@")[0]: {on.split("@")[0] for on in line["dependsOn"]} for line in told["dependencies"]}
    assert {"pkg:pypi/pydantic-core", "pkg:pypi/annotated-types"} <= needs["pkg:pypi/pydantic"]
    assert {"pkg:pypi/pydantic", "pkg:pypi/megatron-core"} <= needs["pkg:pypi/megatron-balance"]
    assert "pkg:pypi/mdurl" not in needs["pkg:pypi/megatron-balance"]
    for broken, said in ((lock.replace("--hash=", "--size="), "line 2: expected"), ("rich==15.0.0\n", "no hash")):
        with pytest.raises(ValueError, match=said):
            bill(broken, project())


def test_continuous_integration_says_what_it_installs():
    text = (ROOT / ".ci" / "run").read_text()
    line = next(line for line in text.splitlines() if line.startswith('echo "== packages'))
    done = subprocess.run(
        ["bash", "-c", f"browser() {{ echo chromium; }}; {line}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, beside = (len(packages((LOCKS / name).read_text())) for name in ("dev.txt", "upstream.txt"))
    assert done.stderr == (
        f"== packages: {count} of scripts/locks/dev.txt, and {beside} wheels of upstream.txt beside them, by hash, "
        "into .venv; browser: chromium\n"
    )
    assert "installing chromium from Debian" in text
