"""Programs that a test runs to their end."""

import subprocess
from collections.abc import Sequence
from typing import Any


def ended(
    command: Sequence[Any], *, check: bool = False, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    # A program that ended, whatever its code (without `check`), with what it printed as text.
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=timeout, **options)
