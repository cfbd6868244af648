"""Tables of literals in a few lines."""

from typing import Any

import yaml


def literals(text: str) -> dict[str, Any]:
    """A table as YAML writes it between braces: flags, keys of a configuration or of a record."""
    return yaml.safe_load("{" + text + "}")
