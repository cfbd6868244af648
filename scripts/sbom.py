"""Print a software bill of materials (CycloneDX 1.6, JSON) of what a lock installs.

    python scripts/sbom.py scripts/locks/image.txt > sbom.cdx.json

For the image: what it adds to its base, whose own bill its maker gives. Names, versions, SHA-256 of
every file that may be installed, and what needs what, as `scripts/lock.sh` wrote them. The same lock
gives the same bill. Needs no package.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?:\s*;\s*(?P<marker>[^\\]+?))?\s*\\?$")
HASH = re.compile(r"^\s+--hash=sha256:(?P<digest>[0-9a-f]{64})\s*\\?$")
NEEDED_BY = re.compile(r"^\s+# via (?P<names>.+)$")


@dataclass(frozen=True)
class Package:
    """One entry of a lock.

    `needed_by`: names of what needs it; `marker`: where it is installed, empty: everywhere.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]

    @property
    def ref(self) -> str:
        """Its package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def packages(lock: str) -> list[Package]:
    """Entries of a lock, given its text.

    Raises:
        ValueError: a line that no lock of `scripts/lock.sh` has, or an entry without a hash.
    """
    found: list[tuple[re.Match[str], list[str], list[str]]] = []
    for number, line in enumerate(lock.splitlines(), 1):
        if entry := ENTRY.match(line):
            found.append((entry, [], []))
        elif (digest := HASH.match(line)) and found:
            found[-1][1].append(digest["digest"])
        elif (via := NEEDED_BY.match(line)) and found:
            found[-1][2].extend(via["names"].split(", "))
        elif line.strip():
            raise ValueError(f"line {number}: expected name==version, --hash=sha256: or '# via', got {line.strip()!r}")
    for entry, hashes, _ in found:
        if not hashes:
            raise ValueError(f"{entry['name']} has no hash; make the lock with scripts/lock.sh")
    return [
        Package(entry["name"], entry["version"], entry["marker"] or "", tuple(hashes), tuple(needed_by))
        for entry, hashes, needed_by in found
    ]


def bill(lock: str, project: dict[str, Any]) -> dict[str, Any]:
    """The bill of a lock's text; `project`: the table `[project]` of pyproject.toml."""
    inside = packages(lock)
    top = f"pkg:pypi/{project['name']}@{project['version']}"
    needs: dict[str, list[str]] = {top: [], **{package.ref: [] for package in inside}}
    refs = {package.name: package.ref for package in inside}
    for package in inside:
        users = [refs[name] for name in package.needed_by if name in refs]
        asked_for = project["name"] in package.needed_by or not users
        for user in (*users, *([top] if asked_for else [])):
            needs[user].append(package.ref)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, top + lock)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": top,
                "name": project["name"],
                "version": project["version"],
                "purl": top,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [_component(package) for package in inside],
        "dependencies": [{"ref": ref, "dependsOn": sorted(on)} for ref, on in needs.items()],
    }


def _component(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.ref,
        "name": package.name,
        "version": package.version,
        "purl": package.ref,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.hashes],
    }
    if package.marker:
        component["properties"] = [{"name": "installed where", "value": package.marker}]
    return component


def main() -> int:
    """Print the bill of the lock that the command line names; 2 if it is none."""
    parser = argparse.ArgumentParser(description="Print a CycloneDX bill of materials of what a lock installs.")
    parser.add_argument("lock", type=Path, help="scripts/locks/image.txt, or another of that folder")
    path = parser.parse_args().lock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        print(json.dumps(bill(path.read_text(), project), indent=2))
    except (OSError, ValueError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
